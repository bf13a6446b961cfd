// Pairs inside a block of 16 rows one by one, in float32: for chunks of which a block decays by more than its scaled copies hold.
// The decay of a pair is a product down the rows between them, so that any log decay in [-inf, 0] is exact; the pair i = j, which no
// decay crosses, is left out of the dots.
#pragma once
#include "vector/horner.cuh"

// q, k and e^g of the chunk as they came, in places that the products have left; each lane reads its own channels of all rows
struct Raw {
    u32 a, q, k, z, y;   // a lane's channels of row 0; grams
    int warp, lane;
    __device__ __forceinline__ Raw(const Lane& me)
        : a(me.shared + AT_RAW_A + me.lane * 8), q(me.shared + AT_RAW_Q + me.lane * 4), k(me.shared + AT_RAW_K + me.lane * 4),
          z(me.shared + AT_Z), y(me.shared + AT_Y), warp(me.warp), lane(me.lane) {}
    __device__ __forceinline__ void store(const Slice<LA_DTYPE, PER>& rows_q, const Slice<LA_DTYPE, PER>& rows_k, const float (&decays)[SLICE][PER]) const {
#pragma unroll
        for (int r = 0; r < SLICE; r++) {
            const int t = warp * SLICE + r;
            store_shared2(a + t * 256, decays[r][0], decays[r][1]);
            store_shared_u32(q + t * 128, rows_q.x[r][0]);
            store_shared_u32(k + t * 128, rows_k.x[r][0]);
        }
    }
    static __device__ __forceinline__ float2 copied(u32 at) {   // of a scaled copy
        const u32 x = __float_as_uint(load_shared(at));
        return {low_bf16(x), high_bf16(x)};
    }
    static __device__ __forceinline__ float2 came(u32 at) {
        const u32 x = __float_as_uint(load_shared(at));
        return LA_DTYPE == 1 ? float2{low_f16(x), high_f16(x)} : float2{low_bf16(x), high_bf16(x)};
    }
    __device__ __forceinline__ float2 query(int t) const { return came(q + t * 128); }
    __device__ __forceinline__ float2 key(int t) const { return came(k + t * 128); }
    __device__ __forceinline__ float2 decay(int t) const { return load_shared2(a + t * 256); }
    static __device__ __forceinline__ float gram(u32 tile, int i, int j) {
        u16 x;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(tile + Square::at(i, j)));
        return __uint_as_float((u32)x << 16);
    }
};
LA_DEVICE void add(float2& x, float f, float2 y, float2 w) {
    x.x += f * y.x * w.x;
    x.y += f * y.y * w.y;
}
LA_DEVICE void multiply(float2& x, float2 y) {
    x.x *= y.x;
    x.y *= y.y;
}

// Of one row: what its block's earlier rows give it as a reader, its later rows as a writer, with the decays between; pre: from the
// block's start to where it reads, suf: from it to the block's end
struct RowPairs {
    float2 read = {0.f, 0.f}, erase = {0.f, 0.f}, write = {0.f, 0.f}, pre = {1.f, 1.f}, pre_erase = {1.f, 1.f}, suf = {1.f, 1.f};
    __device__ __forceinline__ RowPairs(const Raw& raw, int t) {
        const int first = t & ~15, last = t | 15;
#pragma unroll 4
        for (int j = t - 1; j >= first; j--) {   // pre: of rows j + 1 .. t, with BEFORE .. t - 1
            if (!BEFORE || j + 1 < t) multiply(pre, raw.decay(j + 1));
            add(read, Raw::gram(raw.z, t, j), raw.key(j), pre);
            if constexpr (ERASE) add(erase, Raw::gram(raw.y, t, j), raw.key(j), pre);
        }
        pre_erase = pre;
        if (!BEFORE || t > first) multiply(pre, raw.decay(first));
        if constexpr (ERASE) pre_erase = pre;
        float2 w = {1.f, 1.f};
#pragma unroll 4
        for (int i = t + 1; i <= last; i++) {   // suf: of rows t + 1 .. i; w: as far as row i reads
            multiply(suf, raw.decay(i));
            if (!BEFORE) w = suf;
            add(write, Raw::gram(raw.z, i, t), raw.query(i), w);
            if constexpr (ERASE) add(write, Raw::gram(raw.y, i, t), raw.key(i), w);
            if (BEFORE) w = suf;
        }
    }
};

