// The gradients of the selective scan. P, the gradient of h_t through its own output and all later ones, goes from the
// last token to the first; dy = scale dout silu(z):
//
//     P[n] += C_t[n] dy,   du = sum_n B_t[n] P[n],   dB_t[n] = sum_d u P[n],   dC_t[n] = sum_d dy h_t[n]
//     P[n] <- e^{dt A[n]} P[n],   dg[n] = P[n] h_{t-1}[n],   dA[n] = sum_t dt dg[n]
//     dx = dt du + D dout silu(z),   ddt = (sum_n A[n] dg[n] + x du) slope,   dz = dout (y + D x) silu'(z)
//
// LA_KEYS, with da[n] = P[n] h_{t-1}[n] before P[n] <- (1 - dt B_t[n]^2) P[n], of steps dt = beta / (1 + beta |B_t|^2):
//
//     ddt = x du - sum_n B_t[n]^2 da[n],   dbeta = ddt / (1 + beta |B_t|^2)^2
//     dB_t[n] = sum_d (u P[n] - 2 dt B_t[n] da[n]) - 2 B_t[n] sum_d dt^2 ddt
//
// The states of a tile are computed again from its mark: first those before every PART tokens, if shared memory has
// shared memory for them, then those of PART tokens at a time, of four numbers, in registers. Lane `lane % BESIDE` of a
// warp has a channel, so that sums over channels are sums over quads (tile/quads.cuh), warps and blocks, each in one
// order.
#include "elementwise/selective.cuh"
#include "tile/quads.cuh"

constexpr int PART = LA_PART, BESIDE = 32 / LANES, WARPS = THREADS / 32;
constexpr int TOGETHER = N % 4 == 0 ? 4 : 1;     // neighbours that are added together
constexpr bool EXACT = LA_B != 0 || LA_C != 0;   // sums over channels that are stored in more than bfloat16
static_assert(STATES % 4 == 0 && PART % 4 == 0 && TILE % PART == 0 && BESIDE >= 4, "quads of channels");
struct alignas(16) Step {   // of a token and channel; afterwards dt, du, sum_n rate dg, y
    Real dt, u, dy, y;
};
struct Sums {   // of a token, over the channels of a warp; beside it what keeps tokens in other banks
    Real of[2][WIDTH], beside[LA_DOUBLE ? 2 : 4];
};
struct alignas(16) Four {
    Real x[4];
};
constexpr int ALONG = Row::COLUMNS < 32 ? Row::COLUMNS : 32;   // neighbouring threads that have channels of one token
constexpr int PATHS = Row::COLUMNS / ALONG;                    // of a token: the sums that such neighbours have
constexpr int SHARED = (int)sizeof(Step) * TILE * CHANNELS + 2 * TILE * WIDTH * (int)sizeof(Real) +
                       WARPS * TILE * (int)sizeof(Sums) + LA_KEYS * TILE * (1 + PATHS) * (int)sizeof(Real);
constexpr bool CHECKPOINTS = SHARED + TILE / PART * STATES * THREADS * (int)sizeof(Real) <= 48 * 1024;

LA_DEVICE Real cotangent(Real dout, Real z) { return LA_Z == NONE ? dout : dout * silu(z); }

// dB and dC, of one token in lanes lane % 4, summed over the other channels of a warp: a lane ends with a part of them
LA_DEVICE void sum_of_warp(Sums& to, const Real (&dB)[4], const Real (&dC)[4], int n, int lane) {
    Real x[8] = {dB[0], dB[1], dB[2], dB[3], dC[0], dC[1], dC[2], dC[3]};
    int first = 0;
#pragma unroll
    for (int m = 4, half = 4; m < BESIDE; m *= 2, half /= 2) {
        const bool later = lane & m;
        first += later ? half : 0;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const Real own = later ? x[half + i] : x[i];
            x[i] = own + __shfl_xor_sync(~0u, later ? x[i] : x[half + i], m);
        }
    }
#pragma unroll
    for (int i = 0; i < 8 * 4 / BESIDE; i++) to.of[(first + i) / 4][n + (first + i) % 4] = x[i];
}

