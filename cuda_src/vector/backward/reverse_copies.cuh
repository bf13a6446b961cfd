// Warpgroups 2 and 3 of the reverse chain: scaled copies of the chunks ahead.
#pragma once
#include "vector/backward/reverse.cuh"
#include "tile/prefetch.cuh"

// log decays of the next chunk in registers; scaled copies of this one in place of q and k
struct Producer {
    const VectorReverseArguments& a;
    const ReverseTraversal& traversal;
    u32 shared;
    Ring<STAGES> ring;
    int warp, lane;
    const char* g;
    Slice<LA_GATE, PER> gates;

    __device__ __forceinline__ void load(int step) {
        gates.load(g, a.g.token, lane * PER, traversal.chunk(step) * C + warp * SLICE, traversal.of.sequence.T);
    }
    __device__ __forceinline__ void load_tiles(int step) const {
        const int chunk = traversal.chunk(step), head = traversal.of.head, token = traversal.of.token(chunk),
                  row = traversal.of.row;
        const u32 at = shared + step % STAGES * STAGE, full = loaded(shared, step);
        barrier_expect(
            full, ADDS ? KEY_BYTES + TILE_BYTES : 2 * KEY_BYTES + TILE_BYTES + 2 * Square::SIZE + ERASE * STRENGTHS);
        keys_in(at + AT_Q, a.q, full, (u32)head / (u32)a.group_q, token, row);
        if (!ADDS) keys_in(at + AT_K, a.k, full, (u32)head / (u32)a.group_k, token, row);
        tile_in(at + AT_DOUT, a.dout, full, head, token, row);
        if (!ADDS) run_in(at + AT_GRAM, a.grams + (traversal.of.block + chunk) * LA_GRAM, LA_GRAM, full);
        if constexpr (ERASE)
            run_in(at + AT_INVERSE, a.inverses + (traversal.of.block + chunk) * LA_INVERSE, LA_INVERSE, full);
    }
    // v of a chunk
    __device__ __forceinline__ void load_values(int step) const {
        barrier_expect(shared + AT_VALUES_LOADED, TILE_BYTES);
        tile_in(shared + AT_VALUES, a.v, shared + AT_VALUES_LOADED, (u32)traversal.of.head / (u32)a.group_v,
                traversal.of.token(traversal.chunk(step)), traversal.of.row);
    }
    // a chunk's tiles towards the cache, while their stage is still read
    __device__ __forceinline__ void prefetch_tiles(int step) const {
        const int chunk = traversal.chunk(step), head = traversal.of.head, token = traversal.of.token(chunk),
                  row = traversal.of.row;
#pragma unroll
        for (int p = 0; p < KEY_BYTES / Tokens::PANEL; p++) {
            box_prefetch(a.q, 64 * p, (u32)head / (u32)a.group_q, token, row);
            if (!ADDS) box_prefetch(a.k, 64 * p, (u32)head / (u32)a.group_k, token, row);
        }
#pragma unroll
        for (int p = 0; p < TILE_BYTES / Tokens::PANEL; p++) box_prefetch(a.dout, 64 * p, head, token, row);
        if (!ADDS) run_prefetch(a.grams + (traversal.of.block + chunk) * LA_GRAM, LA_GRAM);
        if constexpr (ERASE) run_prefetch(a.inverses + (traversal.of.block + chunk) * LA_INVERSE, LA_INVERSE);
    }
    // this lane's channels of row r of a tile; rows of other sequences are zeros
    __device__ __forceinline__ void load_row(u32 (&x)[PER / 2], u32 tile, int r, int own) const {
        const float2 y = load_shared2(tile + row_offset(warp * SLICE + r, r, lane * PER));
        x[0] = r < own ? __float_as_uint(y.x) : 0;
        x[1] = r < own ? __float_as_uint(y.y) : 0;
    }
    // rows of its slice that are the sequence's; a panel past LA_K is not copied in
    __device__ __forceinline__ int own_rows_of(int chunk) const {
        return lane * PER < LA_K ? traversal.of.own(chunk) - warp * SLICE : 0;
    }
    // e^g of a row, made where it is used: all rows at once would not fit in the registers
    __device__ __forceinline__ void decays(float (&d)[PER], int r) const {
        Slice<LA_GATE, PER> row;
#pragma unroll
        for (int i = 0; i < row.WORDS; i++) row.x[0][i] = opaque(gates.x[r][i]);
#pragma unroll
        for (int c = 0; c < PER; c++) d[c] = exp2_approx(row.at(0, c) * LOG2_E);
    }
    // decays of the chunk's slices to the table: before the slice (pre), behind it (suf), of all
    __device__ __forceinline__ void share_decays(float (&pre)[PER], float (&suf)[PER], float (&all)[PER],
                                                 int step) const {
        const SliceTable<WIDE, PER> table = {shared + AT_TABLES + (step & 1) * SliceTable<WIDE, PER>::BYTES};
        float own[PER];
#pragma unroll
        for (int c = 0; c < PER; c++) {
            own[c] = gates.at(0, c);
#pragma unroll
            for (int r = 1; r < SLICE; r++) own[c] += gates.at(r, c);
            own[c] = exp2_approx(own[c] * LOG2_E);
            pre[c] = suf[c] = all[c] = 1.f;
        }
        table.store(warp, lane * PER, own);
        groups_barrier<COPIERS>(3);
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
            float x[PER];
            table.load(x, s, lane * PER);
#pragma unroll
            for (int c = 0; c < PER; c++) {
                pre[c] *= s < warp ? x[c] : 1.f;
                suf[c] *= s > warp ? x[c] : 1.f;
                all[c] *= x[c];
            }
        }
    }
    // rows of a tile times factor and the decays from the chunk's start, to another or the same; `before`: without the
    // row's own. All rows are loaded first, but where registers are short (erase)
    __device__ __forceinline__ void copy_from_start(u32 from, u32 to, int own, const float (&pre)[PER], float factor,
                                                    bool before) const {
        Slice<LA_DTYPE, PER> rows;
        float y[PER], x[PER];
        if constexpr (!ERASE)
#pragma unroll
            for (int r = 0; r < SLICE; r++) load_row(rows.x[r], from, r, own);
#pragma unroll
        for (int c = 0; c < PER; c++) y[c] = factor * pre[c];
#pragma unroll
        for (int r = 0; r < SLICE; r++) {
            float d[PER];
            if constexpr (ERASE) load_row(rows.x[r], from, r, own);
            decays(d, r);
#pragma unroll
            for (int c = 0; c < PER; c++) {
                const float earlier = y[c];
                y[c] *= d[c];
                x[c] = rows.at(r, c) * (before ? earlier : y[c]);
            }
            store_row<PER>(to + row_offset(warp * SLICE + r, r, lane * PER), x);
        }
    }
    // the same with the decays to the chunk's end, without erase in two terms
    __device__ __forceinline__ void copy_to_end(u32 from, u32 to, u32 to_rest, int own, const float (&suf)[PER]) const {
        Slice<LA_DTYPE, PER> rows;
        float y[PER], x[PER];
        if constexpr (!ERASE)
#pragma unroll
            for (int r = 0; r < SLICE; r++) load_row(rows.x[r], from, r, own);
#pragma unroll
        for (int c = 0; c < PER; c++) y[c] = suf[c];
#pragma unroll
        for (int r = SLICE - 1; r >= 0; r--) {
            float d[PER];
            if constexpr (ERASE) load_row(rows.x[r], from, r, own);
            decays(d, r);
#pragma unroll
            for (int c = 0; c < PER; c++) {
                x[c] = rows.at(r, c) * y[c];
                y[c] *= d[c];
            }
            const u32 at = row_offset(warp * SLICE + r, r, lane * PER);
            store_row<PER>(to + at, x);
            if constexpr (!ERASE) store_words(to_rest + at, rest_of(x[0], x[1]), rest_of(x[2], x[3]));
        }
    }
    // copies of a chunk; `running`: with ADDS the decay of all chunks before it
    __device__ __forceinline__ void copy(int step, float (&running)[PER]) {
        float pre[PER], suf[PER], all[PER];
        share_decays(pre, suf, all, step);
        const u32 at = shared + step % STAGES * STAGE;
        const int own = own_rows_of(traversal.chunk(step));
        barrier_wait(loaded(shared, step), step / STAGES & 1);
        if (ADDS) {
#pragma unroll
            for (int c = 0; c < PER; c++) {
                pre[c] *= running[c];
                running[c] *= all[c];
            }
        }
        copy_from_start(at + AT_Q, at + AT_Q, own, pre, a.scale, BEFORE);
        if (ADDS) return;
        if constexpr (ERASE) copy_from_start(at + AT_K, at + AT_ERASE, own, pre, -1.f, false);
        copy_to_end(at + AT_K, at + AT_K, at + AT_K_REST, own, suf);
        if (warp == 0) {
            const u32 to = shared + AT_CARRIES + step % STAGES * WIDE * 4 + lane * PER * 4;
            store_shared2(to, all[0], all[1]);
            store_shared2(to + 8, all[2], all[3]);
        }
    }
    __device__ __forceinline__ void run() {
        float running[PER] = {1.f, 1.f, 1.f, 1.f};
        if (traversal.steps > 0) load(0);
        for (int step = 0; step < traversal.steps; step++) {
            if (warp == 0 && lane == 0) {
                ring.wait_empty(step);
                load_tiles(step);
            }
            __syncwarp();
            copy(step, running);
            if (step + 1 < traversal.steps) load(step + 1);
            publish_shared();
            warp_arrive(ring.full(step), lane);
            if (warp == 0 && lane == 0) {
                if constexpr (ERASE) {
                    ring.wait_empty(step + 1);   // the chunk before has left the values
                    load_values(step);
                }
                if (step + 1 < traversal.steps) prefetch_tiles(step + 1);
            }
            __syncwarp();
        }
        if (ADDS && warp == 0) {
            float* to =
                a.sums + (traversal.of.slot * (a.segments - 1) + traversal.segment - !a.every) * WIDE + lane * PER;
#pragma unroll
            for (int c = 0; c < PER; c++) to[c] = running[c];
        }
    }
};
