// h_t = a_t h_{t-1} + x_t of every channel, and its adjoint: linattn_np/elementwise/definition.py has the equations.
//
//     forward     h_t = a_t h_{t-1} + x_t,  out_t = scale h_t
//     LA_BACK     p_t = q_{t+1} + scale dout_t,  q_t = a*_t p_t,  dx_t = p_t,  da_t = p_t h*_{t-1},  dg_t = a*_t da_t
//
// A block has a tile (tiles.cuh), which its warps hold in registers, as it lies in memory: everything is read once. A
// backward begins a tile with the state that the forward stored there, every LA_MARK tokens.
//
// LA_FORMULA: a and x are made of a variant's arrays (gates.cuh), as they are read; a backward reads these once more,
// for their gradients.
// Tokens behind the end of a sequence have a = 1 and x = dout = 0.
//
// LA_DTYPE, LA_GATE, LA_DOUT: kinds of x (out, dx), the gate, dout. LA_LOG: the gate is log a. LA_CONSTANT: one gate
// for all tokens. LA_AHEAD: of which later tile the lines are fetched, 0: of none.
#include "elementwise/gates.cuh"
#include "elementwise/number.cuh"
typedef WideType<LA_DOUBLE>::type Real;
typedef NumberType<LA_DOUBLE, LA_COMPLEX>::type Number;
typedef Number Factor;
#include "elementwise/tiles.cuh"

constexpr int PARTS = LA_COMPLEX ? 2 : 1, N = V * PARTS;
constexpr int GATE_ELEMENT = bytes_of(LA_GATE) * PARTS;

constexpr int WORKING = LA_DOUBLE ? 3 : 2;
constexpr bool OF_CHANNELS = LA_FORMULA == LRU;   // a and the factor of x are those of a channel
constexpr int X_PARTS = LA_REAL ? 1 : PARTS;      // of a number of x and dx
constexpr int X_ELEMENT = bytes_of(LA_DTYPE) * X_PARTS;
constexpr int OUT = OF_CHANNELS ? WORKING : LA_DTYPE, OUT_ELEMENT = bytes_of(OUT) * PARTS;

LA_DEVICE Number number_of(Real x) {
    const Real parts[2] = {x, 0};
    Number y;
    of_parts(y, parts);
    return y;
}
LA_DEVICE void fill(Numbers& x, Real value) {
#pragma unroll
    for (int v = 0; v < V; v++) x[v] = number_of(value);
}

// R rows of a lane as they lie in memory, P parts a number
template <int KIND, int P = PARTS> struct Rows {
    static constexpr int N = V * P;
    typedef Streamed<KIND, N> Row;
    Row rows[R];
    // the first `mine` rows, `rest` for the others
    __device__ __forceinline__ void read(const char* from, i64 step, int mine, const Row& rest) {
        if (mine >= R) {
#pragma unroll
            for (int r = 0; r < R; r++, from += step) rows[r].read(from);
        } else {
#pragma unroll
            for (int r = 0; r < R; r++, from += step) {
                rows[r] = rest;
                if (r < mine) rows[r].read(from);
            }
        }
    }
    // what has been computed from the rows is computed again, not held in registers
    __device__ __forceinline__ void forget() {
        if constexpr (KIND < 2 && N > 1) {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int i = 0; i < N / 2; i++) rows[r].put(i, opaque(rows[r].word(i)));
        }
    }
    __device__ __forceinline__ void get(Numbers& x, int r) const { numbers(x, rows[r]); }
    static __device__ __forceinline__ void numbers(Numbers& x, const Row& row) {
        Real y[N];
        row.get(y);
#pragma unroll
        for (int v = 0; v < V; v++) {
            if constexpr (P == PARTS) of_parts(x[v], y + v * P);
            else x[v] = number_of(y[v]);
        }
    }
    static __device__ __forceinline__ Row rounded(const Numbers& x) {
        Real y[N];
#pragma unroll
        for (int v = 0; v < V; v++) {
            if constexpr (P == PARTS) to_parts(y + v * P, x[v]);
            else y[v] = real_part(x[v]);
        }
        Row row;
        row.round(y);
        return row;
    }
};
typedef Rows<LA_DTYPE, X_PARTS> Given;   // x and dx in memory
typedef Rows<MADE ? WORKING : LA_DTYPE, X_PARTS> Inputs;
typedef Rows<MADE ? WORKING : LA_GATE> Gates;
typedef Rows<LA_DOUT> Grads;
typedef Rows<MADE || OF_CHANNELS ? WORKING : LA_DTYPE> Adjoints;   // dx, as they are held
typedef Rows<OUT> Outputs;

