// h_t = a_t h_{t-1} + x_t of every channel, and its adjoint: linattn_np/elementwise/definition.py has the equations.
//
//     forward     h_t = a_t h_{t-1} + x_t,  out_t = scale h_t
//     LA_BACK     p_t = q_{t+1} + scale dout_t,  q_t = a*_t p_t,  dx_t = p_t,  da_t = p_t h*_{t-1},  dg_t = a*_t da_t
//
// A block has a tile: L = LA_R LA_WARPS tokens of a sequence, 32 LA_V channels. A warp holds LA_R of the tokens, a lane
// LA_V channels, in registers, as they lie in memory: everything is read once. What a span of tokens does to the state
// before it (after it, backwards) is a link, the affine map (A, B): state -> A state + B. Warps hand theirs on in
// shared memory, tiles in global memory: a tile combines those of the earlier tiles of its group of GROUP, in order,
// behind the state that the group begins with. So a sequence has the same bits alone, in a batch and in a ragged one.
// Tiles are taken by ticket, earlier ones first, so that a tile only waits for blocks that run.
//
// A backward begins a tile with the state that the forward stored there, every LA_MARK tokens.
// Tokens behind the end of a sequence have a = 1 and x = dout = 0.
//
// LA_DTYPE, LA_GATE, LA_DOUT: kinds of x (out, dx), the gate, dout. LA_LOG: the gate is log a. LA_CONSTANT: one gate
// for all tokens. LA_LINKED: sequences have several tiles. LA_AHEAD: of which later tile the lines are fetched, 0: of
// none.
#include "arguments/elementwise/ClearArguments.cuh"
#include "arguments/elementwise/ScanArguments.cuh"
#include "elementwise/number.cuh"
#include "elementwise/words.cuh"

constexpr int V = LA_V, R = LA_R, WARPS = LA_WARPS, L = R * WARPS, WIDTH = 32 * V, GROUP = 8;
constexpr int PARTS = LA_COMPLEX ? 2 : 1, N = V * PARTS;
constexpr bool BACK = LA_BACK != 0;
typedef WideType<LA_DOUBLE>::type Real;
typedef NumberType<LA_DOUBLE, LA_COMPLEX>::type Number;
typedef Number Numbers[V];
typedef Number Shared[WARPS][WIDTH];
constexpr int WORDS = 2 * sizeof(Number) / 8;   // of a link
static_assert(!LA_LINKED || WARPS >= GROUP, "a warp reads a link");
constexpr int ELEMENT = bytes_of(LA_DTYPE) * PARTS, GATE_ELEMENT = bytes_of(LA_GATE) * PARTS;

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

struct Place {                // of a tile
    int n, j, count, tiles;   // sequence, tile of it, tokens, tiles of the sequence
    i64 slot, mark;           // of the sequence's first tile: link, mark
    i64 batch, token;         // of the first token in arrays
    int column;
    __device__ __forceinline__ Place(const ScanArguments& a, u32 block) {
        const u32 tile = block / a.columns;
        column = block % a.columns;
        int T;
        if (a.table == nullptr) {
            n = tile % a.sequences;
            j = tile / a.sequences;
            T = a.T;
            tiles = a.tiles;
            slot = (i64)n * tiles;
            mark = (i64)n * a.marks_each;
            batch = n;
            token = 0;
        } else {
            const int* row = a.table + 4 * (i64)tile;
            n = row[0];
            j = row[1];
            slot = row[2];
            mark = row[3];
            batch = 0;
            token = a.offsets[n];
            T = (int)(a.offsets[n + 1] - token);
            tiles = T > L ? (T + L - 1) / L : 1;
        }
        if (BACK) j = tiles - 1 - j;
        count = min(L, T - j * L);
        token += (i64)j * L;
    }
    __device__ __forceinline__ int order() const { return BACK ? tiles - 1 - j : j; }
    __device__ __forceinline__ char* row(const Tokens& of, int t) const {
        return of.data + batch * of.batch + (token + t) * of.token;
    }
};

// R rows of a lane as they lie in memory
template <int KIND> struct Rows {
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
        for (int v = 0; v < V; v++) of_parts(x[v], y + v * PARTS);
    }
    static __device__ __forceinline__ Row rounded(const Numbers& x) {
        Real y[N];
#pragma unroll
        for (int v = 0; v < V; v++) to_parts(y + v * PARTS, x[v]);
        Row row;
        row.round(y);
        return row;
    }
};
typedef Rows<LA_DTYPE> Inputs;
typedef Rows<LA_GATE> Gates;
typedef Rows<LA_DOUT> Grads;

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
constexpr bool REPLACED = LA_LOG && LA_GATE == (LA_DOUBLE ? 3 : 2);
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
LA_DEVICE void factors(Numbers& a, const Gates& gates, int r) {
    gates.get(a, r);
    if constexpr (LA_LOG && !REPLACED) {
#pragma unroll
        for (int v = 0; v < V; v++) a[v] = exponential<LA_GATE>(a[v]);
    }
}

