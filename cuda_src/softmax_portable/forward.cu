// Softmax attention by products of warps, over a cache and the tokens of a call: one tile of keys after the other.
//
//     z_ij = scale log2(e) q_i.k_j + log2 of the decay from j to i,    m' = max(m, max_j z_ij),   e_ij = 2^(z_ij - m')
//     l' = 2^(m - m') l + sum_j e_ij,   out' = 2^(m - m') out + sum_j e_ij v_j
//
// LA_SPLIT 0: a block has ROWS queries of a head, 16 a warp, and all their keys. 1, for a few tokens after a cache: a
// block has 16 rows, the heads that share a head of keys and values one after the other for every token, and a piece of
// the keys, each warp 16 of every tile; cache.cu combines the results of the pieces.
#include "softmax_portable/portable.cuh"

constexpr bool SPLIT = LA_SPLIT;
constexpr int KEYS = LA_KEYS, ROWS = LA_ROWS, WARPS = SPLIT ? KEYS / 16 : ROWS / 16, THREADS = 32 * WARPS;
constexpr int OWN = SPLIT ? 16 : KEYS,
              HEADS = LA_HEADS;   // keys of a warp in a tile; heads whose decays a block needs, at most
typedef Tile<WIDTH_K, BYTES> KeyTile;
typedef Tile<WIDTH_V, BYTES> ValueTile;
constexpr int QUERIES = ROWS * KeyTile::ROW, AT_V = KEYS * KeyTile::ROW, AT_DECAYS = AT_V + KEYS * ValueTile::ROW;
constexpr int STAGE = AT_DECAYS + GATED * HEADS * KEYS * 16, TILES = QUERIES + LA_STAGES * STAGE;
constexpr int SUMS = SPLIT * WARPS * 16 * (WIDTH_V + 2) * 4;   // of the warps of a block, at the end
static_assert((TILES > SUMS ? TILES : SUMS) == LA_SHARED, "linattn_np/softmax/cuda/portable_plan.py");
constexpr bool HELD = SPLIT && BYTES == 2 && WIDTH_K <= 128;   // queries are held in registers
static_assert(!SPLIT || ROWS == 16, "rows of every warp");
static_assert(LA_STAGES >= 2, "one tile is copied while another is read");

struct Block {
    int sequence, group, tile, piece, pack;   // group: of heads that share keys and values, `pack` of them
    __device__ __forceinline__ Block(const PortableArguments& a) {
        u32 n = blockIdx.x;
        pack = SPLIT ? a.pack : 1;
        const u32 groups = a.heads / pack;
        if (SPLIT) {
            tile = n % a.tiles;
            n /= a.tiles;
            piece = n % a.pieces;
            n /= a.pieces;
        } else {   // those with most keys first
            const u32 pairs = a.sequences * groups;
            tile = a.tiles - 1 - n / pairs;
            n %= pairs;
            piece = 0;
        }
        group = n % groups;
        sequence = n / groups;
    }
};

struct Tiles {   // of keys and values of a block, and their copies
    const PortableArguments& a;
    const Owner& own;
    const Block& block;
    const u32 shared;
    const int lane, warp, row0, key0;   // of the warp: its rows of the block, its keys of a tile
    int begin, end, steps, first;       // keys; tiles of them; first row of the block
    int low[2], high[2], entry[2];      // keys that the lane's two rows read; where the decays for their heads are
    float m[2], l[2];                   // maxima and sums of the two rows
    Decays decays[2];

