// Tiles of a scan of tokens, and the links by which blocks hand states on: of recurrences of any kind of state.
//
// A block has a tile: L = LA_R LA_WARPS tokens of a sequence, 32 LA_V channels. A warp holds LA_R of the tokens, a lane
// LA_V channels. What a span of tokens does to the state before it (after it, backwards) is a link, the map (A, B):
// state -> A state + B, with A a Factor, B a Number, and products and sums of their own (number.cuh, average.cu).
// Warps hand theirs on in shared memory, tiles in global memory: a tile combines those of the earlier tiles of its
// group of GROUP, in order, behind the state that the group begins with. So a sequence has the same bits alone, in a
// batch and in a ragged one. Tiles are taken by ticket, earlier ones first, so that a tile only waits for blocks that
// run.
//
// A source defines Factor and Number before it includes this file, and `initial` after. LA_LINKED: sequences have
// several tiles.
#pragma once
#include "arguments/elementwise/ClearArguments.cuh"
#include "arguments/elementwise/ScanArguments.cuh"
#include "elementwise/words.cuh"

constexpr int V = LA_V, R = LA_R, WARPS = LA_WARPS, L = R * WARPS, WIDTH = 32 * V, GROUP = 8;
constexpr bool BACK = LA_BACK != 0;
typedef Number Numbers[V];
typedef Factor Factors[V];
typedef Number Shared[WARPS][WIDTH];
typedef Factor SharedFactors[WARPS][WIDTH];
static_assert(!LA_LINKED || WARPS >= GROUP, "a warp reads a link");

LA_DEVICE void units(Factors& x) {
#pragma unroll
    for (int v = 0; v < V; v++) unit(x[v]);
}
LA_DEVICE void zeros(Numbers& x) {
#pragma unroll
    for (int v = 0; v < V; v++) zero(x[v]);
}

// the next tile that no block has taken; ticket: of the block
LA_DEVICE u32 taken(const ScanArguments& a, u32& ticket) {
    if (threadIdx.x == 0) ticket = atomicAdd((u32*)a.words, 1u) + 1u;   // from ~0 on
    __syncthreads();
    return ticket;
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

template <class T> LA_DEVICE void put_in(T (&to)[WARPS][WIDTH], int warp, int lane, const T (&x)[V]) {
#pragma unroll
    for (int v = 0; v < V; v++) to[warp][lane + 32 * v] = x[v];
}
// state -> A state + B of the link in row i
LA_DEVICE void follow(Numbers& h, const SharedFactors& A, const Shared& B, int i, int lane) {
#pragma unroll
    for (int v = 0; v < V; v++) h[v] = times_plus(A[i][lane + 32 * v], h[v], B[i][lane + 32 * v]);
}

// links in global memory
struct Link {
    Factor A;
    Number B;
};
constexpr int WORDS = sizeof(Link) / 8;
static_assert(sizeof(Link) % 8 == 0, "whole words");
LA_DEVICE u64* link_of(const ScanArguments& a, const Place& p, int order, int lane, int v) {
    const i64 width = (i64)a.columns * WIDTH;
    return a.words + 1 + (p.slot + order) * WORDS * width + p.column * WIDTH + lane + 32 * v;
}
LA_DEVICE void publish(const ScanArguments& a, const Place& p, int lane, const Factors& A, const Numbers& B) {
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
LA_DEVICE void receive(const ScanArguments& a, const Place& p, int order, int lane, Factors& A, Numbers& B) {
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

// of a state before the first tile, or of its gradient behind the last one
LA_DEVICE Number initial(const ScanArguments& a, i64 at);

// h: the state that this warp begins with, from the links of warps (A, B) and of tiles
LA_DEVICE void begin(Numbers& h, const ScanArguments& a, const Place& p, const SharedFactors& A, const Shared& B,
                     int warp, int lane, int d) {
    const int order = p.order(), base = order / GROUP * GROUP, k = order - base;
    zeros(h);
    const auto start = [&] {
        if (a.start != nullptr && d < a.D)
#pragma unroll
            for (int v = 0; v < V; v++) h[v] = initial(a, (i64)p.n * a.D + d + v);
    };
    if constexpr (LA_LINKED) {
        __shared__ SharedFactors links_A;
        __shared__ Shared links_B;
        __shared__ Number from[WIDTH];
        if (warp == WARPS - 1) {
            if (k < GROUP - 1 && order + 1 < p.tiles) {
                Factors own;
                Numbers rest;
                units(own);
                zeros(rest);
#pragma unroll
                for (int i = 0; i < WARPS; i++) {
                    follow(rest, A, B, warp_at(i), lane);
#pragma unroll
                    for (int v = 0; v < V; v++) own[v] = times(own[v], A[warp_at(i)][lane + 32 * v]);
                }
                publish(a, p, lane, own, rest);
            }
            Factors unused;
            if (base) receive(a, p, base - 1, lane, unused, h);
            else start();
#pragma unroll
            for (int v = 0; v < V; v++) from[lane + 32 * v] = h[v];
        } else if (warp < k) {
            Factors own;
            Numbers rest;
            receive(a, p, base + warp, lane, own, rest);
            put_in(links_A, warp, lane, own);
            put_in(links_B, warp, lane, rest);
        }
        __syncthreads();
#pragma unroll
        for (int v = 0; v < V; v++) h[v] = from[lane + 32 * v];
        for (int i = 0; i < k; i++) follow(h, links_A, links_B, i, lane);
        if (warp == WARPS - 1 && k == GROUP - 1 && order + 1 < p.tiles) {   // the state that the next group begins with
            Factors one;
            Numbers end;
            units(one);
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

// the sum over the warps, in order, of the first one
template <class T> LA_DEVICE void add_warps(T (&sum)[V], T (&beside)[WARPS][WIDTH], int warp, int lane) {
    __syncthreads();   // what was there has been read
    put_in(beside, warp, lane, sum);
    __syncthreads();
    if (warp == 0)
#pragma unroll
        for (int i = 1; i < WARPS; i++)
#pragma unroll
            for (int v = 0; v < V; v++) sum[v] = plus(sum[v], beside[i][lane + 32 * v]);
}

LA_DEVICE void store_state(char* to, i64 row, const ScanArguments& a, int d, const Numbers& h) {
#pragma unroll
    for (int v = 0; v < V; v++) ((Number*)to)[row * a.D + d + v] = h[v];
}

extern "C" __global__ void __launch_bounds__(256) clear(const __grid_constant__ ClearArguments a) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i < a.count) a.words[i] = EMPTY;
}