template <class T> LA_DEVICE void put_in(Shared& to, int warp, int lane, const T& x) {
#pragma unroll
    for (int v = 0; v < V; v++) to[warp][lane + 32 * v] = x[v];
}
// state -> A state + B of the link in row i
LA_DEVICE void follow(Numbers& h, const Shared& A, const Shared& B, int i, int lane) {
#pragma unroll
    for (int v = 0; v < V; v++) h[v] = times_plus(A[i][lane + 32 * v], h[v], B[i][lane + 32 * v]);
}

// links in global memory
struct Link {
    Number A, B;
};
LA_DEVICE u64* link_of(const ScanArguments& a, const Place& p, int order, int lane, int v) {
    const i64 width = (i64)a.columns * WIDTH;
    return a.words + 1 + (p.slot + order) * WORDS * width + p.column * WIDTH + lane + 32 * v;
}
LA_DEVICE void publish(const ScanArguments& a, const Place& p, int lane, const Numbers& A, const Numbers& B) {
    const i64 width = (i64)a.columns * WIDTH;
#pragma unroll
    for (int v = 0; v < V; v++) {
        union {
            Link link;
            u64 words[WORDS];
        } both;
        both.link = {A[v], B[v]};
        u64* to = link_of(a, p, p.order(), lane, v);
#pragma unroll
        for (int i = 0; i < WORDS; i++) store_word(to + i * width, both.words[i] - (both.words[i] == EMPTY));   // a NaN
    }
}
LA_DEVICE void receive(const ScanArguments& a, const Place& p, int order, int lane, Numbers& A, Numbers& B) {
    const i64 width = (i64)a.columns * WIDTH;
    u64 words[V][WORDS];
    bool there;
    do {
        there = true;
#pragma unroll
        for (int v = 0; v < V; v++)
#pragma unroll
            for (int i = 0; i < WORDS; i++) words[v][i] = read_word(link_of(a, p, order, lane, v) + i * width);
#pragma unroll
        for (int v = 0; v < V; v++)
#pragma unroll
            for (int i = 0; i < WORDS; i++) there &= words[v][i] != EMPTY;
    } while (!there);
#pragma unroll
    for (int v = 0; v < V; v++) {
        union {
            Link link;
            u64 words[WORDS];
        } both;
#pragma unroll
        for (int i = 0; i < WORDS; i++) both.words[i] = words[v][i];
        A[v] = both.link.A;
        B[v] = both.link.B;
    }
}

// the i-th warp in the order of the recurrence
LA_DEVICE int warp_at(int i) { return BACK ? WARPS - 1 - i : i; }

// h: the state that this warp begins with, from the links of warps (A, B) and of tiles
LA_DEVICE void begin(Numbers& h, const ScanArguments& a, const Place& p, const Shared& A, const Shared& B, int warp,
                     int lane, int d) {
    const int order = p.order(), base = order / GROUP * GROUP, k = order - base;
    fill(h, 0);
    const auto start = [&] {
        if (a.start != nullptr && d < a.D)
#pragma unroll
            for (int v = 0; v < V; v++) h[v] = ((const Number*)a.start)[(i64)p.n * a.D + d + v];
    };
    if constexpr (LA_LINKED) {
        __shared__ Shared links_A, links_B;
        __shared__ Number from[WIDTH];
        if (warp == WARPS - 1) {
            if (k < GROUP - 1 && order + 1 < p.tiles) {
                Numbers own, rest;
                fill(own, 1);
                fill(rest, 0);
#pragma unroll
                for (int i = 0; i < WARPS; i++) {
                    follow(rest, A, B, warp_at(i), lane);
#pragma unroll
                    for (int v = 0; v < V; v++) own[v] = times(own[v], A[warp_at(i)][lane + 32 * v]);
                }
                publish(a, p, lane, own, rest);
            }
            Numbers unused;
            if (base) receive(a, p, base - 1, lane, unused, h);
            else start();
#pragma unroll
            for (int v = 0; v < V; v++) from[lane + 32 * v] = h[v];
        } else if (warp < k) {
            Numbers own, rest;
            receive(a, p, base + warp, lane, own, rest);
            put_in(links_A, warp, lane, own);
            put_in(links_B, warp, lane, rest);
        }
        __syncthreads();
#pragma unroll
        for (int v = 0; v < V; v++) h[v] = from[lane + 32 * v];
        for (int i = 0; i < k; i++) follow(h, links_A, links_B, i, lane);
        if (warp == WARPS - 1 && k == GROUP - 1 && order + 1 < p.tiles) {   // the state that the next group begins with
            Numbers one, end;
            fill(one, 1);
#pragma unroll
            for (int v = 0; v < V; v++) end[v] = h[v];
#pragma unroll
            for (int i = 0; i < WARPS; i++) follow(end, A, B, warp_at(i), lane);
            publish(a, p, lane, one, end);
        }
    } else start();
    for (int i = 0; warp_at(i) != warp; i++) follow(h, A, B, warp_at(i), lane);
}