// What a segment adds to the gradient of the state before it, and the sum of its steps or the product of its decays
extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS)
    carry_back(const __grid_constant__ SelectiveArguments a) {
    __shared__ __align__(16) Real B[TILE][WIDTH], C[TILE][WIDTH];   // B: LA_KEYS
    __shared__ Real steps[TILE][CHANNELS], dys[TILE][CHANNELS];
    __shared__ Norms norms;
    const Segment s(a);
    if (s.count <= 0 || (!LA_ALL && s.number == 0)) return;
    const Row row(a, s.d);
    const int c = threadIdx.x / LANES, q = threadIdx.x % LANES, d = s.d + c;
    State P, rate, product;
    load_state(rate, a.A, a.A_kind, 0, a.D, d, q);
#pragma unroll
    for (int k = 0; k < STATES; k++) rate[k] = rate_of(rate[k]), P[k] = 0, product[k] = 1;
    Real bias[PER] = {}, sum = 0;
    if (row.inside && a.bias)
#pragma unroll
        for (int v = 0; v < PER; v++) bias[v] = parameter<Real>(a.bias, a.bias_kind, s.d + row.column + v);
    clear(C);
    if constexpr (LA_KEYS) clear(B);
    if constexpr (WIDTH > N) __syncthreads();
    const int last = (s.count - 1) / TILE * TILE;
    const i64 token = s.start + s.from + last;
    Ahead<LA_DT> dt(a.dt, row, token, s.d);
    Ahead<LA_GRAD> dout(a.dout, row, token, s.d);
    Ahead<LA_Z> z(a.z, row, token, s.d);
    Vectors<LA_C> r(a.C, token);
    Vectors<LA_B> b(a.B, token);
    for (int t0 = last; t0 >= 0; t0 -= TILE) {
        const int count = min(TILE, s.count - t0);
        dt.load(row, count);
        dout.load(row, count);
        z.load(row, count);
        r.load(count);
        dt.at -= dt.tile, dout.at -= dout.tile, z.at -= z.tile, r.at -= TILE * r.outer;
        if constexpr (LA_KEYS) {
            b.load(count);
            b.put(B, 1);
            b.at -= TILE * b.outer;
        }
        find_norms(norms, B);
#pragma unroll
        for (int i = 0; i < Row::COUNT; i++) {
            Real raw[PER], dy[PER], gate[PER] = {};
            dt.get(i, raw);
            dout.get(i, dy);
            z.get(i, gate);
            if (row.of(i) < TILE)
#pragma unroll
                for (int v = 0; v < PER; v++) {
                    steps[row.of(i)][row.column + v] = step_of(a, raw[v] + bias[v], norm_of(norms, row.of(i)));
                    dys[row.of(i)][row.column + v] = cotangent(dy[v], gate[v]);
                }
        }
        r.put(C, (Real)a.scale);
        __syncthreads();
#pragma unroll 4
        for (int t = count - 1; t >= 0; t--) {
            State Bt = {}, Ct;
            read(Ct, &C[t][q * STATES]);
            if constexpr (LA_KEYS) read(Bt, &B[t][q * STATES]);
            const Real step = steps[t][c], dy = dys[t][c];
#pragma unroll
            for (int k = 0; k < STATES; k++) {
                const Real factor = decay_of(step, rate[k], Bt[k]);
                P[k] = factor * (P[k] + Ct[k] * dy);
                if constexpr (LA_KEYS) product[k] *= factor;
            }
            sum += step;
        }
        __syncthreads();
    }
    const i64 slot = (i64)s.n * a.segments + s.number;
    store_own(a.begins, P, slot, a.D, d, q);
    if constexpr (LA_KEYS) store_own(a.sums, product, slot, a.D, d, q);
    else if (q == 0 && d < a.D) ((Real*)a.sums)[slot * a.D + d] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS)
    selective_vjp(const __grid_constant__ SelectiveArguments a) {
    __shared__ Step steps[TILE][CHANNELS];
    __shared__ __align__(16) Real B[TILE][WIDTH], C[TILE][WIDTH];
    __shared__ __align__(16) Sums sums[WARPS][TILE];
    __shared__ Norms norms;
    __shared__ Real paths[LA_KEYS ? TILE : 1][PATHS];   // sum_d dt^2 ddt
    __shared__ Four checkpoints[CHECKPOINTS ? TILE / PART : 1][CHECKPOINTS ? STATES / 4 : 1][CHECKPOINTS ? THREADS : 1];
    const Segment s(a);
    const Row row(a, s.d);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, q = lane / BESIDE;
    const int c = warp * BESIDE + lane % BESIDE, d = s.d + c;
    const i64 slot = (i64)s.n * a.segments + s.number;
    State P = {}, rate, dA = {};
    load_state(rate, a.A, a.A_kind, 0, a.D, d, q);
#pragma unroll
    for (int k = 0; k < STATES; k++) rate[k] = rate_of(rate[k]);
    if (s.count <= 0 && s.number) {   // a segment without tokens
    } else if (a.segments > 1) load_own(P, a.begins, slot, a.D, d, q);
    else load_state(P, a.start, a.start_kind, s.n, a.D, d, q);
    Real bias[PER] = {}, skip[PER] = {}, dskip[PER] = {}, dbias[PER] = {};
    if (row.inside)
#pragma unroll
        for (int v = 0; v < PER; v++) {
            if (a.bias) bias[v] = parameter<Real>(a.bias, a.bias_kind, s.d + row.column + v);
            if (a.skip) skip[v] = parameter<Real>(a.skip, a.skip_kind, s.d + row.column + v);
        }
    clear(B);
    clear(C);
    if constexpr (WIDTH > N) __syncthreads();
    const int last = (max(s.count, 1) - 1) / TILE * TILE;
    const Real scale = (Real)a.scale;
    i64 token = s.start + s.from + last;
    Ahead<LA_X> x(a.x, row, token, s.d);
    Ahead<LA_DT> dt(a.dt, row, token, s.d);
    Ahead<LA_GRAD> dout(a.dout, row, token, s.d);
    Ahead<LA_Z> z(a.z, row, token, s.d);
    Place to_x(a.dx, (i64)a.D * bytes_of(LA_X), row, token, s.d, bytes_of(LA_X));
    Place to_dt(a.ddt, (i64)a.D * bytes_of(LA_DT), row, token, s.d, bytes_of(LA_DT));
    Place to_z(a.dz, (i64)a.D * bytes_of(LA_Z), row, token, s.d, bytes_of(LA_Z));
    Vectors<LA_B> b(a.B, token);
    Vectors<LA_C> r(a.C, token);
    for (int t0 = last; t0 >= 0 && s.count > 0; t0 -= TILE, token -= TILE) {
        const int count = min(TILE, s.count - t0);
        x.load(row, count);
        dt.load(row, count);
        dout.load(row, count);
        z.load(row, count);
        State begin;
        load_own(begin, a.marks, s.mark(s.from + t0), a.D, d, q);
        b.load(count);
        r.load(count);
        b.put(B, 1);
        r.put(C, scale);
        find_norms(norms, B);
#pragma unroll
        for (int i = 0; i < Row::COUNT; i++) {
            Real xs[PER], raw[PER], dy[PER], gate[PER] = {};
            x.get(i, xs);
            dt.get(i, raw);
            dout.get(i, dy);
            z.get(i, gate);
            if (row.of(i) < TILE)
#pragma unroll
                for (int v = 0; v < PER; v++) {
                    const Real norm = norm_of(norms, row.of(i));
                    const Real step = row.of(i) < count ? step_of(a, raw[v] + bias[v], norm) : (Real)0;
                    steps[row.of(i)][row.column + v] = {step, step * xs[v], cotangent(dy[v], gate[v]), 0};
                }
        }
        __syncthreads();
        const auto follow = [&](State& h, int t) {
            const Real step = steps[t][c].dt, u = steps[t][c].u;
            State Bt;
            read(Bt, &B[t][q * STATES]);
#pragma unroll
            for (int k = 0; k < STATES; k++) h[k] = decay_of(step, rate[k], Bt[k]) * h[k] + u * Bt[k];
        };
        if constexpr (CHECKPOINTS) {
#pragma unroll 1
            for (int part = 0;; part += PART) {
#pragma unroll
                for (int g = 0; g < STATES / 4; g++)
                    checkpoints[part / PART][g][threadIdx.x] = {begin[4 * g], begin[4 * g + 1], begin[4 * g + 2],
                                                                begin[4 * g + 3]};
                if (part + PART == TILE) break;
#pragma unroll
                for (int t = 0; t < PART; t++) follow(begin, part + t);
            }
        }
#pragma unroll 1
        for (int part = TILE - PART; part >= 0; part -= PART) {
            State first;
            if constexpr (!CHECKPOINTS) {
#pragma unroll
                for (int k = 0; k < STATES; k++) first[k] = begin[k];
#pragma unroll 4
                for (int t = 0; t < part; t++) follow(first, t);
            }
            Real y[PART] = {}, du[PART] = {}, dg[PART] = {};
#pragma unroll
            for (int g = 0; g < STATES / 4; g++) {
                Real h[PART + 1][4], decays[PART][4], dB[4], dC[4];   // dB, dC: of 4 tokens
                if constexpr (CHECKPOINTS) {
                    const Four from = checkpoints[part / PART][g][threadIdx.x];
#pragma unroll
                    for (int i = 0; i < 4; i++) h[0][i] = from.x[i];
                } else
#pragma unroll
                    for (int i = 0; i < 4; i++) h[0][i] = first[4 * g + i];
#pragma unroll
                for (int t = 0; t < PART; t++) {
                    const Real step = steps[part + t][c].dt, u = steps[part + t][c].u;
                    Real Bt[4];
                    read(Bt, &B[part + t][q * STATES + 4 * g]);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        decays[t][i] = decay_of(step, rate[4 * g + i], Bt[i]);
                        h[t + 1][i] = decays[t][i] * h[t][i] + u * Bt[i];
                    }
                }
#pragma unroll
                for (int t = PART - 1; t >= 0; t--) {
                    const Step now = steps[part + t][c];
                    Real Bt[4], Ct[4], b[4], r[4];
                    read(Bt, &B[part + t][q * STATES + 4 * g]);
                    read(Ct, &C[part + t][q * STATES + 4 * g]);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int k = 4 * g + i;
                        if (t % 4 == 3) dB[i] = dC[i] = 0;
                        if constexpr (LA_Z != NONE) y[t] += Ct[i] * h[t + 1][i];
                        P[k] += Ct[i] * now.dy;
                        b[i] = P[k] * now.u;
                        r[i] = h[t + 1][i] * now.dy;
                        du[t] += P[k] * Bt[i];
                        if constexpr (LA_KEYS) {
                            const Real each = Bt[i] * P[k] * h[t][i];
                            b[i] -= 2 * now.dt * each;
                            dg[t] -= Bt[i] * each;
                            P[k] *= decays[t][i];
                        } else {
                            P[k] *= decays[t][i];
                            const Real each = P[k] * h[t][i];
                            dA[k] += now.dt * each;
                            dg[t] += rate[k] * each;
                        }
                    }
                    sum_of_quads<EXACT>(dB, b, t % 4, lane);
                    sum_of_quads<EXACT>(dC, r, t % 4, lane);
                    if (t % 4 == 0) sum_of_warp(sums[warp][part + t + lane % 4], dB, dC, q * STATES + 4 * g, lane);
                }
            }
            __syncwarp();   // every lane of a channel has read its steps
#pragma unroll
            for (int t = 0; t < PART; t++) {
                // (du, y, dg) over the lanes of a channel: the first three of these have one each
                Real own = du[t], rest = dg[t];
                if constexpr (LANES >= 2) {
                    const bool odd = lane & BESIDE;
                    own = (odd ? y[t] : du[t]) + __shfl_xor_sync(~0u, odd ? du[t] : y[t], BESIDE);
                    rest += __shfl_xor_sync(~0u, rest, BESIDE);
                }
                if constexpr (LANES >= 4) {
                    const bool later = lane & 2 * BESIDE;
                    const Real more = __shfl_xor_sync(~0u, later ? own : rest, 2 * BESIDE);
                    own = (later ? rest : own) + more;
                }
                if constexpr (LANES >= 8) own += __shfl_xor_sync(~0u, own, 4 * BESIDE);
                Step& to = steps[part + t][c];
                if constexpr (LANES == 1) to.u = du[t], to.dy = rest, to.y = y[t];
                else if constexpr (LANES == 2) {
                    if (q == 0) to.u = own, to.dy = rest;
                    else to.y = own;
                } else if (q < 3) (q == 0 ? to.u : q == 1 ? to.y : to.dy) = own;
            }
        }
        __syncthreads();
        const auto store_sums = [&] {   // dB and dC, whose paths through steps the rows below find
            for (int e = threadIdx.x; e < count * 2 * (N / TOGETHER); e += THREADS) {
                const int n = e % (N / TOGETHER) * TOGETHER, which = e / (N / TOGETHER) % 2,
                          t = e / (2 * (N / TOGETHER));
                Real sum[TOGETHER] = {}, more[TOGETHER];
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    read(more, &sums[w][t].of[which][n]);
#pragma unroll
                    for (int i = 0; i < TOGETHER; i++) sum[i] += more[i];
                }
                if constexpr (LA_KEYS) {
                    Real path = 0;
                    for (int w = 0; w < PATHS; w++) path += paths[t][w];
                    if (!which)
#pragma unroll
                        for (int i = 0; i < TOGETHER; i++) sum[i] -= 2 * path * B[t][n + i];
                }
                Real* const to = (Real*)(which ? a.dC : a.dB) + (((i64)s.tile * a.tokens + token + t) * N + n);
#pragma unroll
                for (int i = 0; i < TOGETHER; i++) to[i] = which ? scale * sum[i] : sum[i];
            }
        };
        if constexpr (!LA_KEYS) store_sums();
