// Pairs inside a block of 16 rows one by one, in float32: for chunks with a block that decays by more than its scaled
// copies hold. The decay of a pair is a product down the rows between them, so that any log decay in [-inf, 0] is exact.
// Pairs that no decay crosses, i = j or with BEFORE i = j + 1, are left out of the dots: they would be the largest.
#pragma once
#include "vector/backward/own.cuh"

// q, k and e^g of the chunk as they came, in places that the products have left; each lane reads its own channels of
// all rows
struct Raw {
    u32 a, q, k, z, y;   // a lane's channels of row 0; grams
    __device__ __forceinline__ Raw(const Lane& me)
        : a(me.shared + AT_RAW_A + me.channel * 4),
          q(me.shared + AT_RAW_Q + me.channel * 2),
          k(me.shared + AT_RAW_K + me.channel * 2),
          z(me.shared + AT_Z),
          y(me.shared + AT_Y) {}
    __device__ __forceinline__ void store(const Own& own, const Lane& me) const {
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            const int t = me.first + r;
            store_four(a + t * 256, own.a[r]);
            store_shared2(q + t * 128, __uint_as_float(own.q.x[r][0]), __uint_as_float(own.q.x[r][1]));
            store_shared2(k + t * 128, __uint_as_float(own.k.x[r][0]), __uint_as_float(own.k.x[r][1]));
        }
    }
    static __device__ __forceinline__ void load(float (&x)[PER], u32 at) {
        const float2 y = load_shared2(at);
        Slice<LA_DTYPE, PER, 1> row;
        row.x[0][0] = __float_as_uint(y.x);
        row.x[0][1] = __float_as_uint(y.y);
#pragma unroll
        for (int c = 0; c < PER; c++) x[c] = row.at(0, c);
    }
    static __device__ __forceinline__ float gram(u32 tile, int i, int j) {
        const u32 at = tile + Square::at(i, j);
        return TWO_TERMS ? load_bf16(at) + load_bf16(at + AT_Z_REST - AT_Z) : load_bf16(at);
    }
    // entries (i, j) .. (i, j + 3), j a multiple of 4
    static __device__ __forceinline__ void gram_row(float (&x)[OWN], u32 tile, int i, int j) {
        const u32 at = tile + Square::at(i, j);
        if constexpr (TWO_TERMS) load_terms(x, at, at + AT_Z_REST - AT_Z);
        else load_copies(x, at);
    }
};

// Of each of a lane's rows: the terms of the earlier rows of its block as a reader, the later rows as a writer, with
// the decays between
struct Pairs {
    float read[OWN][PER], write[OWN][PER], erase[OWN][PER];

