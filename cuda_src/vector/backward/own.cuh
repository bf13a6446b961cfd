// A lane's rows of a chunk, as the gradients read them: decays down the rows, and the scaled copies that products read.
#pragma once
#include "vector/backward/grads.cuh"

struct Own {
    Slice<LA_DTYPE, PER, OWN> q, k;
    float a[OWN][PER];   // e^g (exact)
    float pre[OWN][PER],
        start[PER];   // decay from the block's start to each row, to the first one without its own; else times h
    float suf[PER];   // exact: decay from the last row to the block's end

    // and the slice's decay to the table
    __device__ __forceinline__ void load(const VectorGradArguments& x, const ChunkPlace& place, const Lane& me) {
        const Sequence& s = place.of.sequence;
        const int first = place.chunk * C + me.first, channel = place.half * HALF + me.channel, head = place.of.head;
        Slice<LA_GATE, PER, OWN> g;
        g.load(rows_of(x.g, s, head), x.g.token, channel, first, s.T);
        load_rows(q, x.q, place, me);
        load_rows(k, x.k, place, me);
        float slice[PER];
#pragma unroll
        for (int r = 0; r < OWN; r++)
#pragma unroll
            for (int c = 0; c < PER; c++) {
                a[r][c] = exp2_approx(g.at(r, c) * LOG2_E);
                pre[r][c] = r ? pre[r - 1][c] * a[r][c] : a[r][c];
            }
        other_half(slice, pre[OWN - 1]);
#pragma unroll
        for (int c = 0; c < PER; c++) {
            start[c] = me.upper() ? slice[c] : 1.f;
            suf[c] = me.upper() ? 1.f : slice[c];
            slice[c] *= pre[OWN - 1][c];
        }
        if (!me.upper()) me.decays().store(me.warp, me.channel, slice);
    }
    // the decay that queries of row r read with
    __device__ __forceinline__ float reads(int r, int c) const {
        return !BEFORE ? pre[r][c] : r ? pre[r - 1][c] : start[c];
    }

    // decays from and to the ends of the block, and its own to the table. Whether it decays too far for copies that are
    // divided by decays: by more than 2^-116 in 16 rows, in `rows` as much a row. The table of slices is whole
    __device__ __forceinline__ bool extend(const Lane& me, int rows) {
        const float smallest = exp2_approx(-7.25f * min(max(rows, 0), 16));
        float before[PER], behind[PER], block[PER];
        bool far = false;
        me.decays().load(before, me.warp & ~1, me.channel);
        me.decays().load(behind, me.warp | 1, me.channel);
#pragma unroll
        for (int c = 0; c < PER; c++) {
            block[c] = before[c] * behind[c];
            far |= block[c] < smallest;
            const float from_start = (me.warp & 1 ? before[c] : 1.f) * (EXACT_BLOCKS ? 1.f : MIDDLE);
            start[c] *= from_start;
#pragma unroll
            for (int r = 0; r < OWN; r++) pre[r][c] = r ? pre[r - 1][c] * a[r][c] : start[c] * a[r][c];
            if (!(me.warp & 1)) suf[c] *= behind[c];
        }
        if (!(me.warp & 1) && !me.upper())
            store_four(me.shared + AT_BLOCKS + (me.warp / 2 * HALF + me.channel) * 4, block);
        return far;
    }
    // of row r: q and k as the copies have them before rounding
    __device__ __forceinline__ float query(int r, int c) const { return q.at(r, c) * reads(r, c); }
    __device__ __forceinline__ float over(int r, int c) const {
        return reciprocal(fmaxf(pre[r][c], MIDDLE * SMALLEST_DECAY));
    }
    __device__ __forceinline__ float erases(int r, int c) const { return k.at(r, c) * pre[r][c]; }

    // a copy's row, and its rounding error if that has a place
    static __device__ __forceinline__ void store_terms(int at, int rest, const float (&x)[PER], int r, const Lane& me) {
        store_row<PER>(me.row(at, r), x);
        if constexpr (RESTS_APART) store_words(me.row(rest, r), rest_of(x[0], x[1]), rest_of(x[2], x[3]));
    }
    // scaled copies of the rows
    __device__ __forceinline__ void copy(const Lane& me) const {
        float rest[PER] = {suf[0], suf[1], suf[2], suf[3]};
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int r = EXACT_BLOCKS ? OWN - 1 - i : i;
            float x[PER], y[PER], z[PER];
#pragma unroll
            for (int c = 0; c < PER; c++) {
                x[c] = query(r, c);
                y[c] = k.at(r, c) * (EXACT_BLOCKS ? rest[c] : over(r, c));
                z[c] = erases(r, c);
                if constexpr (EXACT_BLOCKS) rest[c] *= a[r][c];
            }
            store_terms(AT_QP, AT_QP_REST, x, r, me);
            store_terms(AT_KP, AT_KP_REST, y, r, me);
            if constexpr (ERASE) store_row<PER>(me.row(AT_KR, r), z);
        }
    }
    // q or k again, with erase: held over the products they would take registers that those need
    __device__ __forceinline__ void load_rows(Slice<LA_DTYPE, PER, OWN>& to, const Rows& rows, const ChunkPlace& place,
                                              const Lane& me) {
        const Sequence& s = place.of.sequence;
        to.load(rows_of(rows, s, place.of.head), rows.token, place.half * HALF + me.channel,
                opaque(place.chunk * C + me.first), s.T);
    }
    // the copies' second terms, with erase
    __device__ __forceinline__ void copy_rest(const VectorGradArguments& x, const ChunkPlace& place, const Lane& me) {
        load_rows(q, x.q, place, me);
        store_rest(me, AT_QP_REST, [&](int r, int c) { return query(r, c); });
        load_rows(k, x.k, place, me);
        store_rest(me, AT_KP_REST, [&](int r, int c) { return k.at(r, c) * over(r, c); });
        if constexpr (ERASE) store_rest(me, AT_KR_REST, [&](int r, int c) { return erases(r, c); });
    }
    template <class F> __device__ __forceinline__ void store_rest(const Lane& me, int at, F f) const {
#pragma unroll
        for (int r = 0; r < OWN; r++)
#pragma unroll
            for (int c = 0; c < PER; c += 2) store_shared_u32(me.row(at, r) + c * 2, rest_of(f(r, c), f(r, c + 1)));
    }
};
