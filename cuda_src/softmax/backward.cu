// Gradients of 128 keys and values, of one or more heads that share them, and their share of dq: one tile of queries
// after the other, head after head.
//
//     p_ij = 2^(z_ij - l_i),     dv_j = sum_i p_ij dout_i,     dz_ij = p_ij (dout_i.v_j - dot_i),
//     dk_j = scale sum_i dz_ij q_i,
//     dq_i = scale sum_j dz_ij k_j     (z, l: forward.cu)
//
// LA_POLYNOMIAL: p_ij = l_i e_ij, dz_ij = l_i e'_ij (dout_i.v_j - dot_i), e and its slope e' being those of
// polynomial.cuh.
//
// Rows of the first products are keys, columns queries: P^T and dZ^T are operands of dv and dk as they are, and dZ goes
// through shared memory for dq. A tile's dq is added in float32 in global memory by the copy engine, block of keys
// after block of keys, the last one first: `added` counts the blocks that are in, and a block waits until it is next.
// It waits for blocks of the launch with lower numbers alone, which begin earlier. With decays also the sums of dz: of
// each key, of each query (added as dq is), of each tile.
#include "softmax/polynomial.cuh"
#include "softmax/shares.cuh"

struct Consumer {
    const AttentionArguments& a;
    const Place& place;
    const Scan& scan;
    const u32 shared;
    const Lane me;
    const Rings rings;
    const int j0;
    float r[2], sums[2];   // of the two keys: log2 decay to the block's end; sums of dz

