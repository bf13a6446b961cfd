// A warp's rows of a chunk, as the gradients read them: decays down the rows, and the scaled copies that products read.
#pragma once
#include "vector_backward/grads.cuh"

// rows of the slice as they came, and Pre h of each
struct Own {
    Slice<LA_DTYPE, PER> q, k;
    float a[SLICE][PER], pre[SLICE][PER], start[PER];   // a: exact only

    __device__ __forceinline__ void load(const VectorGradArguments& x, const ChunkPlace& place, const Lane& me) {
        const Sequence& s = place.of.sequence;
        const int first = place.chunk * C + me.warp * SLICE, channel = place.half * HALF + me.lane * PER, head = place.of.head;
        Slice<LA_GATE, PER> g;
        g.load(rows_of(x.g, s, head), x.g.token, channel, first, s.T);
        q.load(rows_of(x.q, s, head), x.q.token, channel, first, s.T);
        k.load(rows_of(x.k, s, head), x.k.token, channel, first, s.T);
        decays_of(pre, g);
        if constexpr (EXACT_BLOCKS)
#pragma unroll
            for (int r = 0; r < SLICE; r++)
#pragma unroll
                for (int c = 0; c < PER; c++) a[r][c] = pre[r][c];
        run_down(pre);
        me.decays().store(me.warp, me.lane, pre[SLICE - 1]);
    }
    // the decay that queries of row r read with, times h
    __device__ __forceinline__ float reads(int r, int c) const { return !BEFORE ? pre[r][c] : r ? pre[r - 1][c] : start[c]; }

    // copies of the slice; whether its block decays too far for them: by more than 2^-116 in 16 rows, in `rows` as much a row. The table of
    // decays is whole
    __device__ __forceinline__ bool copy(const Lane& me, int rows) {
        const float smallest = exp2_approx(-7.25f * min(max(rows, 0), 16));
        bool far = false;
#pragma unroll
        for (int c = 0; c < PER; c++) start[c] = EXACT_BLOCKS ? 1.f : MIDDLE;
        if (me.warp & 1) {
            float first[PER];
            me.decays().load(first, me.warp - 1, me.lane);
#pragma unroll
            for (int c = 0; c < PER; c++) {
                start[c] *= first[c];
                far |= first[c] * pre[SLICE - 1][c] < smallest;
            }
        }
        float suf[PER];
        rest(suf, me);
#pragma unroll
        for (int r = 0; r < SLICE; r++)
#pragma unroll
            for (int c = 0; c < PER; c++) pre[r][c] *= start[c];
#pragma unroll
        for (int i = 0; i < SLICE; i++) {
            const int r = EXACT_BLOCKS ? SLICE - 1 - i : i;
            float x[PER], y[PER], z[PER];
#pragma unroll
            for (int c = 0; c < PER; c++) {
                x[c] = q.at(r, c) * reads(r, c);
                y[c] = k.at(r, c) * (EXACT_BLOCKS ? suf[c] : reciprocal(fmaxf(pre[r][c], MIDDLE * SMALLEST_DECAY)));
                z[c] = k.at(r, c) * pre[r][c];
                if constexpr (EXACT_BLOCKS) suf[c] *= a[r][c];
            }
            store_row<PER>(me.row(AT_QP, r), x);
            store_row<PER>(me.row(AT_KP, r), y);
            if constexpr (ERASE) store_row<PER>(me.row(AT_KR, r), z);
        }
        return far;
    }
    // exact: decay from the slice's end to its block's
    __device__ __forceinline__ void rest(float (&x)[PER], const Lane& me) const {
        x[0] = x[1] = 1.f;
        if (EXACT_BLOCKS && !(me.warp & 1)) me.decays().load(x, me.warp + 1, me.lane);
    }
};

// rows of a chunk on their way to the cache: a lane a row and array
LA_DEVICE void prefetch_rows(const VectorGradArguments& a, const ChunkPlace& place, const Lane& me) {
    const Sequence& s = place.of.sequence;
    const int which = me.lane / SLICE, t = place.chunk * C + me.warp * SLICE + me.lane % SLICE;
    if (which > 2 || t >= s.T) return;
    const Rows& x = which == 0 ? a.q : which == 1 ? a.k : a.g;
    const char* p = rows_of(x, s, place.of.head) + t * x.token + place.half * HALF * (which == 2 && LA_GATE == 2 ? 4 : 2);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
    if (which == 2 && LA_GATE == 2) asm volatile("prefetch.global.L2 [%0];" ::"l"(p + 128));
}