    // with rows of the block before the lane's own: decays to the own rows are those to the first of them, and those
    // from there on
    __device__ __forceinline__ void read_earlier(const Raw& raw, const Own& own, const Lane& me) {
        float base[PER] = {1.f, 1.f, 1.f, 1.f}, down[PER] = {1.f, 1.f, 1.f, 1.f};
        const int last = (me.warp * SLICE | 4) - 1;   // of the rows before the upper lanes'; the lower lanes have fewer
#pragma unroll 1
        for (int j = last; j >= (me.first & ~15); j--) {
            const bool earlier = j < me.first;
            float k[PER], a[PER], z[OWN], y[OWN];
            Raw::load(k, raw.k + j * 128);
            load_four(a, raw.a + j * 256);
#pragma unroll
            for (int r = 0; r < OWN; r++) {
                z[r] = Raw::gram(raw.z, me.first + r, j);
                if constexpr (ERASE) y[r] = Raw::gram(raw.y, me.first + r, j);
            }
#pragma unroll
            for (int c = 0; c < PER; c++) {
                const float f = earlier ? k[c] * base[c] : 0.f;
                base[c] *= earlier ? a[c] : 1.f;
#pragma unroll
                for (int r = 0; r < OWN; r++) {
                    read[r][c] += z[r] * f;
                    if constexpr (ERASE) erase[r][c] += y[r] * f;
                }
            }
        }
#pragma unroll
        for (int r = 0; r < OWN; r++)
#pragma unroll
            for (int c = 0; c < PER; c++) {
                if (!BEFORE) down[c] *= own.a[r][c];
                read[r][c] *= down[c];
                if constexpr (ERASE) erase[r][c] *= down[c];
                if (BEFORE) down[c] *= own.a[r][c];
            }
    }
    // with rows of the block behind the lane's own
    __device__ __forceinline__ void write_later(const Raw& raw, const Own& own, const Lane& me) {
        float base[PER] = {1.f, 1.f, 1.f, 1.f}, up[PER] = {1.f, 1.f, 1.f, 1.f};
        const int first = me.warp * SLICE + OWN;   // behind the lower lanes' own; the upper lanes have fewer
#pragma unroll 1
        for (int i = first; i <= (me.first | 15); i++) {
            const bool later = i >= me.first + OWN;
            float q[PER], k[PER] = {0.f, 0.f, 0.f, 0.f}, a[PER], z[OWN], y[OWN];
            Raw::load(q, raw.q + i * 128);
            load_four(a, raw.a + i * 256);
            Raw::gram_row(z, raw.z, i, me.first);
            if constexpr (ERASE) {
                Raw::load(k, raw.k + i * 128);
                Raw::gram_row(y, raw.y, i, me.first);
            }
#pragma unroll
            for (int c = 0; c < PER; c++) {
                const float w = base[c] * a[c], f = later ? q[c] * (BEFORE ? base[c] : w) : 0.f,
                            g = later ? k[c] * w : 0.f;
                base[c] = later ? w : base[c];
#pragma unroll
                for (int r = 0; r < OWN; r++) {
                    write[r][c] += z[r] * f;
                    if constexpr (ERASE) write[r][c] += y[r] * g;
                }
            }
        }
#pragma unroll
        for (int r = OWN - 1; r >= 0; r--)
#pragma unroll
            for (int c = 0; c < PER; c++) {
                write[r][c] *= up[c];
                up[c] *= own.a[r][c];
            }
    }
    // of the lane's own rows
    __device__ __forceinline__ void own_pairs(const Raw& raw, const Own& own, const Lane& me) {
#pragma unroll
        for (int j = 0; j + 1 < OWN; j++) {
            float w[PER] = {1.f, 1.f, 1.f, 1.f};
#pragma unroll
            for (int i = j + 1; i < OWN; i++) {
                const float z = Raw::gram(raw.z, me.first + i, me.first + j),
                            y = ERASE ? Raw::gram(raw.y, me.first + i, me.first + j) : 0.f;
#pragma unroll
                for (int c = 0; c < PER; c++) {
                    if (!BEFORE) w[c] *= own.a[i][c];
                    read[i][c] += z * own.k.at(j, c) * w[c];
                    write[j][c] += z * own.q.at(i, c) * w[c];
                    if constexpr (ERASE) {
                        erase[i][c] += y * own.k.at(j, c) * w[c];
                        write[j][c] += y * own.k.at(i, c) * w[c];
                    }
                    if (BEFORE) w[c] *= own.a[i][c];
                }
            }
        }
    }
    __device__ __forceinline__ void make(const Raw& raw, const Own& own, const Lane& me) {
#pragma unroll
        for (int r = 0; r < OWN; r++)
#pragma unroll
            for (int c = 0; c < PER; c++) read[r][c] = write[r][c] = erase[r][c] = 0.f;
        read_earlier(raw, own, me);
        write_later(raw, own, me);
        own_pairs(raw, own, me);
    }
    // to the gradients of the lane's row r, and to their dots. suf: decay from the row to its block's end
    __device__ __forceinline__ void add_to(float (&dq)[PER], float (&dk)[PER], float (&reads)[PER],
                                           float (&writes)[PER], const float (&suf)[PER], const Own& own, int r,
                                           const Lane& me) const {
        const Raw raw(me);
        const int t = me.first + r;
        float given[PER], k[PER], q[PER];
        load_four(given, me.staged(AT_GIVEN, r));
#pragma unroll
        for (int c = 0; c < PER; c++) {
            reads[c] += own.q.at(r, c) * read[r][c];
            writes[c] += own.k.at(r, c) * write[r][c];
            dq[c] += read[r][c];
            given[c] *= suf[c];
            dk[c] += write[r][c] + given[c];
            given[c] *= own.k.at(r, c);
        }
        store_four(me.staged(AT_GIVEN, r), given);
        if constexpr (BEFORE) {   // with the neighbours
            const float before = t ? load_shared(me.shared + AT_NEAR + t * 4) : 0.f;
            const float after = t + 1 < C ? load_shared(me.shared + AT_NEAR + (t + 1) * 4) : 0.f;
            Raw::load(k, raw.k + (t ? t - 1 : 0) * 128);
            Raw::load(q, raw.q + (t + 1 < C ? t + 1 : t) * 128);
#pragma unroll
            for (int c = 0; c < PER; c++) {
                dq[c] += before * k[c];
                dk[c] += after * q[c];
            }
        } else {
            const float diagonal = Raw::gram(raw.z, t, t);
#pragma unroll
            for (int c = 0; c < PER; c++) {
                dq[c] += diagonal * own.k.at(r, c);
                dk[c] += diagonal * own.q.at(r, c);
            }
        }
    }
};

// Terms of earlier rows for G, to the gate gradients of the lane's rows; and the slice's to its table
LA_DEVICE void add_given(float (&db)[OWN][PER], const Lane& me) {
    float x[OWN][PER], sum[PER] = {0.f, 0.f, 0.f, 0.f}, other[PER];
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        load_four(x[r], me.staged(AT_GIVEN, r));
#pragma unroll
        for (int c = 0; c < PER; c++) sum[c] += x[r][c];
    }
    other_half(other, sum);
#pragma unroll
    for (int c = 0; c < PER; c++) {
        float earlier = me.upper() ? other[c] : 0.f;
        sum[c] += other[c];
#pragma unroll
        for (int r = 0; r < OWN; r++) {
            db[r][c] += earlier;
            earlier += x[r][c];
        }
    }
    if (!me.upper()) Table{me.shared + AT_GIVEN_SUMS}.store(me.warp, me.channel, sum);
}