// the lines of a warp's rows of a later tile
LA_DEVICE void fetch(const ScanArguments& a, const Place& p, const Tokens& of, int first, int lane, int element) {
    const int lines = WIDTH * element / 128;
    if (p.column * WIDTH + WIDTH <= a.D)
        for (int i = lane; i < R * lines; i += 32) {
            const int t = first + i / lines;
            if (t < p.count) prefetch_line(p.row(of, t) + (i64)p.column * WIDTH * element + i % lines * 128);
        }
}

LA_DEVICE void store_state(char* to, i64 row, const ScanArguments& a, int d, const Numbers& h) {
#pragma unroll
    for (int v = 0; v < V; v++) ((Number*)to)[row * a.D + d + v] = h[v];
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, LA_BLOCKS) scan(const __grid_constant__ ScanArguments a) {
    u32 block = blockIdx.x;
    if constexpr (LA_LINKED) {
        __shared__ u32 ticket;
        if (threadIdx.x == 0) ticket = atomicAdd((u32*)a.words, 1u) + 1u;   // from ~0 on
        __syncthreads();
        block = ticket;
    }
    const Place p(a, block);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp * R;
    const int d = p.column * WIDTH + lane * V;
    const bool inside = d < a.D;
    const int mine = inside ? p.count - first : 0;
    const Real scale = (Real)a.scale;

    Inputs xs;
    Gates gates;
    Grads grads;
    Numbers h, q;
    {
        Numbers zero, one;
        fill(zero, 0);
        fill(one, LA_LOG ? 0 : 1);
        gates.read(p.row(a.gate, first) + (i64)d * GATE_ELEMENT, a.gate.token, mine, Gates::rounded(one));
        xs.read(p.row(a.x, first) + (i64)d * ELEMENT, a.x.token, mine, Inputs::rounded(zero));
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
            fetch(a, later, a.gate, first, lane, GATE_ELEMENT);
            fetch(a, later, a.x, first, lane, ELEMENT);
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
            factors(f, gates, r);
            xs.get(x, r);
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
                factors(f, gates, r);
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
        char* to = p.row(a.out, first) + (i64)d * ELEMENT;
#pragma unroll
        for (int r = 0; r < R; r++) {
            Numbers f, x;
            factors(f, gates, r);
            xs.get(x, r);
#pragma unroll
            for (int v = 0; v < V; v++) h[v] = times_plus(f[v], h[v], x[v]), x[v] = times(number_of(scale), h[v]);
            if (r < mine) Inputs::rounded(x).write(to);
            to += a.out.token;
        }
        // after the last token of the sequence
        if (inside && p.j == p.tiles - 1 && warp == (p.count > 0 ? (p.count - 1) / R : 0))
            store_state(a.end, p.n, a, d, h);
    } else {
        begin(q, a, p, LA_COMPLEX ? all_conjugates : all_A, all_Q, warp, lane, d);
        for (int i = 0; i < warp; i++) follow(h, all_A, all_H, i, lane);
        char* to = p.row(a.out, first + R - 1) + (i64)d * ELEMENT;
        Inputs dx;
#pragma unroll
        for (int r = R - 1; r >= 0; r--) {
            Numbers f, x;
            factors(f, gates, r);
            grads.get(x, r);
#pragma unroll
            for (int v = 0; v < V; v++) {
                x[v] = times_plus(number_of(scale), x[v], q[v]);
                q[v] = times(conjugate(f[v]), x[v]);
            }
            dx.rows[r] = Inputs::rounded(x);   // in the place of dout
            if (r < mine) dx.rows[r].write(to);
            to -= a.out.token;
        }
        if (inside && p.j == 0 && warp == 0) store_state(a.end, p.n, a, d, q);
        gates.forget();
        Numbers sum;
        fill(sum, 0);
        char* gate_to = p.row(a.dgate, first) + (i64)d * GATE_ELEMENT;
#pragma unroll
        for (int r = 0; r < R; r++, gate_to += a.dgate.token) {
            Numbers f, x, y;
            factors(f, gates, r);
            xs.get(x, r);
            dx.get(y, r);
#pragma unroll
            for (int v = 0; v < V; v++) {
                y[v] = times(y[v], conjugate(h[v]));
                if (LA_LOG) y[v] = times(conjugate(f[v]), y[v]);
                h[v] = times_plus(f[v], h[v], x[v]);
            }
            if (r < mine) {
                if constexpr (LA_CONSTANT) {
#pragma unroll
                    for (int v = 0; v < V; v++) sum[v] = plus(sum[v], y[v]);
                } else Gates::rounded(y).write(gate_to);
            }
        }
        if constexpr (LA_CONSTANT) {
            __syncthreads();   // the last links have been read
            put_in(all_Q, warp, lane, sum);
            __syncthreads();
            if (warp == 0 && inside) {
#pragma unroll
                for (int i = 1; i < WARPS; i++)
#pragma unroll
                    for (int v = 0; v < V; v++) sum[v] = plus(sum[v], all_Q[i][lane + 32 * v]);
                store_state(a.dgate.data, p.slot + p.j, a, d, sum);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) clear(const __grid_constant__ ClearArguments a) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i < a.count) a.words[i] = EMPTY;
}
