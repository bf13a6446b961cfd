// Pairs inside a block of 16 rows one by one, in float32: for chunks of which a block decays by more than its scaled copies hold.
// The decay of a pair is a product down the rows between them, so that any log decay in [-inf, 0] is exact. Pairs that no decay crosses,
// i = j or with BEFORE i = j + 1, are left out of the dots: they would be the largest.
#pragma once
#include "vector_backward/own.cuh"

// q, k and e^g of the chunk as they came, in places that the products have left; each lane reads its own channels of all rows
struct Raw {
    u32 a, q, k, z, y;   // a lane's channels of row 0; grams
    int warp, lane;
    __device__ __forceinline__ Raw(const Lane& me)
        : a(me.shared + AT_RAW_A + me.lane * 8), q(me.shared + AT_RAW_Q + me.lane * 4), k(me.shared + AT_RAW_K + me.lane * 4),
          z(me.shared + AT_Z), y(me.shared + AT_Y), warp(me.warp), lane(me.lane) {}
    __device__ __forceinline__ void store(const Own& own) const {
#pragma unroll
        for (int r = 0; r < SLICE; r++) {
            const int t = warp * SLICE + r;
            store_shared2(a + t * 256, own.a[r][0], own.a[r][1]);
            store_shared_u32(q + t * 128, own.q.x[r][0]);
            store_shared_u32(k + t * 128, own.k.x[r][0]);
        }
    }
    static __device__ __forceinline__ void load(float (&x)[PER], u32 at) {
        const u32 y = __float_as_uint(load_shared(at));
        x[0] = LA_DTYPE == 1 ? low_f16(y) : low_bf16(y);
        x[1] = LA_DTYPE == 1 ? high_f16(y) : high_bf16(y);
    }
    __device__ __forceinline__ void decay(float (&x)[PER], int t) const {
        const float2 y = load_shared2(a + t * 256);
        x[0] = y.x;
        x[1] = y.y;
    }
    static __device__ __forceinline__ float gram(u32 tile, int i, int j) {
        u16 x;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(tile + Square::at(i, j)));
        return __uint_as_float((u32)x << 16);
    }
};

// Of each row of the slice: what the earlier rows of its block give it as a reader, the later rows as a writer, with the decays between
struct Pairs {
    float read[SLICE][PER], write[SLICE][PER], erase[SLICE][PER];

