// The chunks of a segment one after the other, from the factors of free_factors.cu: the state is read, decayed and
// written.
//
//     w = Ac S + N V            out = q_c S + P_qk V + P_qb w            S <- D S + k_d^T V + b_d^T w
//
// LA_BACKWARD 1: the adjoint, the same with readers and writers, N and P_qb^T exchanged, from the last chunk to the
// first; G is the gradient of S, `v` is dO and `out` dv.
//
//     y = b_d G + P_qb^T dO     dv = k_d G + P_qk^T dO + N^T y           G <- D G + q_c^T dO + Ac^T y
//
// A warpgroup has 64 value rows of S^T in float32 registers. A thread of one more copies factors and values in.
// LA_KEEP: residuals of the other gradients go to memory in bfloat16, transposed: the state before (the gradient after)
// each chunk, and w, or the gradient of each token's read,
//
//     dw = (1 - A_ab)^-T y
#include "free/factors.cuh"
#include "free/transposed_solve.cuh"
#include "vector/products.cuh"

#ifndef LA_BACKWARD
#define LA_BACKWARD 0
#endif
constexpr int GROUPS = VALUES / 64, THREADS = 128 * GROUPS + 128, STAGES = 2;
// outputs leave through the place of the step's last factors, so that values have been left before; else through that
// of the values
constexpr bool EARLY = LA_KEEP && VALUES <= KEYS;
constexpr int SLOTS = EARLY ? (LA_BACKWARD && KEYS == 64 ? 1 : 2) : 3;
// of a stage: readers of the state for outputs, and for the correction; writers of values, and of the correction; pairs
// of the correction with values, of outputs with values, and with the correction
constexpr int AT_READS = LA_BACKWARD ? 2 * TILE : 0, AT_ERASES = LA_BACKWARD ? 3 * TILE : TILE;
constexpr int AT_WRITES = LA_BACKWARD ? 0 : 2 * TILE, AT_CORRECTS = LA_BACKWARD ? TILE : 3 * TILE;
constexpr int AT_PAIRS_OF_ERASES = AT_PAIRS + (LA_BACKWARD ? P_QB : SOLVED) * Square::SIZE,
              AT_PAIRS_OF_READS = AT_PAIRS + P_QK * Square::SIZE;
constexpr int AT_PAIRS_OF_CORRECTIONS = AT_PAIRS + (LA_BACKWARD ? SOLVED : P_QB) * Square::SIZE;
constexpr int STAGE = round_up(FACTORS, 1024), AT_VALUES = STAGES * STAGE,
              AT_EXTRAS = AT_VALUES + SLOTS * ValueTile::SIZE;
constexpr int AT_BARRIERS = AT_EXTRAS + EXTRAS;
static_assert(LA_SHARED == AT_BARRIERS + 128, "LA_SHARED is the size that the launch requests");
static_assert(StateTile::SIZE <= 2 * TILE && TransposedTile::SIZE <= 2 * TILE,
              "states and corrections are staged where the factors of the step were");
static_assert(!EARLY || TransposedTile::SIZE + ValueTile::SIZE <= 2 * TILE, "and outputs behind them");

constexpr int REGISTERS = GROUPS * KEY_PANELS == 4 ? 240 : 208;   // of a thread that holds a state
static_assert(GROUPS * REGISTERS + 24 <= (GROUPS + 1) * (GROUPS == 2      ? 168
                                                         : LA_BLOCKS == 2 ? 128
                                                                          : 255),
              "a block that asks for more waits for ever");

struct Barriers {   // of a stage of factors, and of a slot of values: there; read
    u32 base;
    __device__ __forceinline__ u32 full(int step) const { return base + step % STAGES * 16; }
    __device__ __forceinline__ u32 empty(int step) const { return full(step) + 8; }
    __device__ __forceinline__ u32 values(int step) const { return base + STAGES * 16 + step % SLOTS * 16; }
    __device__ __forceinline__ u32 left(int step) const { return values(step) + 8; }
    __device__ __forceinline__ u32 extras() const { return base + (STAGES + SLOTS) * 16; }
    __device__ __forceinline__ u32 extras_left() const { return extras() + 8; }
    __device__ __forceinline__ void init() const {
        barrier_init(extras(), 1);
        barrier_init(extras_left(), 4 * GROUPS * ARRIVALS);
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full(s), 1);
            barrier_init(empty(s), 4 * GROUPS * ARRIVALS);
        }
        for (int s = 0; s < SLOTS; s++) {
            barrier_init(values(s), 1);
            barrier_init(left(s), GROUPS);
        }
    }
};
LA_DEVICE int chunk_of(const ChunkTraversal& traversal, int step) {
    return traversal.first + (LA_BACKWARD ? traversal.steps - 1 - step : step);
}

