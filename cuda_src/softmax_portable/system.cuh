// Triangular systems of attention (deltaformer), by blocks of ROWS tokens of a head, each a block of threads:
//
//     r_i = sum_{j < i} p_ij u_j,     u_i = v_i - beta_i r_i;     transposed: y_j = du_j + sum_{i > j} p_ij d_i,
//     d_i = -beta_i y_i
//
// A block forms its own pairs first, then goes over the tiles of the blocks that are solved before it (earlier ones; of
// the transposed system later ones) in their order, and waits for each; then it solves its own system and counts.
// Blocks that others wait for have the lower numbers, so that they have begun.
#pragma once
#include "softmax/counts.cuh"
#include "softmax_portable/portable.cuh"

#include "arguments/softmax/SystemArguments.cuh"

constexpr bool BACK = LA_BACK;   // the transposed system
constexpr int ROWS = LA_ROWS, WARPS = ROWS / 16, THREADS = 32 * WARPS;
typedef Tile<WIDTH_K, BYTES> KeyTile;
typedef Tile<WIDTH_V, BYTES> ValueTile;
constexpr int SOLVED = (LA_V * BYTES + 15) / 16 * 16 / BYTES;   // numbers of a row of `solved`
constexpr int PITCH = ROWS + 4, PITCH_X = WIDTH_V + 8;          // of pairs and of right-hand sides, in floats
constexpr int AT_VALUES = ROWS * KeyTile::ROW, AT_DECAYS = AT_VALUES + ROWS * ValueTile::ROW,
              AT_LOGS = AT_DECAYS + GATED * ROWS * 16;
constexpr int STAGE = AT_LOGS + BACK * ROWS * 4, AT_STAGES = ROWS * KeyTile::ROW;
constexpr int AT_GIVEN = AT_STAGES + ROWS * PITCH_X * 4,
              END = AT_GIVEN + ROWS * ValueTile::ROW;   // after the tiles, in their place: sums, v or du
constexpr int AT_PAIRS = AT_STAGES + 2 * STAGE > END ? AT_STAGES + 2 * STAGE : END,
              AT_BETAS = AT_PAIRS + ROWS * PITCH * 4;
static_assert(AT_BETAS + ROWS * 4 == LA_SHARED, "linattn_np/softmax/cuda/system_plan.py");

struct System {
    const SystemArguments& s;
    const PortableArguments& a;
    const Owner& own;
    const Rows &mine, &others;   // rows of the block; those that it meets
    const int head, pair, lane, warp, row0, block, i0, steps;
    const u32 shared;
    int known;   // of thread 0: blocks that it knows to be solved
    Decays decays[2];

    // n: blocks that are solved before
    __device__ __forceinline__ System(const SystemArguments& s, const Owner& own, int pair, int n)
        : s(s),
          a(s.of),
          own(own),
          mine(BACK ? s.of.k : s.of.q),
          others(BACK ? s.of.q : s.of.k),
          head(pair % s.of.heads),
          pair(pair),
          lane(threadIdx.x & 31),
          warp(threadIdx.x >> 5),
          row0(warp * 16),
          block(BACK ? (own.T - 1) / ROWS - n : n),
          i0(block * ROWS),
          steps(n + 1),
          shared(shared_address(shared_memory())),
          known(0) {
        if constexpr (GATED)
#pragma unroll
            for (int h = 0; h < 2; h++)
                decays[h] = ((const Decays*)(BACK ? a.sums : a.readers))[own.number(a, head, min(row(h), own.T - 1))];
        for (int r = threadIdx.x; r < ROWS; r += THREADS)
            store_shared(shared + AT_BETAS + r * 4, i0 + r < own.T ? s.beta[strength(i0 + r)] : 0.f);
    }
    __device__ __forceinline__ int row(int h) const { return i0 + row0 + (lane >> 2) + 8 * h; }
    __device__ __forceinline__ i64 strength(int t) const {
        return ((i64)own.batch * a.T + own.first + t) * a.heads + head;
    }
    __device__ __forceinline__ float beta(int r) const { return load_shared(shared + AT_BETAS + r * 4); }
    __device__ __forceinline__ u32 stage(int step) const { return shared + AT_STAGES + (step & 1) * STAGE; }
    // the first token of a step: of the own block, then of those that are solved before, in their order
    __device__ __forceinline__ int first(int step) const {
        return step == 0 ? i0 : ROWS * (BACK ? block + steps - step : step - 1);
    }