#pragma unroll
        for (int i = 0; i < Row::COUNT; i++) {
            const bool owned = row.inside && row.of(i) < count;
            if (!LA_KEYS && !owned) continue;
            Real xs[PER], raw[PER], d_out[PER], gate[PER] = {}, dx[PER], ddt[PER], dz[PER], path = 0;
            x.get(i, xs);
            dt.get(i, raw);
            dout.get(i, d_out);
            z.get(i, gate);
#pragma unroll
            for (int v = 0; v < PER; v++) {
                const Step sum = owned ? steps[row.of(i)][row.column + v] : Step{};
                const Real dy = cotangent(d_out[v], gate[v]);
                dx[v] = sum.dt * sum.u + skip[v] * dy;
                ddt[v] = RATE * sum.dy + xs[v] * sum.u;
                path += sum.dt * sum.dt * ddt[v];
                ddt[v] *= slope_of(a, raw[v] + bias[v], norm_of(norms, row.of(i)));
                if constexpr (LA_Z != NONE) dz[v] = d_out[v] * (sum.y + skip[v] * xs[v]) * silu_slope(gate[v]);
                dskip[v] += dy * xs[v];
                dbias[v] += ddt[v];
            }
            if constexpr (LA_KEYS) {
#pragma unroll
                for (int m = 1; m < ALONG; m *= 2) path += __shfl_xor_sync(~0u, path, m);
                const int column = threadIdx.x % Row::COLUMNS;
                if (row.of(i) < TILE && column % ALONG == 0) paths[row.of(i)][column / ALONG] = path;
                if (!owned) continue;
            }
            store_elements<LA_X, PER>(to_x.of(i), dx);
            store_elements<LA_DT, PER>(to_dt.of(i), ddt);
            if constexpr (LA_Z != NONE) store_elements<LA_Z, PER>(to_z.of(i), dz);
        }
        if constexpr (LA_KEYS) {
            __syncthreads();
            store_sums();
        }
        x.at -= x.tile, dt.at -= dt.tile, dout.at -= dout.tile, z.at -= z.tile;
        to_x.at -= to_x.tile, to_dt.at -= to_dt.tile, to_z.at -= to_z.tile;
        b.at -= TILE * b.outer, r.at -= TILE * r.outer;
        __syncthreads();
    }
    if (s.number == 0) store_own(a.end, P, s.n, a.D, d, q);
    if constexpr (!LA_KEYS) store_own(a.dA, dA, slot, a.D, d, q);
    // sums of the threads that have a channel
    Real* const beside = (Real*)sums;
    static_assert(sizeof(sums) >= 2 * PER * THREADS * sizeof(Real), "the sums of a block");
#pragma unroll
    for (int v = 0; v < PER; v++) {
        beside[row.first * CHANNELS + row.column + v] = dskip[v];
        beside[PER * THREADS + row.first * CHANNELS + row.column + v] = dbias[v];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < 2 * CHANNELS; e += THREADS) {
        const int own = e % CHANNELS;
        if (s.d + own >= a.D) continue;
        Real sum = 0;
        for (int r = 0; r < Row::STEP; r++) sum += beside[e / CHANNELS * PER * THREADS + r * CHANNELS + own];
        ((Real*)(e < CHANNELS ? a.dskip : a.dbias))[slot * a.D + s.d + own] = sum;
    }
}