// dq and dk of the slice to memory; db[r] becomes the sum of db over its own rows from r on, and of what its earlier rows write for G
LA_DEVICE void exact_rows(float (&db)[SLICE][PER], float (&bonus)[PER], const Raw& raw, const VectorGradArguments& a, const ChunkPlace& place, const Lane& me) {
    const int first = place.chunk * C + me.warp * SLICE, channel = place.half * HALF + me.lane * PER, left = channel < LA_K ? place.of.sequence.T - first : 0;
    char* const to_q = own_rows(a.dq, place.of.sequence, place.of.head) + first * a.dq.token + channel * 2;
    char* const to_k = own_rows(a.dk, place.of.sequence, place.of.head) + first * a.dk.token + channel * 2;
    const float2 u = BONUS && channel < LA_K ? *(const float2*)(a.u + (u32)place.of.head / (u32)a.group_u * LA_K + channel) : float2{};
#pragma unroll 1
    for (int r = SLICE - 1; r >= 0; r--) {
        const int t = me.warp * SLICE + r;
        const u32 at_read = me.staged(AT_READS, r), at_write = me.staged(AT_WRITES, r), at_given = me.staged(AT_GIVEN, r);
        const float2 x = load_shared2(at_read), y = load_shared2(at_write), given = load_shared2(at_given), q = raw.query(t), k = raw.key(t);
        const float2 qs = Raw::copied(me.row(AT_QP, r)), ks = Raw::copied(me.row(AT_KP, r));
        const RowPairs pairs(raw, t);
        const float own = BONUS ? load_shared(me.shared + AT_OWN + t * 4) : BEFORE ? 0.f : Raw::gram(raw.z, t, t);
        float2 dq = {x.x * pairs.pre.x + pairs.read.x, x.y * pairs.pre.y + pairs.read.y};
        float2 dk = {(y.x + given.x) * pairs.suf.x + pairs.write.x, (y.y + given.y) * pairs.suf.y + pairs.write.y};
        float2 read = {qs.x * x.x + q.x * pairs.read.x, qs.y * x.y + q.y * pairs.read.y};
        const float2 write = {ks.x * y.x + k.x * pairs.write.x, ks.y * y.y + k.y * pairs.write.y};
        if constexpr (ERASE) {
            const float2 e = load_shared2(me.staged(AT_ERASES, r)), kr = Raw::copied(me.row(AT_KR, r));
            const float2 dots = {kr.x * e.x + k.x * pairs.erase.x, kr.y * e.y + k.y * pairs.erase.y};
            dk.x += e.x * pairs.pre_erase.x + pairs.erase.x;
            dk.y += e.y * pairs.pre_erase.y + pairs.erase.y;
            read.x += dots.x;
            read.y += dots.y;
            const float sum = warp_sum(dots.x + dots.y);
            if (me.lane == 0 && r < left) a.erase_dots[(place.half * (i64)a.heads + place.of.head) * a.tokens + place.of.sequence.index + first + r] = sum;
        }
        const float2 w = BONUS ? float2{own * u.x, own * u.y} : float2{own, own};
        dq.x += w.x * k.x;
        dq.y += w.y * k.y;
        dk.x += w.x * q.x;
        dk.y += w.y * q.y;
        bonus[0] += own * q.x * k.x;
        bonus[1] += own * q.y * k.y;
        if (r < left) {
            asm volatile("st.global.b32 [%0], %1;" ::"l"(to_q + r * a.dq.token), "r"(pack_bf16(dq.x, dq.y)) : "memory");
            asm volatile("st.global.b32 [%0], %1;" ::"l"(to_k + r * a.dk.token), "r"(pack_bf16(dk.x, dk.y)) : "memory");
        }
        store_shared2(at_read, read.x, read.y);
        store_shared2(at_write, write.x, write.y);
        store_shared2(at_given, ks.x * given.x, ks.y * given.y);
    }
    float later[PER] = {0.f, 0.f};
#pragma unroll
    for (int r = SLICE - 1; r >= 0; r--) {
        const float2 x = load_shared2(me.staged(AT_READS, r)), y = load_shared2(me.staged(AT_WRITES, r));
        const float read[PER] = {x.x, x.y}, write[PER] = {y.x, y.y};
#pragma unroll
        for (int c = 0; c < PER; c++) {
            db[r][c] = (BEFORE ? later[c] : later[c] + read[c]) - write[c];
            later[c] = BEFORE ? db[r][c] + read[c] : db[r][c];
        }
    }
    SliceTable<PER>{me.shared + AT_SUMS}.store(me.warp, me.lane, later);
    float earlier[PER] = {0.f, 0.f};   // what rows before have written for G
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