    __device__ __forceinline__ void fill_values(int step) const {
        const int j0 = first(step);
        const auto row = [&](int r) -> const char* {
            return j0 + r < own.T ? own.token(s.solved, head, j0 + r) : (const char*)0;
        };
        fill_rows<LA_INPUT, SOLVED, THREADS, ValueTile, 16>(stage(step) + AT_VALUES, 0, ROWS, row);
    }
    __device__ __forceinline__ void fill(int step, bool is_solved) const {
        if (step < steps) {
            const int j0 = first(step);
            const auto row = [&](int r) -> const char* {
                return j0 + r < own.T ? own.token(others, head, j0 + r) : (const char*)0;
            };
            fill_rows<LA_INPUT, LA_K, THREADS, KeyTile>(stage(step), 0, ROWS, row);
            for (int r = threadIdx.x; r < ROWS; r += THREADS) {
                const i64 n = own.number(a, head, min(j0 + r, own.T - 1));
                if constexpr (GATED)
                    copy_in<16>(stage(step) + AT_DECAYS + r * 16, (const Decays*)(BACK ? a.readers : a.sums) + n, true);
                if constexpr (BACK) copy_in<4>(stage(step) + AT_LOGS + r * 4, a.logs + n, true);
            }
            if (is_solved) fill_values(step);
        }
        copy_commit();
    }
    // whether the block of a step is solved
    __device__ __forceinline__ bool is_solved(int step) {
        if (known >= step) return true;
        known = read_count(s.counts + pair);
        if (known >= step) asm volatile("fence.acq_rel.gpu;" ::: "memory");
        return known >= step;
    }
    __device__ __forceinline__ void wait_values(int step) {
        if (threadIdx.x == 0)
            while (!is_solved(step)) {}
        __syncthreads();
        fill_values(step);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
    }
    // the stores of all threads are visible before the block counts
    __device__ __forceinline__ void count() const {
        __syncthreads();
        if (threadIdx.x) return;
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        store_count(s.counts + pair, steps);
    }
    __device__ __forceinline__ u32 pair_at(int n, int e) const {
        return shared + AT_PAIRS + ((n * 8 + (lane & 3) * 2 + (e & 1)) * PITCH + row0 + (lane >> 2) + 8 * (e >> 1)) * 4;
    }
    // f(p, step) turns scores of a tile into weights, the own block's first, which are stored; sum = the weights of
    // other blocks times the solution
    template <class F> __device__ __forceinline__ void over_tiles(float (&sum)[WIDTH_V / 8][4], F f) {
        const auto rows = [&](int r) -> const char* {
            return i0 + r < own.T ? own.token(mine, head, i0 + r) : (const char*)0;
        };
        fill_rows<LA_INPUT, LA_K, THREADS, KeyTile>(shared, 0, ROWS, rows);
        fill(0, false);
        bool filled = false;
        for (int step = 0; step < steps; step++) {
            copy_wait<0>();
            const bool next = __syncthreads_or(threadIdx.x == 0 && step + 1 < steps && is_solved(step + 1));
            fill(step + 1, next);
            float p[ROWS / 8][4];
            clear(p);
            multiply_rows<KeyTile, KeyTile>(p, shared, row0, stage(step), 0, lane);
            f(p, step);
            if (step) {
                if (!filled) wait_values(step);
                multiply_weights<ValueTile>(sum, p, stage(step) + AT_VALUES, 0, lane);
            } else
#pragma unroll
                for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) store_shared(pair_at(n, e), p[n][e]);
            filled = next;
        }
        copy_wait<0>();
        __syncthreads();
    }
    __device__ __forceinline__ u32 sum_at(int r, int c) const { return shared + AT_STAGES + (r * PITCH_X + c) * 4; }
    __device__ __forceinline__ float given(int r, int c) const {
        const char* const at = shared_memory() + AT_GIVEN + ValueTile::at(r, c);
        if constexpr (LA_DTYPE == 2) return *(const float*)at;
        else return LA_DTYPE == 0 ? low_bf16(*(const u16*)at) : low_f16(*(const u16*)at);
    }
    // the sums over other blocks, times a factor for each row, to the columns' threads; v or du on its way
    __device__ __forceinline__ void store_sums(const Rows& given, const float (&sum)[WIDTH_V / 8][4],
                                               const float (&factor)[2]) const {
        const auto rows = [&](int r) -> const char* {
            return i0 + r < own.T ? own.token(given, head, i0 + r) : (const char*)0;
        };
        fill_rows<LA_INPUT, LA_V, THREADS, ValueTile>(shared + AT_GIVEN, 0, ROWS, rows);
        copy_commit();
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int n = 0; n < WIDTH_V / 8; n++)
                store_shared2(sum_at(row0 + (lane >> 2) + 8 * h, n * 8 + (lane & 3) * 2), sum[n][2 * h] * factor[h],
                              sum[n][2 * h + 1] * factor[h]);
        copy_wait<0>();
        __syncthreads();
    }
    // x_i += sum p_is z_s over s < i, of the transposed system sum p_si z_s over s > i, a column of a thread and 16
    // rows at a time. z_s = f(s, x_s) takes the place of the sum, or y = x_s of the transposed system
    template <class F> __device__ __forceinline__ void solve(int c, F f) const {
        for (int n = 0; n < ROWS / 16; n++) {
            const int r = (BACK ? ROWS / 16 - 1 - n : n) * 16;
            float x[16];
#pragma unroll
            for (int i = 0; i < 16; i++) x[i] = load_shared(sum_at(r + i, c)) + (BACK ? given(r + i, c) : 0.f);
#pragma unroll 4
            for (int m = 0; m < n * 16; m++) {
                const int s = BACK ? ROWS - 1 - m : m;
                const float z = load_shared(sum_at(s, c));
                add_row(x, s, r, BACK ? -beta(s) * z : z, [](int) { return true; });
            }
#pragma unroll
            for (int m = 0; m < 16; m++) {
                const int s = BACK ? 15 - m : m;
                const float z = f(r + s, x[s]);
                store_shared(sum_at(r + s, c), BACK ? x[s] : z);
                add_row(x, r + s, r, z, [s](int i) { return BACK ? i < s : i > s; });
            }
        }
    }
    template <class F> __device__ __forceinline__ void add_row(float (&x)[16], int s, int r, float z, F takes) const {
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            if (!takes(i) && !takes(i + 3)) continue;
            const float4 p = load_decays(shared + AT_PAIRS + (s * PITCH + r + i) * 4);
            if (takes(i)) x[i] = fmaf(p.x, z, x[i]);
            if (takes(i + 1)) x[i + 1] = fmaf(p.y, z, x[i + 1]);
            if (takes(i + 2)) x[i + 2] = fmaf(p.z, z, x[i + 2]);
            if (takes(i + 3)) x[i + 3] = fmaf(p.w, z, x[i + 3]);
        }
    }
    __device__ __forceinline__ void store_row(const Rows& to, int width, int r, int c, float x) const {
        if (i0 + r < own.T && c < width) store_element<LA_INPUT>(own.token(to, head, i0 + r) + c * BYTES, x);
    }
};

// No block is solved
extern "C" __global__ void __launch_bounds__(128) system_begin(const __grid_constant__ SystemArguments s) {
    const int n = blockIdx.x * 128 + threadIdx.x;
    if (n < s.of.sequences * s.of.heads) s.counts[n] = 0;
}