LA_DEVICE void produce(const FreeArguments& a, const ChunkTraversal& traversal, u32 shared, Barriers bar) {
    const char* const from = a.factors + traversal.stored * FACTORS;
    const int head = (u32)traversal.head / (u32)a.group_v;
    for (int step = 0; step < traversal.steps; step++) {
        const int chunk = chunk_of(traversal, step);
        barrier_wait(bar.empty(step), (step / STAGES & 1) ^ 1);
        barrier_expect(bar.full(step), FACTORS);
        run_in(shared + step % STAGES * STAGE, from + (i64)chunk * FACTORS, FACTORS, bar.full(step));
        barrier_wait(bar.left(step), (step / SLOTS & 1) ^ 1);
        barrier_expect(bar.values(step), ValueTile::SIZE);
        panels_in<GROUPS>(shared + AT_VALUES + step % SLOTS * ValueTile::SIZE, a.v, bar.values(step), head,
                          traversal.token(chunk), traversal.row);
        if (LA_BACKWARD) {
            barrier_wait(bar.extras_left(), (step & 1) ^ 1);
            barrier_expect(bar.extras(), EXTRAS);
            run_in(shared + AT_EXTRAS, a.extras + (traversal.stored + chunk) * EXTRAS, EXTRAS, bar.extras());
        }
    }
}

// c = A B^T over the state's columns, begun
LA_DEVICE void begin_read(float (&c)[8][4], const u32 (&a)[KEYS / 16][4], u32 b) {
    accumulator_fence(c);
    products_begin();
#pragma unroll
    for (int d = 0; d < KEYS / 16; d++) product_ABt(c, a[d], panel_descriptor(b) + KeyTile::along(d), d > 0);
}
// S += values^T B of a chunk, values in shared memory; S += A B, A in registers
template <int N> LA_DEVICE void write_values(float (&S)[N][4], u32 values, u32 b) {
#pragma unroll
    for (int d = 0; d < 4; d++) {
        const u64 x = panel_descriptor(values) + ValueTile::across(d);
        if constexpr (N == 16) product_AtB_wide(S, x, panels_descriptor<KeyTile>(b) + KeyTile::across(d));
        else product_AtB(S, x, panel_descriptor(b) + KeyTile::across(d), true);
    }
}
template <int N> LA_DEVICE void write_corrections(float (&S)[N][4], const u32 (&a)[4][4], u32 b) {
#pragma unroll
    for (int d = 0; d < 4; d++) {
        if constexpr (N == 16) product_AB_wide(S, a[d], panels_descriptor<KeyTile>(b) + KeyTile::across(d));
        else product_AB(S, a[d], panel_descriptor(b) + KeyTile::across(d), true);
    }
}
// outputs or corrections of a chunk += the terms of its values (V N^T), of its corrections w
LA_DEVICE void add_values(float (&x)[8][4], u32 values, u32 pairs) {
#pragma unroll
    for (int d = 0; d < 4; d++) {
        const u64 v = panel_descriptor(values) + ValueTile::across(d), p = panel_descriptor(pairs);
        if (LA_BACKWARD) product_AtB(x, v, p + Square::across(d), true);
        else product_AtBt(x, v, p + Square::along(d), true);
    }
}
LA_DEVICE void add_corrections(float (&x)[8][4], const u32 (&w)[4][4], u32 pairs) {
#pragma unroll
    for (int d = 0; d < 4; d++) {
        if (LA_BACKWARD) product_AB(x, w[d], panel_descriptor(pairs) + Square::across(d), true);
        else product_ABt(x, w[d], panel_descriptor(pairs) + Square::along(d), true);
    }
}
// out += values of a warp's columns times the diagonal of P_qk
LA_DEVICE void add_own_values(float (&out)[8][4], u32 values, u32 diagonal, int column, int lane) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
        u32 v[4];
        load_operand<ValueTile>(v, values, 16 * t, column, lane);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 d = load_shared2(diagonal + (16 * t + 8 * h + (lane & 3) * 2) * 4);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                out[2 * t + h][2 * m] = fmaf(d.x, low_bf16(v[2 * h + m]), out[2 * t + h][2 * m]);
                out[2 * t + h][2 * m + 1] = fmaf(d.y, high_bf16(v[2 * h + m]), out[2 * t + h][2 * m + 1]);
            }
        }
    }
}
LA_DEVICE void decay_state(float (&S)[KEYS / 8][4], u32 carry, int lane) {
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) {
        const float2 d = load_shared2(carry + i * 32 + (lane & 3) * 8);
        S[i][0] *= d.x;
        S[i][1] *= d.y;
        S[i][2] *= d.x;
        S[i][3] *= d.y;
    }
}
LA_DEVICE void keep_state(const u32 (&state)[KEYS / 16][4], char* to, int row, int lane) {
#pragma unroll
    for (int d = 0; d < KEYS / 16; d++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(u32*)(to + StateTile::at(row + (lane >> 2) + 8 * (i & 1), 16 * d + 8 * (i >> 1) + (lane & 3) * 2)) =
                state[d][i];
}
// rows of the next sequence in a group's panel become zeros
LA_DEVICE void clear_values(u32 panel, int count, int group, int thread) {
    for (int i = count * 8 + thread; i < C * 8; i += 128)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(panel + i * 16), "r"(0) : "memory");
    publish_shared();
    group_barrier(group);
}