    // row j of the block, from which `base` decays to the slice's start (own rows: all later ones), to all rows of the slice that read it
    __device__ __forceinline__ void read_row(const Raw& raw, const Own& own, int j, const float (&base)[PER]) {
        float k[PER], w[PER] = {base[0], base[1]};
        Raw::load(k, raw.k + j * 128);
#pragma unroll
        for (int r = 0; r < SLICE; r++) {
            const int t = raw.warp * SLICE + r;
            const bool later = t > j;
            const float z = later ? Raw::gram(raw.z, t, j) : 0.f, y = ERASE && later ? Raw::gram(raw.y, t, j) : 0.f;
#pragma unroll
            for (int c = 0; c < PER; c++) {
                const float next = later ? w[c] * own.a[r][c] : w[c], f = k[c] * (BEFORE ? w[c] : next);
                read[r][c] += z * f;
                if constexpr (ERASE) erase[r][c] += y * f;
                w[c] = next;
            }
        }
    }
    // row i of the block, `base`: decay from the slice's end to where it reads (own rows: all earlier ones), to all rows of the slice that write for it
    __device__ __forceinline__ void write_row(const Raw& raw, const Own& own, int i, const float (&base)[PER]) {
        float q[PER], k[PER] = {0.f, 0.f}, w[PER] = {base[0], base[1]};
        Raw::load(q, raw.q + i * 128);
        if constexpr (ERASE) Raw::load(k, raw.k + i * 128);
#pragma unroll
        for (int r = SLICE - 1; r >= 0; r--) {
            const int t = raw.warp * SLICE + r;
            const bool earlier = t < i, inside = t + 1 + BEFORE <= i && r + 1 < SLICE;   // row t + 1 is of the path to i
            const float z = earlier ? Raw::gram(raw.z, i, t) : 0.f, y = ERASE && earlier ? Raw::gram(raw.y, i, t) : 0.f;
#pragma unroll
            for (int c = 0; c < PER; c++) {
                if (r + 1 < SLICE) w[c] = inside ? w[c] * own.a[r + 1 < SLICE ? r + 1 : r][c] : w[c];
                write[r][c] += (z * q[c] + y * k[c]) * w[c];
            }
        }
    }
    __device__ __forceinline__ void make(const Raw& raw, const Own& own, const Lane& me) {
        const int first = me.warp * SLICE, block = first & ~15, last = block + 15;
        float w[PER] = {1.f, 1.f}, a[PER];
        const float one[PER] = {1.f, 1.f};
#pragma unroll
        for (int r = 0; r < SLICE; r++)
#pragma unroll
            for (int c = 0; c < PER; c++) read[r][c] = write[r][c] = erase[r][c] = 0.f;
#pragma unroll 1
        for (int j = first - 1; j >= block; j--) {   // of the slice before
            read_row(raw, own, j, w);
            raw.decay(a, j);
            w[0] *= a[0];
            w[1] *= a[1];
        }
#pragma unroll 1
        for (int t = first; t < first + SLICE; t++) {
            read_row(raw, own, t, one);
            write_row(raw, own, t, one);
        }
        w[0] = w[1] = 1.f;
#pragma unroll 1
        for (int i = first + SLICE; i <= last; i++) {   // of the slice behind
            raw.decay(a, i);
            if (!BEFORE) { w[0] *= a[0]; w[1] *= a[1]; }
            write_row(raw, own, i, w);
            if (BEFORE) { w[0] *= a[0]; w[1] *= a[1]; }
        }
    }
    // to the gradients of row r of the slice, t of the chunk, and to their dots. suf: decay from the row to its block's end
    __device__ __forceinline__ void add_to(float (&dq)[PER], float (&dk)[PER], float (&reads)[PER], float (&writes)[PER], const float (&suf)[PER],
                                           const Own& own, int r, int t, const Lane& me) const {
        const Raw raw(me);
        const float2 given = load_shared2(me.staged(AT_GIVEN, r));
        const float g[PER] = {given.x, given.y};
        const u32 copies = __float_as_uint(load_shared(me.row(AT_KP, r)));
        store_shared2(me.staged(AT_GIVEN, r), low_bf16(copies) * g[0], high_bf16(copies) * g[1]);
        const float diagonal = BEFORE ? 0.f : Raw::gram(raw.z, t, t);
        const float before = BEFORE && t ? load_shared(me.shared + AT_NEAR + t * 4) : 0.f;
        const float after = BEFORE && t + 1 < C ? load_shared(me.shared + AT_NEAR + (t + 1) * 4) : 0.f;
        float k[PER], q[PER];
        if constexpr (BEFORE) {
            Raw::load(k, raw.k + (t ? t - 1 : 0) * 128);
            Raw::load(q, raw.q + (t + 1 < C ? t + 1 : t) * 128);
        }
#pragma unroll
        for (int c = 0; c < PER; c++) {
            reads[c] += own.q.at(r, c) * read[r][c];
            writes[c] += own.k.at(r, c) * write[r][c];
            dq[c] += read[r][c] + (BEFORE ? before * k[c] : diagonal * own.k.at(r, c));
            dk[c] += write[r][c] + g[c] * suf[c] + (BEFORE ? after * q[c] : diagonal * own.q.at(r, c));
        }
    }
};

// what rows before have written for G, to the gate gradients of the slice's rows
LA_DEVICE void add_given(float (&db)[SLICE][PER], const Lane& me) {
    float earlier[PER] = {0.f, 0.f};
#pragma unroll
    for (int r = 0; r < SLICE; r++) {
        const float2 x = load_shared2(me.staged(AT_GIVEN, r));
#pragma unroll
        for (int c = 0; c < PER; c++) {
            db[r][c] += earlier[c];
            earlier[c] += c ? x.y : x.x;
        }
    }
    SliceTable<PER>{me.shared + AT_GIVEN_SUMS}.store(me.warp, me.lane, earlier);
}