    __device__ __forceinline__ Tiles(const PortableArguments& a, const Owner& own, const Block& block, u32 shared)
        : a(a),
          own(own),
          block(block),
          shared(shared),
          lane(threadIdx.x & 31),
          warp(threadIdx.x >> 5),
          row0(SPLIT ? 0 : warp * 16),
          key0(SPLIT ? warp * 16 : 0) {
        first = block.tile * ROWS;
        const int from = first / block.pack, until = (min(first + ROWS, own.T * block.pack) - 1) / block.pack;
        begin = -own.past + block.piece * a.piece;
        end = own.Tk;
        if (SPLIT) end = min(end, begin + a.piece);
        else if (a.causal) {
            begin = max(begin, from - a.window + 1);
            end = min(end, until + 1);
        }
        steps = (end - begin + KEYS - 1) / KEYS;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int t = min(token(h), own.T - 1);
            low[h] = a.causal ? t - a.window + 1 : begin;
            high[h] = (a.causal ? min(t + 1, end) : end) - 1;
            m[h] = minus_infinity();
            l[h] = 0.f;
            if constexpr (GATED) {
                decays[h] = ((const Decays*)a.sums)[own.number(a, head(row(h)), t)];
                entry[h] = entry_of(row(h) - first);
            }
        }
    }
    __device__ __forceinline__ int row(int h) const { return first + row0 + (lane >> 2) + 8 * h; }
    __device__ __forceinline__ int token(int h) const { return row(h) / block.pack; }
    __device__ __forceinline__ int head(int row) const { return block.group * block.pack + row % block.pack; }
    __device__ __forceinline__ int entry_of(int r) const {
        return HEADS == 1 ? 0 : block.pack <= HEADS ? (first + r) % block.pack : r;
    }
    __device__ __forceinline__ u32 stage(int step) const { return shared + QUERIES + step % LA_STAGES * STAGE; }

    __device__ __forceinline__ void fill_queries() const {
        const auto row = [&](int r) -> const char* {
            const int n = first + r;
            return n < own.T * block.pack ? own.token(a.q, head(n), n / block.pack) : (const char*)0;
        };
        fill_rows<LA_INPUT, LA_K, THREADS, KeyTile>(shared, 0, ROWS, row);
    }
    __device__ __forceinline__ void fill_decays(u32 to, int j0) const {
        const int base = LA_PAST && j0 < 0 ? (own.seen + j0) % a.slots : 0;
#pragma unroll 4
        for (int n = threadIdx.x; n < HEADS * KEYS; n += THREADS) {
            const int r = n / HEADS, x = n % HEADS, j = j0 + r, of = head(block.pack <= HEADS ? x : first + x);
            if (x >= block.pack) continue;
            const u32 at = to + (x * KEYS + r) * 16;
            if (LA_PAST && j < 0)
                copy_in<4>(at, own.slot(a.b, of, base + r - (base + r >= a.slots ? a.slots : 0)), true);
            else copy_in<16>(at, (const Decays*)a.sums + own.number(a, of, min(j, own.Tk - 1)), true);
        }
    }
    // a tile is on its way; an empty group after the last
    __device__ __forceinline__ void fill(int step) const {
        if (step < steps) {
            const int j0 = begin + step * KEYS, head = block.group * block.pack;
            fill_keys<LA_K, KEYS, THREADS, KeyTile>(stage(step), a, own, a.past_k, a.k, head, j0, end);
            fill_keys<LA_V, KEYS, THREADS, ValueTile>(stage(step) + AT_V, a, own, a.past_v, a.v, head, j0, end);
            if constexpr (GATED) fill_decays(stage(step) + AT_DECAYS, j0);
        }
        copy_commit();
    }
};

struct Worker : Tiles {
    using Tiles::Tiles;