struct Consumer {
    const FreeArguments& a;
    const ChunkTraversal& traversal;
    u32 shared;
    Barriers bar;
    int warp, lane, group;
    StateRows<1, KEYS> state;
    u32 operands[KEYS / 16][4];   // of it, in bfloat16

    __device__ __forceinline__ void begin() {
        if (a.start.data) state.template load<LA_V, LA_K>(a.start, traversal.slot / a.start_group, 16 * warp, lane);
        else state.clear();
        state_operands(operands, state, 0);
        if (LA_KEEP && traversal.steps > 0)
            keep_state(operands, a.states + (traversal.stored + chunk_of(traversal, 0)) * StateTile::SIZE, 16 * warp,
                       lane);
    }
    __device__ __forceinline__ void end() {
        if (a.end.data && traversal.head % a.end_group == 0)
            state.template store<LA_V, LA_K>(a.end, traversal.slot / a.end_group, 16 * warp, lane);
    }
    // the state after the step and its corrections w (x: y), through the places of factors that all warps have read
    __device__ __forceinline__ void keep(u32 (&w)[4][4], const float (&x)[8][4], u32 at, int step) const {
        if constexpr (LA_BACKWARD) {
            barrier_wait(bar.extras(), step & 1);
            solve_transposed(w, x, shared + AT_EXTRAS, shared + AT_EXTRAS + Square::SIZE, lane);
            warp_arrive(bar.extras_left(), lane);
        }
        store_state<StateTile>(at, operands, 16 * warp, lane);
        store_state<TransposedTile>(at + 2 * TILE, w, 16 * warp, lane);
        publish_shared();
        groups_barrier<128 * GROUPS>(4);
        if (threadIdx.x == 0) {
            const i64 stored = traversal.stored + chunk_of(traversal, step),
                      next = traversal.stored + chunk_of(traversal, step + 1);
            run_out(a.corrections + stored * TransposedTile::SIZE, at + 2 * TILE, TransposedTile::SIZE);
            if (step + 1 < traversal.steps) run_out(a.states + next * StateTile::SIZE, at, StateTile::SIZE);
            out_commit();
        }
        __syncwarp();
    }
    // factors of the step before have left shared memory
    __device__ __forceinline__ void leave_factors(int step) const {
        if ((threadIdx.x & 127) == 0 && (EARLY || threadIdx.x == 0)) out_read();
        warp_arrive(bar.empty(step - 1), lane);
    }
    // outputs through the group's panel, which all of its warps have read
    __device__ __forceinline__ void store_outputs(const float (&out)[8][4], u32 values, int chunk) const {
        const u32 panel = values + group * PANEL;
        const float (&o)[1][8][4] = (const float (&)[1][8][4])out;
        stage_rows<Bfloat16, ValueTile, 1, C>(o, values, 16 * warp, lane);
        publish_shared();
        group_barrier(group);
        const int count = traversal.count(chunk), thread = threadIdx.x & 127;
        if (LA_RAGGED && count < C) {
            store_group_rows<ValueTile, C, LA_V>(own_rows(a.to, traversal.sequence, traversal.head), a.to.token, values,
                                                 chunk * C, traversal.sequence.T, group * 64, 0, thread);
            group_barrier(group);
        } else if (thread == 0) {
            box_out(a.out, panel, 64 * group, traversal.head, traversal.token(chunk), traversal.row);
            out_commit();
        }
        __syncwarp();
    }
    // the values' slot of the step before is free again, once all but the last of the thread's copies out have been read
    __device__ __forceinline__ void leave_values(int step) const {
        if ((threadIdx.x & 127) == 0) {
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            barrier_arrive(bar.left(step - 1));
        }
        __syncwarp();
    }
    __device__ __forceinline__ void step_on(int step) {
        float (&S)[KEYS / 8][4] = state.x[0];
        const int chunk = chunk_of(traversal, step);
        const u32 at = shared + step % STAGES * STAGE, values = shared + AT_VALUES + step % SLOTS * ValueTile::SIZE,
                  panel = values + group * PANEL;
        u32 corrections[4][4], rest[4][4];
        float x[8][4], out[8][4];
        barrier_wait(bar.full(step), step / STAGES & 1);
        if (LA_KEEP && step > 0) leave_factors(step);
        decay_state(S, at + AT_CARRY, lane);   // before products begin
        barrier_wait(bar.values(step), step / SLOTS & 1);
        if (LA_RAGGED && traversal.count(chunk) < C)
            clear_values(panel, traversal.count(chunk), group, threadIdx.x & 127);
        begin_read(x, operands, at + AT_ERASES);
        add_values(x, panel, at + AT_PAIRS_OF_ERASES);
        products_commit();
        begin_read(out, operands, at + AT_READS);
        add_values(out, panel, at + AT_PAIRS_OF_READS);
        products_commit();
        accumulator_fence(S);
        products_begin();
        write_values(S, panel, at + AT_WRITES);
        products_commit();
        end_product<2>(x);
        token_operands(corrections, x);
        write_corrections(S, corrections, at + AT_CORRECTS);
        add_corrections(out, corrections, at + AT_PAIRS_OF_CORRECTIONS);
        rest_operands(rest, corrections, x);
        write_corrections(S, rest, at + AT_CORRECTS);
        add_corrections(out, rest, at + AT_PAIRS_OF_CORRECTIONS);
        products_commit();
        end_product<0>(S);
        accumulator_fence(out);
        add_own_values(out, values, at + AT_DIAGONAL, 16 * warp, lane);
        state_operands(operands, state, 0);
        if (!LA_KEEP) warp_arrive(bar.empty(step), lane);
        if (LA_KEEP) groups_barrier<128 * GROUPS>(4);   // all warps have read factors and values
        else group_barrier(group);                      // values
        if (EARLY && (threadIdx.x & 127) == 0) barrier_arrive(bar.left(step));
        __syncwarp();
        store_outputs(out, EARLY ? at + 3 * TILE : values, chunk);
        if (LA_KEEP) keep(corrections, x, at, step);
        if constexpr (!LA_BACKWARD)
            store_position<LA_V, LA_K>(state, a, position_after(a, traversal.sequence, chunk), traversal, 16 * warp,
                                       lane);
    }
    __device__ __forceinline__ void run() {
        begin();
        for (int step = 0; step < traversal.steps; step++) {
            step_on(step);
            if (!EARLY && step > 0) leave_values(step);
        }
        if ((threadIdx.x & 127) == 0) out_read();
        end();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, LA_BLOCKS) chain(const __grid_constant__ FreeArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const ChunkTraversal traversal(a, a.segments, a.chunks);
    const Barriers bar = {shared + AT_BARRIERS};
    if (threadIdx.x == 0) {
        bar.init();
        barriers_made();
    }
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (warp >= 4 * GROUPS) {
        release_registers<24>();
        if (threadIdx.x == 128 * GROUPS) produce(a, traversal, shared, bar);
    } else {
        claim_registers<REGISTERS>();
        Consumer consumer = {a, traversal, shared, bar, warp, lane, warp >> 2};
        consumer.run();
    }
}
