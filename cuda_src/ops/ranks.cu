// Rows of a token gated and summed (ops/ranks.py), and their transpose.
//
//     u_r = out_r + sum_s>r above_rs late_s + sum_s shares_rs m_s x        y = sum_r o_r u_r silu(n_r z)
//
// A block has a head of PART tokens, a group of lanes a token at a time. Sums over tokens are those of parts.
#include "arguments/ops/RanksArguments.cuh"
#include "ops/formulas.cuh"
#include "ops/lane_pieces.cuh"

typedef RanksArguments Arguments;
constexpr int R = LA_R, PART = 256;

LA_DEVICE i64 pair_at(i64 n, int r, int s) { return (n * R + r) * R + s; }
LA_DEVICE i64 row_at(const Arguments& a, i64 token, u32 head, int r) { return ((token * R + r) * a.H + head) * LA_V; }
LA_DEVICE const char* row(const Arguments& a, const Rows& x, i64 token, u32 head) {
    return x.data + token / a.T * x.batch + token % a.T * x.token + (i64)head * x.head;
}
LA_DEVICE void vector_of(const float* from, u32 head, int r, int c, Piece& y) {
    load_vector<LA_V>(y, from, (i64)head * R + r, c);
}

// u of a token's rows
LA_DEVICE void read(const Arguments& a, i64 token, u32 head, int c, const Piece& x, Piece (&u)[R]) {
    constexpr int BYTES = bytes_of(LA_GRAD);
    const i64 n = token * a.H + head;
#pragma unroll
    for (int r = 0; r < R; r++) load_row<LA_GRAD, LA_V>(u[r], a.out + row_at(a, token, head, r) * BYTES, c);
#pragma unroll
    for (int s = 0; s < R; s++) {
        Piece y, late = {};
        vector_of(a.m, head, s, c, y);
        if (s) load_row<LA_GRAD, LA_V>(late, a.late + row_at(a, token, head, s) * BYTES, c);
#pragma unroll
        for (int r = 0; r < R; r++) {
            const float share = a.shares[pair_at(n, r, s)], above = r < s ? a.above[pair_at(n, r, s)] : 0.f;
#pragma unroll
            for (int i = 0; i < PER; i++) {
                u[r][i] += share * (y[i] * x[i]);
                if (r < s) u[r][i] += above * late[i];
            }
        }
    }
}
// n_r z, z without n
LA_DEVICE void gate_of(const Arguments& a, u32 head, int r, int c, const Piece& z, Piece& gate) {
    if (a.gates != nullptr) vector_of(a.gates, head, r, c, gate);
#pragma unroll
    for (int i = 0; i < PER; i++) gate[i] = a.gates != nullptr ? gate[i] * z[i] : z[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) read_out(const __grid_constant__ RanksArguments a) {
    const u32 head = blockIdx.x % a.H;
    const i64 first = (i64)(blockIdx.x / a.H) * PART;
    for (int t = threadIdx.x / LA_LANES; t < PART && first + t < a.tokens; t += GROUPS) {
        const i64 token = first + t;
        pieces([&](int, int c) {
            if (c >= LA_V) return;
            Piece x, z, y = {}, u[R];
            load_row<LA_DTYPE, LA_V>(x, row(a, a.x, token, head), c);
            if (LA_GATED) load_row<LA_GATE, LA_V>(z, row(a, a.z, token, head), c);
            read(a, token, head, c, x, u);
#pragma unroll
            for (int r = 0; r < R; r++) {
                Piece o, gate;
                vector_of(a.outs, head, r, c, o);
                if (LA_GATED) gate_of(a, head, r, c, z, gate);
#pragma unroll
                for (int i = 0; i < PER; i++) y[i] += o[i] * (LA_GATED ? u[r][i] * silu(gate[i]) : u[r][i]);
            }
            store_row<LA_DTYPE, LA_V>(a.y + (token * a.H + head) * LA_V * bytes_of(LA_DTYPE), c, y);
        });
    }
}

// Gradients of u, z and the factors of late rows, and sums over the tokens of a part of those of n and o
extern "C" __global__ void __launch_bounds__(THREADS) read_out_vjp(const __grid_constant__ RanksArguments a) {
    __shared__ Sums sums;
    const u32 head = blockIdx.x % a.H;
    const i64 begin = (i64)(blockIdx.x / a.H) * PART, end = min(begin + PART, a.tokens);
    Piece dn[R][PIECES] = {}, douts[R][PIECES] = {};
    for (i64 first = begin; first < end; first += GROUPS) {   // all lanes take part in the sums
        const bool valid = first + threadIdx.x / LA_LANES < end;
        const i64 token = valid ? first + threadIdx.x / LA_LANES : first;
        float above[R][R] = {};
        pieces([&](int k, int c) {
            if (c >= LA_V) return;
            Piece x, z = {}, dy, dz = {}, u[R];
            load_row<LA_DTYPE, LA_V>(x, row(a, a.x, token, head), c);
            if (LA_GATED) load_row<LA_GATE, LA_V>(z, row(a, a.z, token, head), c);
            load_row<LA_FROM, LA_V>(dy, a.dy + (token * a.H + head) * LA_V * bytes_of(LA_FROM), c);
            read(a, token, head, c, x, u);
#pragma unroll
            for (int r = 0; r < R; r++) {
                Piece o, by, gate;   // by: n_r, 1 without it
                vector_of(a.outs, head, r, c, o);
                if (LA_GATED) gate_of(a, head, r, c, z, gate);
                if (a.gates != nullptr) vector_of(a.gates, head, r, c, by);
#pragma unroll
                for (int i = 0; i < PER; i++) {
                    const float open = LA_GATED ? silu(gate[i]) : 1.f, shut = dy[i] * u[r][i];
                    if (valid) douts[r][k][i] += shut * open;
                    if (LA_GATED) {
                        const float dgate = o[i] * shut * silu_slope(gate[i]);
                        dz[i] += a.gates != nullptr ? by[i] * dgate : dgate;
                        if (valid) dn[r][k][i] += z[i] * dgate;
                    }
                    u[r][i] = rounded<LA_GRAD>(o[i] * dy[i] * open);
                }
                if (valid) store_row<LA_GRAD, LA_V>(a.du + row_at(a, token, head, r) * bytes_of(LA_GRAD), c, u[r]);
            }
            if (LA_GATED && valid)
                store_row<LA_GATE, LA_V>(a.dz + (token * a.H + head) * LA_V * bytes_of(LA_GATE), c, dz);
#pragma unroll
            for (int s = 1; s < R; s++) {
                Piece late;
                load_row<LA_GRAD, LA_V>(late, a.late + row_at(a, token, head, s) * bytes_of(LA_GRAD), c);
#pragma unroll
                for (int r = 0; r < s; r++) above[r][s] += dot(u[r], late);
            }
        });
#pragma unroll
        for (int s = 1; s < R; s++)
#pragma unroll
            for (int r = 0; r < s; r++) {
                const float sum = row_sum(above[r][s]);
                if (valid && threadIdx.x % LA_LANES == 0) a.dabove[pair_at(token * a.H + head, r, s)] = sum;
            }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        const i64 to = ((i64)blockIdx.x * R + r) * LA_V;
        column_sums<LA_V>(sums, douts[r], a.douts + to);
        if (LA_GATED && a.dgates != nullptr) column_sums<LA_V>(sums, dn[r], a.dgates + to);
    }
}