    __device__ __forceinline__ void hold(typename Element::A (&q)[HELD ? WIDTH_K / 16 : 1]) const {
#pragma unroll
        for (int k = 0; k < (HELD ? WIDTH_K / 16 : 0); k++)
            q[k] = Element::operand(load_a_rows<Element, KeyTile>(shared, 0, k * 16, lane));
    }
    // scores of the warp's sixteen keys; even and odd steps have sums of their own, so that fewer products wait for one
    // another
    __device__ __forceinline__ void multiply_few(float (&s)[OWN / 8][4],
                                                 const typename Element::A (&q)[HELD ? WIDTH_K / 16 : 1],
                                                 int step) const {
        float odd[2][4];
        clear(odd);
#pragma unroll
        for (int k = 0; k < WIDTH_K / 16; k++) {
            const typename Element::A x =
                HELD ? q[HELD ? k : 0] : Element::operand(load_a_rows<Element, KeyTile>(shared, 0, k * 16, lane));
            typename Element::B y[2];
            load_b_rows<Element, KeyTile>(y, stage(step), key0, k * 16, lane);
            Element::multiply(k & 1 ? odd[0] : s[0], x, y[0]);
            Element::multiply(k & 1 ? odd[1] : s[1], x, y[1]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] += odd[n][e];
    }
    // scores with decays, of the keys that are read
    __device__ __forceinline__ void finish_scores(float (&s)[OWN / 8][4], int step) const {
        const int j0 = begin + step * KEYS + key0 + (lane & 3) * 2;
        const float c = a.scale * LOG2_E;
        const bool all = j0 + OWN <= high[0] + 1 && j0 >= low[1];
#pragma unroll
        for (int n = 0; n < OWN / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int h = e >> 1, j = j0 + n * 8 + (e & 1);
                s[n][e] *= c;
                if constexpr (GATED) {
                    const Decays x = load_decays(stage(step) + AT_DECAYS +
                                                 (entry[h] * KEYS + key0 + n * 8 + (lane & 3) * 2 + (e & 1)) * 16);
                    s[n][e] += decay_between(decays[h], LA_PAST && j < 0 ? of_past(x.x) : x);
                }
                if (!all && (j > high[h] || j < low[h])) s[n][e] = minus_infinity();
            }
    }
    __device__ __forceinline__ void run() {
        float out[WIDTH_V / 8][4];
        typename Element::A q[HELD ? WIDTH_K / 16 : 1];
        clear(out);
        fill_queries();
#pragma unroll
        for (int n = 0; n < LA_STAGES - 1; n++) fill(n);
        for (int step = 0; step < steps; step++) {
            copy_wait<LA_STAGES - 2>();
            __syncthreads();
            fill(step + LA_STAGES - 1);
            float s[OWN / 8][4];
            clear(s);
            if constexpr (SPLIT) {
                if (HELD && step == 0) hold(q);
                multiply_few(s, q, step);
            } else multiply_rows<KeyTile, KeyTile>(s, shared, row0, stage(step), key0, lane);
            finish_scores(s, step);
            exponentiate(s, m, l, out);
            multiply_weights<ValueTile, !SPLIT>(out, s, stage(step) + AT_V, key0, lane);
        }
        copy_wait<0>();
        l[0] = row_sum(l[0]);
        l[1] = row_sum(l[1]);
        if constexpr (SPLIT) store_part(out);
        else store(out);
    }
    __device__ __forceinline__ void store(const float (&out)[WIDTH_V / 8][4]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int t = row(h);
            if (t >= own.T) continue;
            float log;
            const float f = normalised(a, block.group, m[h], l[h], log);
            char* const to = own.token(a.out, block.group, t);
#pragma unroll
            for (int n = 0; n < WIDTH_V / 8; n++)
                store_two<LA_INPUT, LA_V>(to, n * 8 + (lane & 3) * 2, out[n][2 * h] * f, out[n][2 * h + 1] * f);
            if (a.logs && (lane & 3) == 0) a.logs[own.number(a, block.group, t)] = log;
        }
    }
    // the warps' rows as one, to `parts`
    __device__ __forceinline__ void store_part(const float (&out)[WIDTH_V / 8][4]) {
        float2* const maxima = (float2*)shared_memory();     // (warps, 16): maximum and sum
        float* const sums = (float*)(maxima + WARPS * 16);   // (warps, 16, WIDTH_V)
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++)
            if ((lane & 3) == 0) maxima[warp * 16 + (lane >> 2) + 8 * h] = {m[h], l[h]};
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = (lane >> 2) + 8 * h;
            float most = minus_infinity();
#pragma unroll
            for (int w = 0; w < WARPS; w++) most = fmaxf(most, maxima[w * 16 + r].x);
            const float f = exp2_approx(m[h] - (most == minus_infinity() ? 0.f : most));
#pragma unroll
            for (int n = 0; n < WIDTH_V / 8; n++)
                *(float2*)(sums + (warp * 16 + r) * WIDTH_V + n * 8 + (lane & 3) * 2) = {out[n][2 * h] * f,
                                                                                         out[n][2 * h + 1] * f};
        }
        __syncthreads();
        for (int n = threadIdx.x; n < 16 * LA_V; n += THREADS) {
            const int r = n / LA_V, c = n % LA_V, of = first + r;
            if (of >= own.T * block.pack) break;
            const i64 to = part_row(a, own, block.piece, head(of), of / block.pack);
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += sums[(w * 16 + r) * WIDTH_V + c];
            a.parts[to * LA_V + c] = sum;
            if (c) continue;
            float most = minus_infinity(), all = 0.f;
            for (int w = 0; w < WARPS; w++) most = fmaxf(most, maxima[w * 16 + r].x);
            for (int w = 0; w < WARPS; w++)
                all +=
                    maxima[w * 16 + r].y * exp2_approx(maxima[w * 16 + r].x - (most == minus_infinity() ? 0.f : most));
            ((float2*)a.maxima)[to] = {most, all};
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) portable_forward(const __grid_constant__ PortableArguments a) {
    const Block block(a);
    const Owner own(a, block.sequence, tokens_seen(a, block.sequence));
    if (LA_PAST && own.is_short() != SPLIT) return;
    if (block.tile * ROWS >= own.T * block.pack || (SPLIT && block.piece >= own.pieces(a))) return;
    if (LA_PAST && a.counts && threadIdx.x == 0 && block.group + block.tile + block.piece == 0)
        a.counts[block.sequence] = a.lengths[block.sequence];
    Worker(a, own, block, shared_address(shared_memory())).run();
}