    __device__ __forceinline__ Consumer(const AttentionArguments& a, const Place& place, const Scan& scan, u32 shared,
                                        int thread)
        : a(a), place(place), scan(scan), shared(shared), me(thread), rings(shared), j0(place.tile * BLOCK) {
        begin_head(place.head * a.shared);
    }
    __device__ __forceinline__ const Decays& decays(int head,
                                                    int r) const {   // of row r of the block, or of the last key
        return a.sums[place.numbers(a, head) + min(j0 + r, place.Tk - 1)];
    }
    __device__ __forceinline__ void begin_head(int head) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sums[h] = r[h] = 0.f;
            if constexpr (GATED)
                r[h] = decay_between(decays(head, BLOCK - 1), decays(head, opaque((u32)me.row) + 8 * h));
        }
    }
    __device__ __forceinline__ u32 queries(int n) const { return shared + AT_Q + n % STAGES_Q * Queries::SIZE; }
    __device__ __forceinline__ u32 douts(int n) const { return shared + AT_DOUT + n % STAGES_DOUT * Douts::SIZE; }
    __device__ __forceinline__ u32 numbers(int n) const { return shared + AT_NUMBERS + n % STAGES_Q * NUMBERS; }
    __device__ __forceinline__ bool is_near(const Step& step) const { return step.query() < j0 + BLOCK; }

    // scores^T, begun
    __device__ __forceinline__ void begin_scores(float (&s)[QUERIES / 8][4], int n) const {
        products_begin();
        multiply_rows_ABt<Keys, Queries>(s, opaque(shared) + me.group * 64 * 128, queries(n));
        products_commit();
    }
    // (dout.v)^T, begun
    __device__ __forceinline__ void begin_dots(float (&d)[QUERIES / 8][4], int step) const {
        rings.douts.wait_full(step);
        products_begin();
        multiply_rows_ABt<Values, Douts>(d, opaque(shared) + AT_V + me.group * 64 * 128, douts(step));
        products_commit();
    }
    // scores become p; near: of queries of the block's own tokens
    static constexpr int SPLIT = 6;   // tiles of columns whose registers are free beside dZ's
    template <int FROM, int TO> __device__ __forceinline__ void exponentiate(float (&s)[QUERIES / 8][4],
                                                                             int step) const {
        if constexpr (POLYNOMIAL) return;   // scores are needed twice
        const float c = a.scale * LOG2_E;
#pragma unroll
        for (int n = FROM; n < TO; n++) {
            const float2 x = load_shared2(numbers(step) + (n * 8 + me.column) * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float l = e & 1 ? x.y : x.x;
                s[n][e] = exp2_approx(GATED ? s[n][e] * c + r[e >> 1] - l : s[n][e] * c - l);
            }
        }
    }
    __device__ __forceinline__ void exponentiate_near(float (&s)[QUERIES / 8][4], const Step& step) const {
        const float c = a.scale * LOG2_E;
        const int row = opaque((u32)me.row);
        const Decays own = decays(step.head, row), other = decays(step.head, row + 8);
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = n * 8 + me.column + e;
                const Decays query = load_decays(shared + AT_ONES + Ones::piece(i, 1 + step.n % STAGES_Q));
                const float l = load_shared(numbers(step.n) + i * 4);
                s[n][e] = exp2_approx(s[n][e] * c + decay_between(query, own) - l);
                s[n][2 + e] = exp2_approx(s[n][2 + e] * c + decay_between(query, other) - l);
            }
    }
    // 0 for the pairs that are not read, and for keys of another sequence
    __device__ __forceinline__ void mask(float (&s)[QUERIES / 8][4], int i0) const {
        const int from = j0 + me.first() - a.offset;   // the first query that reads the warp's first key
        const bool all = !a.causal || (i0 >= from + 15 && i0 + QUERIES - 1 < from + a.window);
        if (all && j0 + me.first() + 16 <= place.Tk) return;
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int j = j0 + me.row + (e >> 1) * 8, age = i0 + n * 8 + me.column + (e & 1) + a.offset - j;
                if (j >= place.Tk || (a.causal && (age < 0 || age >= a.window))) s[n][e] = POLYNOMIAL ? unread() : 0.f;
            }
    }
    // p as operands; of a polynomial it is made of the scores
    __device__ __forceinline__ void pack_weights(u32 (&p)[QUERIES / 16][4], const float (&s)[QUERIES / 8][4],
                                                 int step) const {
        if constexpr (!POLYNOMIAL) return pack_operands(p, s);
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const float2 l = load_shared2(numbers(step) + (n * 8 + me.column) * 4);
            const float (&x)[4] = s[n];
            p[n / 2][n % 2 * 2] = pack_pair(l.x * weight_of(a, x[0]), l.y * weight_of(a, x[1]));
            p[n / 2][n % 2 * 2 + 1] = pack_pair(l.x * weight_of(a, x[2]), l.y * weight_of(a, x[3]));
        }
    }
    // scores and dout.v become dz, rounded
    __device__ __forceinline__ void differentiate_polynomial(u32 (&dz)[QUERIES / 16][4], float (&d)[QUERIES / 8][4],
                                                             const float (&s)[QUERIES / 8][4], int step) const {
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const u32 at = numbers(step) + (n * 8 + me.column) * 4;
            const float2 l = load_shared2(at), x = load_shared2(at + AT_DOTS);
#pragma unroll
            for (int e = 0; e < 4; e++)
                d[n][e] =
                    if_read(s[n][e], (e & 1 ? l.y : l.x) * slope_of(a, s[n][e]) * (d[n][e] - (e & 1 ? x.y : x.x)));
        }
        pack_operands(dz, d);
    }
    // p and dout.v become dz, rounded; the sums of near queries are of rounded numbers, as their sums over keys are,
    // which cancel
    __device__ __forceinline__ void differentiate(u32 (&dz)[QUERIES / 16][4], float (&d)[QUERIES / 8][4],
                                                  const float (&p)[QUERIES / 8][4], const Step& step) {
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const float2 x = load_shared2(numbers(step.n) + AT_DOTS + (n * 8 + me.column) * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) d[n][e] = p[n][e] * (d[n][e] - (e & 1 ? x.y : x.x));
        }
        pack_operands(dz, d);
        if constexpr (!GATED) return;
        if (is_near(step)) {
#pragma unroll
            for (int n = 0; n < QUERIES / 16; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[e & 1] += low_half(dz[n][e]) + high_half(dz[n][e]);
        } else {
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[e >> 1] += d[n][e];
        }
    }
    __device__ __forceinline__ void store_sums(float* to, int head) {
        const int row = opaque((u32)me.row);
        to += place.numbers(a, head) + j0 + row;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float x = row_sum(sums[h]);
            if ((me.lane & 3) == 0 && j0 + row + 8 * h < place.Tk) to[8 * h] = x;
            sums[h] = 0.f;
        }
    }
    // after the last tile of near queries, and of a head: the sums of dz are whole
    __device__ __forceinline__ void end_tile(const Step& step) {
        const bool last = step.ends_head(scan), near = is_near(step);
        if (!last && near == (step.query() + QUERIES < j0 + BLOCK)) return;
        store_sums(near ? a.near : a.far, step.head);
        if (!last) return;
        if (near) store_sums(a.far, step.head);
        if (step.n + 1 < scan.steps) begin_head(step.head + 1);
    }
    template <class X, int WIDTH, int N> __device__ __forceinline__ void store(const Rows& to, u32 at,
                                                                               const float (&x)[N][4], float scale) {
        const float f[2] = {scale, scale};
        store_rows<X, WIDTH>(rows_of(to, place, place.head) + j0 * to.token, to.token, place.Tk - j0, at, x, f, me);
    }
    // Every product runs beside other work of its warpgroup: dout.v and dk of the tile before beside the exponentials,
    // dv beside dz, the scores of the next tile (of the last one: of any bytes) beside the store of dq
    __device__ __forceinline__ void run() {
        float dk[WIDTH_K / 8][4], dv[WIDTH_V / 8][4], s[QUERIES / 8][4];
        clear_tiles(dk);
        clear_tiles(dv);
        barrier_wait(rings.keys, 0);
        Step step(a, place, scan);
        if (scan.steps > 0) rings.queries.wait_full(0);
        begin_scores(s, 0);
        products_wait<0>();
        accumulator_fence(s);
        while (step.n < scan.steps) {
            float d[QUERIES / 8][4], dq[SHARE / 8][4], rows[1][4];
            u32 p[QUERIES / 16][4], dz[QUERIES / 16][4];
            const int n = step.n;
            begin_dots(d, n);
            if (GATED && is_near(step)) {
                products_wait<1>();
                exponentiate_near(s, step);
            } else {
                exponentiate<0, SPLIT>(s, n);
                products_wait<1>();
                exponentiate<SPLIT, QUERIES / 8>(s, n);
            }
            accumulator_fence(dk);
            mask(s, step.query());
            if (n) warp_arrive(rings.queries.empty(n - 1), me.lane);
            pack_weights(p, s, n);
            products_begin();
            multiply_rows_AB<Douts>(dv, p, douts(n));
            products_commit();
            products_wait<1>();
            accumulator_fence(d);
            if constexpr (POLYNOMIAL) differentiate_polynomial(dz, d, s, n);
            else differentiate(dz, d, s, step);
            store_weights(dz, shared, me, n);
            products_wait<0>();
            accumulator_fence(dv);
            warp_arrive(rings.douts.empty(n), me.lane);
            begin_dq(dq, rows, shared, me, n);
            if constexpr (GATED) end_tile(step);
            step.next(scan);
            if (step.n < scan.steps) rings.queries.wait_full(step.n);
            begin_scores(s, step.n);
            products_begin();
            multiply_rows_AB<Queries>(dk, dz, queries(n));
            products_commit();
            products_wait<2>();
            accumulator_fence(dq);
            accumulator_fence(rows);
            store_dq(dq, rows, shared, me, n);
            products_wait<1>();
            accumulator_fence(s);
        }
        products_wait<0>();
        accumulator_fence(dk);
        groups_barrier<CONSUMERS>(GROUPS + 1);   // all have read the keys and values
        store<Keys, LA_K>(a.out, shared, dk, a.scale);
        store<Values, LA_V>(a.other, shared + AT_V, dv, 1.f);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ AttentionArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    Place place(a, a.heads / a.shared);
    place.tile = a.blocks - 1 - place.tile;
    if (place.tile * BLOCK >= place.Tk) return;
    const Scan scan(a, place, place.tile * BLOCK);
    if (threadIdx.x == 0) Rings(shared).init();
    if (GATED && threadIdx.x < BLOCK) {
        const float two = __uint_as_float(pack_pair(1.f, 1.f));
        store_decays(shared + AT_ONES + Ones::piece(threadIdx.x, 0), {two, two, two, two});
    }
    publish_shared();
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        release_registers<24>();
        const int warp = (threadIdx.x - CONSUMERS) >> 5, lane = threadIdx.x & 31;
        if (warp == 0) Producer{a, place, shared, Rings(shared).whole, lane, 0}.run(scan);
        if (warp >= 2) produce_numbers(a, place, scan, shared, threadIdx.x - CONSUMERS - 64);
        if (warp == 1) Adder{a, place, shared, lane}.run(scan);
    } else {
        claim_registers<240>();
        Consumer(a, place, scan, shared, threadIdx.x).run();
    }
}
