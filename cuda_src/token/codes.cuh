// States of few bits: whole numbers, four columns of a row at a time. int16 and int8 each by itself; int12 as an int8,
// the upper eight bits, and a byte of two columns' lower fours, the even one below.
#pragma once
#include "ops/element.cuh"

template <int BITS> struct Codes {
    static constexpr int BYTES = BITS == 16 ? 2 : 1;
    u32 w[BYTES], low;
    // row, column: of matrices (rows, V); WIDE: V is a multiple of 4, and rows begin at one of 4 BYTES
    template <int V, bool WIDE>
    __device__ __forceinline__ void load(const char* from, const char* from_low, i64 row, int column) {
        const char *x = from + (row * V + column) * BYTES, *y = from_low + row * ((V + 1) / 2) + column / 2;
        w[0] = w[BYTES - 1] = low = 0;
        if constexpr (WIDE) {
            if (column >= V) return;
#pragma unroll
            for (int i = 0; i < BYTES; i++) w[i] = ((const Part<4 * BYTES>*)x)->w[i];
            if constexpr (BITS == 12) low = *(const u16*)y;
        } else
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (column + j >= V) continue;
                if constexpr (BITS == 16) w[j / 2] |= (u32)((const u16*)x)[j] << 16 * (j % 2);
                else w[0] |= (u32)((const unsigned char*)x)[j] << 8 * j;
                if constexpr (BITS == 12)
                    if (j % 2 == 0) low |= (u32)((const unsigned char*)y)[j / 2] << 4 * j;
            }
    }
    // not held as floats over a loop over tokens
    __device__ __forceinline__ Codes opaque_copy() const {
        Codes x = *this;
#pragma unroll
        for (int i = 0; i < BYTES; i++) x.w[i] = opaque(w[i]);
        return x;
    }
    // A whole number n from 0 to 2^16 - 1 is the lower half of the float 2^23 + n; codes are those less HALF
    template <class T> __device__ __forceinline__ void get(T (&x)[4]) const {
        constexpr u32 TWO_23 = 0x4b000000;
        constexpr float HALF = 1 << (BITS - 1);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 y;
            if constexpr (BITS == 16) y = __byte_perm(w[j / 2] ^ 0x80008000, TWO_23, j % 2 ? 0x7432 : 0x7410);
            else y = __byte_perm(w[0] ^ 0x80808080, TWO_23, 0x7440 + j);
            if constexpr (BITS == 12) y = TWO_23 | (y & 255) << 4 | (low >> 4 * j & 15);
            x[j] = __uint_as_float(y) - (8388608.f + HALF);
        }
    }
    template <int V, bool WIDE>
    __device__ __forceinline__ static void store(char* to, char* to_low, i64 row, int column, const int (&code)[4]) {
        char *x = to + (row * V + column) * BYTES, *y = to_low + row * ((V + 1) / 2) + column / 2;
        const auto upper = [&](int j) { return (u32)(BITS == 12 ? code[j] >> 4 : code[j]); };
        if constexpr (WIDE) {
            if (column >= V) return;
            Part<4 * BYTES> all;
            if constexpr (BITS == 16) {
                all.w[0] = (upper(0) & 0xffff) | upper(1) << 16;
                all.w[BYTES - 1] = (upper(2) & 0xffff) | upper(3) << 16;
            } else all.w[0] = (upper(0) & 255) | (upper(1) & 255) << 8 | (upper(2) & 255) << 16 | upper(3) << 24;
            *(Part<4 * BYTES>*)x = all;
        } else
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (column + j >= V) continue;
                if constexpr (BITS == 16) ((u16*)x)[j] = (u16)upper(j);
                else x[j] = (char)upper(j);
            }
        if constexpr (BITS == 12)
#pragma unroll
            for (int j = 0; j < 4; j += 2)
                if (column + j < V) y[j / 2] = (char)((code[j] & 15) | (code[j + 1] & 15) << 4);
    }
};