template <int KIND> LA_DEVICE float exponential(float x) {
    if constexpr (KIND < 2) return exp2_approx(x * 1.4426950408889634f);
    else return expf(x);
}
template <int KIND> LA_DEVICE double exponential(double x) { return exp(x); }
template <int KIND, class Real> LA_DEVICE Complex<Real> exponential(Complex<Real> x) {
    const Real size = exponential<KIND>(x.re);
    return {size * cos(x.im), size * sin(x.im)};
}
// Logarithms of the working type become factors where they lie; others are exponentials again and again
constexpr bool REPLACED = LA_LOG && LA_GATE == WORKING;
LA_DEVICE void to_factors(Gates& gates) {
    if constexpr (REPLACED) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            Numbers a;
            gates.get(a, r);
#pragma unroll
            for (int v = 0; v < V; v++) a[v] = exponential<LA_GATE>(a[v]);
            gates.rows[r] = Gates::rounded(a);
        }
    }
}
LA_DEVICE Real channel(const ScanArguments& a, int i, int d) {   // of parameter i
    return d < a.D ? parameter<Real>(a.parameters[i].data, a.parameters[i].kind, d) : (Real)0;
}
// of the channels of a lane: the rate of RG_LRU; a and the factor of x of LRU
struct Channels {
    Real rate[V], factor[V];
    Numbers a;
    __device__ __forceinline__ Channels(const ScanArguments& args, int d) {
#pragma unroll
        for (int v = 0; v < V; v++) {
            rate[v] = LA_FORMULA == RG_LRU ? -8 * softplus(channel(args, 0, d + v)) : (Real)0;
            if constexpr (OF_CHANNELS) {
                const Real size = exp(-exp(channel(args, 0, d + v)));
                const Complex<Real> direction = on_circle(exp(channel(args, 1, d + v)));
                const Real parts[2] = {size * direction.re, size * direction.im};
                of_parts(a[v], parts);
                factor[v] = args.parameters[2].data == nullptr ? (Real)1 : exp(channel(args, 2, d + v));
            }
        }
    }
};
LA_DEVICE void factors(Numbers& a, const Gates& gates, int r, const Channels& own, int mine) {
    if constexpr (OF_CHANNELS) {
#pragma unroll
        for (int v = 0; v < V; v++) a[v] = r < mine ? own.a[v] : number_of(1);
        return;
    }
    gates.get(a, r);
    if constexpr (LA_LOG && !REPLACED) {
#pragma unroll
        for (int v = 0; v < V; v++) a[v] = exponential<LA_GATE>(a[v]);
    }
}

LA_DEVICE void inputs(Numbers& x, const Inputs& xs, int r, const Channels& own) {
    xs.get(x, r);
    if constexpr (OF_CHANNELS) {
#pragma unroll
        for (int v = 0; v < V; v++) x[v] = times(number_of(own.factor[v]), x[v]);
    }
}
// V real numbers of a variant's array, of token t
template <int KIND> LA_DEVICE void read_array(Real (&x)[V], const Place& p, const Tokens& of, int t, int d) {
    Streamed<KIND, V> row;
    const char* from = p.row(of, t) + (i64)d * bytes_of(KIND);
    if (BACK) row.load(from);
    else row.read(from);
    row.get(x);
}
template <int KIND> LA_DEVICE void write_array(const Real (&x)[V], const Place& p, const Tokens& of, int t, int d) {
    Streamed<KIND, V> row;
    row.round(x);
    row.write(p.row(of, t) + (i64)d * bytes_of(KIND));
}
// of token t: x, the gate, the input gate
LA_DEVICE void read_arrays(Real (&x)[3][V], const ScanArguments& a, const Place& p, int t, int d) {
    read_array<LA_DTYPE>(x[0], p, a.x, t, d);
    read_array<LA_GATE>(x[1], p, a.gate, t, d);
    if constexpr (HAS_Z) read_array<LA_WRITE>(x[2], p, a.write, t, d);
    else
#pragma unroll
        for (int v = 0; v < V; v++) x[2][v] = 0;
}
LA_DEVICE void make(Gates& gates, Inputs& xs, const ScanArguments& a, const Place& p, int first, int mine, int d,
                    const Channels& own) {
    if constexpr (MADE) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            Numbers f, u;
            fill(f, 1);
            fill(u, 0);
            if (r < mine) {
                Real x[3][V];
                read_arrays(x, a, p, first + r, d);
#pragma unroll
                for (int v = 0; v < V; v++) {
                    const Pair<Real> both = made(x[0][v], x[1][v], x[2][v], own.rate[v]);
                    f[v] = number_of(both.a), u[v] = number_of(both.u);
                }
            }
            gates.rows[r] = Gates::rounded(f);
            xs.rows[r] = Inputs::rounded(u);
        }
    }
}

LA_DEVICE Number initial(const ScanArguments& a, i64 at) { return ((const Number*)a.start)[at]; }

