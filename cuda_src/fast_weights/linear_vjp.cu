// Backward of a head, from the last mini-batch to the first; groups of LA_EACH are computed forward again from the
// state that is stored before them. w, d: W^T and the gradient of W after the tile, as accumulators.
#include "fast_weights/linear.cuh"

// y^T (own k, tokens) += m x^T: m (k, v) and x (tokens, v) in shared memory, x times `by` of its token
template <class F> LA_DEVICE void times_state(Rows& y, const float* m, const float* x, F by, const Lane& l) {
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const OperandA a = rows_of(pair_of(m + 16 * l.warp * S, 16 * i, l));
        Pair p = pair_of(x, 16 * i, l);
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int f = 0; f < 4; f++) p.f[n][f] *= by(8 * n + l.g);
            Element::multiply(y[n], a, column(p.f[n]));
        }
    }
}
// y^T (own k, i) += x^T (k, j) m^T (j, i): x a tile (tokens, k), m (tokens i, tokens j) in registers
LA_DEVICE void times_keys(Rows& y, const float* x, const Rows& m, const Lane& l) {
    float f[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        f[i] = x[(2 * l.j + (i & 1) + 8 * (i >> 2)) * S + 16 * l.warp + l.g + 8 * ((i >> 1) & 1)];
    const OperandA a = Element::operand(f);
#pragma unroll
    for (int n = 0; n < 2; n++) Element::multiply(y[n], a, transposed(m, n));
}
// m (i, j) = x y^T and its transpose t: x, y tiles
LA_DEVICE void grams(Rows& m, Rows& t, const float* x, const float* y, const Lane& l) {
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const Pair p = pair_of(x, 16 * i, l), r = pair_of(y, 16 * i, l);
        const OperandA a = rows_of(p), b = rows_of(r);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            Element::multiply(m[n], a, column(r.f[n]));
            Element::multiply(t[n], b, column(p.f[n]));
        }
    }
}
// W (k, v) of shared memory from W^T in accumulators
LA_DEVICE void put_state(float* to, const Weights& w, const Lane& l) {
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) to[(8 * n + 2 * l.j + (e & 1)) * S + channel_of(l, e)] = w[n][e];
}
LA_DEVICE void put_rows(float* to, const Rows& x, const Lane& l) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) to[token_of(l, n, e) * S + channel_of(l, e)] = x[n][e];
}
LA_DEVICE void get_rows(Rows& x, const float* from, const Lane& l) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) x[n][e] = from[token_of(l, n, e) * S + channel_of(l, e)];
}
// sums of a row of a (tokens, tokens) matrix, of each times f(row, column), for rows g and g + 8: to[16]
template <class F> LA_DEVICE void row_sums(float* to, const Rows& m, F f, const Lane& l) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float y = 0.f;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) y += m[n][e + 2 * h] * f(l.g + 8 * h, token_of(l, n, e));
        y += __shfl_xor_sync(~0u, y, 1);
        y += __shfl_xor_sync(~0u, y, 2);
        if (!l.j) to[l.g + 8 * h] = y;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_vjp(const __grid_constant__ LinearArguments a) {
    extern __shared__ __align__(16) char shared[];
    float *q = (float*)shared, *k = q + TILE, *v = k + TILE, *dout = v + TILE, *tile_r = dout + TILE,
          *tile_do = tile_r + TILE, *tile_dz = tile_do + TILE, *own_w = tile_dz + TILE, *own_d = own_w + D * S,
          *rates = own_d + D * S, *by_token = rates + 2 * MOST, *sums = by_token + 3 * MOST;
    const Lane l = own_place();
    const i64 n = blockIdx.x / a.heads, h = blockIdx.x % a.heads;
    const i64 at = blockIdx.x;
    const float weight[2] = {a.weight[h * D + channel_of(l, 0)], a.weight[h * D + channel_of(l, 2)]},
                shift[2] = {a.shift[h * D + channel_of(l, 0)], a.shift[h * D + channel_of(l, 2)]};
    const int C = a.mini_batch, tiles = (a.T + C - 1) / C;
    const bool is_whole = a.T % C == 0;
    Weights w, d;
    float b[2], db[2], dweight[2] = {}, dshift[2] = {};
    load_state(d, db, a.W + at * D * D, a.b + at * D, l);   // of W after the last token
    if (is_whole) {                                         // which is A, too
        load_state(w, b, a.end_A + at * D * D, a.end_bA + at * D, l);
#pragma unroll
        for (int i = 0; i < D / 2; i++) d[i / 4][i % 4] += w[i / 4][i % 4];
        db[0] += b[0], db[1] += b[1];
    }
    float* held = a.held + at * LA_EACH * MARK;
    for (int group = (tiles - 1) / LA_EACH; group >= 0; group--) {
        const int first = group * LA_EACH, last = min(first + LA_EACH, tiles) - 1;
        load_mark(a.marks + (at * a.groups + group) * MARK, w, b);
        for (int tile = first; tile < last; tile++) {   // all end with a whole mini-batch
            float x[2][8];
            const int start = tile * C;
            fetch(x[0], a.k, n, h, start, C);
            fetch(x[1], a.v, n, h, start, C);
            const float rate = fetch_rate(a, n, h, start, C);
            save_mark(held + (tile - first) * MARK, w, b);
            __syncthreads();
            put(k, x[0]);
            put(v, x[1]);
            if (threadIdx.x < 2 * MOST) rates[threadIdx.x] = rate;
            __syncthreads();
            Inner in;
            set_bias(in.x, b);
            times_tile(in.x, w, k, l);
            gradient(in, k, v, weight, shift, a.eps, sums, l);
            learn(w, b, in, k, rates, rates[MOST + C - 1], l);
        }
        for (int tile = last; tile >= first; tile--) {
            const int start = tile * C, count = min(C, a.T - start);
            const bool closes = count == C;
            if (tile < last) load_mark(held + (tile - first) * MARK, w, b);
            {
                float x[4][8];
                fetch(x[0], a.q, n, h, start, count);
                fetch(x[1], a.k, n, h, start, count);
                fetch(x[2], a.v, n, h, start, count);
                fetch(x[3], a.dout, n, h, start, count);
                const float rate = fetch_rate(a, n, h, start, count);
                __syncthreads();
                put(q, x[0]);
                put(k, x[1]);
                put(v, x[2]);
                put(dout, x[3]);
                if (threadIdx.x < 2 * MOST) rates[threadIdx.x] = rate;
            }
            put_state(own_w, w, l);
            put_state(own_d, d, l);
            __syncthreads();
            const float c_end = closes ? rates[MOST + C - 1] : 1.f;

            // forward again
            Inner in;
            Rows o, m = {}, mt = {};   // m: q k^T, then factors; mt: its transpose
            set_bias(in.x, b);
            set_bias(o, b);
            times_tile(in.x, w, k, l);
            times_tile(o, w, q, l);
            grams(m, mt, q, k, l);
            gradient(in, k, v, weight, shift, a.eps, sums, l);
            Rows f;   // factors times q k^T + 1
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    f[c][e] = factor(rates, l.g + 8 * (e >> 1), token_of(l, c, e), a.before) * (m[c][e] + 1.f);
            times_transposed(o, in.r, f);
            float over[4];
            standard(o, over, a.eps, sums + 4 * WARPS * MOST, l);

            // through out = q + LN(o)
            Rows dy, ao, dO;
            get_rows(dy, dout, l);
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    ao[c][e] = weight[e >> 1] * dy[c][e];
                    dweight[e >> 1] += dy[c][e] * o[c][e];
                    dshift[e >> 1] += dy[c][e];
                }
            float two[2][4];
            means(two, ao, o, sums + 6 * WARPS * MOST, l);
            project(dO, ao, o, two[0], two[1], over);
            put_rows(tile_r, in.r, l);
            put_rows(tile_do, dO, l);
            __syncthreads();

            // through reading and the state after the tile: dr
            Rows G = {}, Gt = {}, dr = {}, t;
            grams(G, Gt, tile_do, tile_r, l);
            set_bias(t, db);
            times_tile(t, d, k, l);
#pragma unroll
            for (int c = 0; c < 2; c++)   // f = M^T, as the transpose of M that times_transposed reads
#pragma unroll
                for (int e = 0; e < 4; e++)
                    f[c][e] = factor(rates, token_of(l, c, e), l.g + 8 * (e >> 1), a.before) * (mt[c][e] + 1.f);
            times_transposed(dr, dO, f);
            float three[3][4];
#pragma unroll
            for (int s = 0; s < 4; s++) three[0][s] = three[1][s] = three[2][s] = 0.f;
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int s = 2 * c + (e & 1);
                    dr[c][e] -= c_end * rates[token_of(l, c, e)] * t[c][e];
                    three[0][s] += dr[c][e];
                    three[1][s] += dr[c][e] * in.x[c][e];
                    three[2][s] += t[c][e] * in.r[c][e];
                }
            all_sums(three, sums + 8 * WARPS * MOST, l);
            if (l.warp == 0) {   // of the rates
                float *ends = by_token, *reads = ends + MOST, *etas = reads + MOST;
                if (l.lane < 4)
#pragma unroll
                    for (int s = 0; s < 4; s++) ends[token_of(l, s / 2, s)] = three[2][s];
                Rows y;
#pragma unroll
                for (int c = 0; c < 2; c++)
#pragma unroll
                    for (int e = 0; e < 4; e++) y[c][e] = G[c][e] * (m[c][e] + 1.f);
                const int before = a.before;
                row_sums(reads, y, [&](int i, int j) { return j + before <= i ? -rates[j] : 0.f; }, l);
#pragma unroll
                for (int c = 0; c < 2; c++)
#pragma unroll
                    for (int e = 0; e < 4; e++) y[c][e] = Gt[c][e] * (mt[c][e] + 1.f);
                row_sums(etas, y, [&](int j, int i) { return j + before <= i ? -rates[MOST + i] : 0.f; }, l);
                __syncwarp();
                const int s = l.lane;
                if (s < count) {
                    *(float*)place_in(a.deta, n, h, start + s) = etas[s] - c_end * ends[s];
                    if (a.gain.data) {
                        float more = 0.f;
                        if (closes && s == C - 1)
                            for (int j = 0; j < C; j++) more -= rates[j] * ends[j];
                        *(float*)place_in(a.dgain, n, h, start + s) = reads[s] + more;
                    }
                }
            }

            // through the inner gradient: de, dz
            Rows p, de, dz;
#pragma unroll
            for (int s = 0; s < 4; s++) three[0][s] /= D, three[1][s] /= D;
            project(p, dr, in.x, three[0], three[1], in.over);
            float more[3][4];
#pragma unroll
            for (int s = 0; s < 4; s++) more[0][s] = more[1][s] = more[2][s] = 0.f;
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int s = 2 * c + (e & 1), own = e >> 1;
                    de[c][e] = weight[own] * p[c][e];
                    dweight[own] += in.e[c][e] * p[c][e] + de[c][e] * in.x[c][e];
                    dshift[own] += de[c][e];
                    const float a2 = weight[own] * de[c][e];
                    more[0][s] += weight[own] * in.e[c][e] * p[c][e];
                    more[1][s] += a2;
                    more[2][s] += a2 * in.x[c][e];
                }
            all_sums(more, sums + 11 * WARPS * MOST, l);
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int s = 2 * c + (e & 1);
                    const float x = in.x[c][e], a2 = weight[e >> 1] * de[c][e];
                    dz[c][e] = in.over[s] * (a2 - more[1][s] / D - x * more[2][s] / D - in.r[c][e] * three[1][s] -
                                             p[c][e] * in.ax[s] - x * more[0][s] / D);
                }
            put_rows(tile_dz, dz, l);
            __syncthreads();

            // dq, dk of the warp's own channels, and the gradients of the state before the tile
            Rows dq, dk;
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int row = l.g + 8 * (e >> 1), other = token_of(l, c, e);
                    G[c][e] *= factor(rates, row, other, a.before);
                    Gt[c][e] *= factor(rates, other, row, a.before);
                    dq[c][e] = dy[c][e], dk[c][e] = de[c][e];
                }
            const auto one = [](int) { return 1.f; };
            times_state(dq, own_w, tile_do, one, l);
            times_keys(dq, k, G, l);
            times_state(dk, own_w, tile_dz, one, l);
            times_state(dk, own_d, tile_r, [&](int s) { return -c_end * rates[s]; }, l);
            times_keys(dk, q, Gt, l);
            add_outer(d, dO, q, l);
            add_outer(d, dz, k, l);
            add_tokens(db, dO);
            add_tokens(db, dz);
            if (!closes) {   // A and W after it are two
                load_state(w, b, a.end_A + at * D * D, a.end_bA + at * D, l);
#pragma unroll
                for (int i = 0; i < D / 2; i++) d[i / 4][i % 4] += w[i / 4][i % 4];
                db[0] += b[0], db[1] += b[1];
            }
            __syncthreads();
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) de[c][e] = -de[c][e];
            put_rows(q, dq, l);
            put_rows(k, dk, l);
            put_rows(v, de, l);
            __syncthreads();
            save(q, a.dq, n, h, start, count);
            save(k, a.dk, n, h, start, count);
            save(v, a.dv, n, h, start, count);
        }
    }
    save_state(d, db, a.end_W + at * D * D, a.end_b + at * D, l);
    float *dw = a.dweight + at * D, *ds = a.dshift + at * D;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        for (int by = 1; by < 4; by *= 2) {
            dweight[i] += __shfl_xor_sync(~0u, dweight[i], by);
            dshift[i] += __shfl_xor_sync(~0u, dshift[i], by);
        }
        if (!l.j) dw[channel_of(l, 2 * i)] = dweight[i], ds[channel_of(l, 2 * i)] = dshift[i];
    }
}