extern "C" __global__ void __launch_bounds__(32 * WARPS, LA_BLOCKS) scan(const __grid_constant__ ScanArguments a) {
    u32 block = blockIdx.x;
    if constexpr (LA_LINKED) {
        __shared__ u32 ticket;
        block = taken(a, ticket);
    }
    const Place p(a, block);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp * R;
    const int d = p.column * WIDTH + lane * V;
    const bool inside = d < a.D;
    const int mine = inside ? p.count - first : 0;
    const Real scale = (Real)a.scale;

    const Channels own(a, d);
    Inputs xs;
    Gates gates;
    Grads grads;
    Numbers h, q;
    {
        Numbers zero, one;
        fill(zero, 0);
        fill(one, LA_LOG ? 0 : 1);
        if constexpr (MADE) make(gates, xs, a, p, first, mine, d, own);
        else {
            if constexpr (!OF_CHANNELS)
                gates.read(p.row(a.gate, first) + (i64)d * GATE_ELEMENT, a.gate.token, mine, Gates::rounded(one));
            xs.read(p.row(a.x, first) + (i64)d * X_ELEMENT, a.x.token, mine, Inputs::rounded(zero));
        }
        if constexpr (BACK) {
            constexpr int BYTES = bytes_of(LA_DOUT) * PARTS;
            grads.read(p.row(a.dout, first) + (i64)d * BYTES, a.dout.token, mine, Grads::rounded(zero));
            if (inside)
#pragma unroll
                for (int v = 0; v < V; v++) h[v] = ((const Number*)a.marks)[(p.mark + p.j) * a.D + d + v];
            else fill(h, 0);
        }
    }
    if constexpr (LA_AHEAD != 0) {
        if (block + LA_AHEAD < a.blocks) {
            const Place later(a, block + LA_AHEAD);
            if (!OF_CHANNELS) fetch(a, later, a.gate, first, lane, GATE_ELEMENT);
            fetch(a, later, a.x, first, lane, X_ELEMENT);
            if constexpr (HAS_Z) fetch(a, later, a.write, first, lane, bytes_of(LA_WRITE));
            if (BACK) fetch(a, later, a.dout, first, lane, bytes_of(LA_DOUT) * PARTS);
        }
    }
    to_factors(gates);

    // the links of the warp: (A, H) forwards, (A*, Q) backwards
    __shared__ Shared all_A, all_H, all_Q, all_conjugates;
    {
        Numbers A, H, f, x;
        fill(A, 1);
        fill(H, 0);
#pragma unroll
        for (int r = 0; r < R; r++) {
            factors(f, gates, r, own, mine);
            inputs(x, xs, r, own);
#pragma unroll
            for (int v = 0; v < V; v++) {
                H[v] = times_plus(f[v], H[v], x[v]);
                A[v] = times(A[v], f[v]);
            }
        }
        put_in(all_A, warp, lane, A);
        put_in(all_H, warp, lane, H);
        if constexpr (BACK) {
            gates.forget();
            fill(H, 0);
#pragma unroll
            for (int r = R - 1; r >= 0; r--) {
                factors(f, gates, r, own, mine);
                grads.get(x, r);
#pragma unroll
                for (int v = 0; v < V; v++) H[v] = times(conjugate(f[v]), times_plus(number_of(scale), x[v], H[v]));
            }
            put_in(all_Q, warp, lane, H);
            if constexpr (LA_COMPLEX) {
#pragma unroll
                for (int v = 0; v < V; v++) A[v] = conjugate(A[v]);
                put_in(all_conjugates, warp, lane, A);
            }
        }
    }
    gates.forget();
    xs.forget();
    grads.forget();
    __syncthreads();

    if constexpr (!BACK) {
        begin(h, a, p, all_A, all_H, warp, lane, d);
        const int t = p.j * L + first;
        if constexpr (LA_MARK != 0) {
            if (t % LA_MARK == 0 && inside && (mine > 0 || t == 0)) store_state(a.marks, p.mark + t / LA_MARK, a, d, h);
        }
        char* to = p.row(a.out, first) + (i64)d * OUT_ELEMENT;
#pragma unroll
        for (int r = 0; r < R; r++) {
            Numbers f, x;
            factors(f, gates, r, own, mine);
            inputs(x, xs, r, own);
#pragma unroll
            for (int v = 0; v < V; v++) h[v] = times_plus(f[v], h[v], x[v]), x[v] = times(number_of(scale), h[v]);
            if (r < mine) Outputs::rounded(x).write(to);
            to += a.out.token;
        }
        // after the last token of the sequence
        if (inside && p.j == p.tiles - 1 && warp == (p.count > 0 ? (p.count - 1) / R : 0))
            store_state(a.end, p.n, a, d, h);
    } else {
        begin(q, a, p, LA_COMPLEX ? all_conjugates : all_A, all_Q, warp, lane, d);
        for (int i = 0; i < warp; i++) follow(h, all_A, all_H, i, lane);
        char* to = p.row(a.out, first + R - 1) + (i64)d * X_ELEMENT;
        Adjoints dx;
#pragma unroll
        for (int r = R - 1; r >= 0; r--) {
            Numbers f, x;
            factors(f, gates, r, own, mine);
            grads.get(x, r);
#pragma unroll
            for (int v = 0; v < V; v++) {
                x[v] = times_plus(number_of(scale), x[v], q[v]);
                q[v] = times(conjugate(f[v]), x[v]);
            }
            dx.rows[r] = Adjoints::rounded(x);   // in the place of dout
            if constexpr (OF_CHANNELS) {
#pragma unroll
                for (int v = 0; v < V; v++) x[v] = times(number_of(own.factor[v]), x[v]);
                if (r < mine) Given::rounded(x).write(to);
            } else if constexpr (!MADE) {
                if (r < mine) dx.rows[r].write(to);
            }
            to -= a.out.token;
        }
        if (inside && p.j == 0 && warp == 0) store_state(a.end, p.n, a, d, q);
        gates.forget();
        Numbers sum, sum_of_x;   // over tokens
        fill(sum, 0);
        fill(sum_of_x, 0);
        char* gate_to = p.row(a.dgate, first) + (i64)d * GATE_ELEMENT;
#pragma unroll
        for (int r = 0; r < R; r++, gate_to += a.dgate.token) {
            Numbers f, x, y;
            factors(f, gates, r, own, mine);
            inputs(x, xs, r, own);
            dx.get(y, r);
            if constexpr (OF_CHANNELS) {
                if (r < mine)
#pragma unroll
                    for (int v = 0; v < V; v++) sum_of_x[v] = plus(sum_of_x[v], times(y[v], conjugate(x[v])));
            }
            Real of_arrays[3][V];
            if constexpr (MADE) {
                if (r < mine) read_arrays(of_arrays, a, p, first + r, d);
            }
#pragma unroll
            for (int v = 0; v < V; v++) {
                const Number du = y[v];
                y[v] = times(y[v], conjugate(h[v]));
                if (LA_LOG) y[v] = times(conjugate(f[v]), y[v]);
                h[v] = times_plus(f[v], h[v], x[v]);
                if constexpr (MADE) {
                    if (r >= mine) continue;
                    const Slopes<Real> d_of = made_vjp(of_arrays[0][v], of_arrays[1][v], of_arrays[2][v], own.rate[v],
                                                       real_part(du), real_part(y[v]));
                    of_arrays[0][v] = d_of.x, of_arrays[1][v] = d_of.y, of_arrays[2][v] = d_of.z;
                    sum[v] = plus(sum[v], number_of(d_of.rate));
                }
            }
            if (r >= mine) continue;
            if constexpr (MADE) {
                write_array<LA_DTYPE>(of_arrays[0], p, a.out, first + r, d);
                write_array<LA_GATE>(of_arrays[1], p, a.dgate, first + r, d);
                if constexpr (HAS_Z) write_array<LA_WRITE>(of_arrays[2], p, a.dwrite, first + r, d);
            } else if constexpr (LA_CONSTANT || OF_CHANNELS) {
#pragma unroll
                for (int v = 0; v < V; v++) sum[v] = plus(sum[v], y[v]);
            } else Gates::rounded(y).write(gate_to);
        }
        const i64 tile = p.slot + p.j;
        if constexpr (LA_CONSTANT) {
            add_warps(sum, all_Q, warp, lane);
            if (warp == 0 && inside) store_state(a.dgate.data, tile, a, d, sum);
        }
        Real* const sums = (Real*)a.sums + tile * a.D + d;   // (parameters, tiles, D)
        if constexpr (LA_FORMULA == RG_LRU) {
            add_warps(sum, all_Q, warp, lane);
            if (warp == 0 && inside)
#pragma unroll
                for (int v = 0; v < V; v++) {
                    const Real slope = -8 * sigmoid(channel(a, 0, d + v));
                    sums[v] = slope * real_part(sum[v]);
                }
        }
        if constexpr (OF_CHANNELS) {
            add_warps(sum, all_Q, warp, lane);
            add_warps(sum_of_x, all_H, warp, lane);
            if (warp == 0 && inside)
#pragma unroll
                for (int v = 0; v < V; v++) {
                    Real parts[2] = {};
                    to_parts(parts, times(conjugate(own.a[v]), sum[v]));   // of log a
                    const i64 each = (i64)(a.blocks / a.columns) * a.D;
                    sums[v] = -exp(channel(a, 0, d + v)) * parts[0];
                    sums[each + v] = exp(channel(a, 1, d + v)) * parts[1];
                    sums[2 * each + v] = real_part(sum_of_x[v]);
                }
        }
    }
}
