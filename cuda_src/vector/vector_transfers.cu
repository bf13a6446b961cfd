// The action of the inner segments of a sequence on the state under the delta rule with a vector decay: S -> S M +
// added, value row by key column, as delta_adds.cu, whose matrices delta_segments.cu multiplies. With W = (1 + N) beta
// Kc of vector_inverse.cu
//
//     U = V^T beta + (V^T beta) N^T - S W^T        S <- S D + U Kd
//
// from a state of zeros (in the first segment from the initial state, so that its `added` is the state that the next
// begins with), and without values from the rows of the identity, which the first segment does not need. No row is
// scaled here. A block has one segment of a sequence and head. Four warpgroups have 64 rows of S each, two of the
// values' terms and two of the identity, and read the same W and Kd.
#include "vector/products.cuh"
#include "tile/transfer.cuh"
#include "tile/wgmma_part.cuh"

constexpr int VALUES_REGISTERS = 144, IDENTITY_REGISTERS = 112;   // of a thread: 2 x 128 of each
constexpr u32 LOADING_THREAD = 256;   // of the warpgroups with the identity, which wait for the others
typedef Panels<WIDE, 64> GroupRows;   // S of a warpgroup as an operand

// A ring of stages at AT, of a part of each chunk
template <int STAGES_, int BYTES, int AT, int AT_BARRIERS> struct Stages {
    static constexpr int STAGES = STAGES_, SIZE = (BYTES + 1023) / 1024 * 1024, END = AT + STAGES * SIZE;
    u32 shared;
    __device__ __forceinline__ u32 at(int step) const { return shared + AT + step % STAGES * SIZE; }
    __device__ __forceinline__ u32 full(int step) const { return shared + AT_BARRIERS + 8 * (step % STAGES); }
    __device__ __forceinline__ u32 empty(int step) const { return full(step) + 8 * STAGES; }
    __device__ __forceinline__ void wait_full(int step) const { barrier_wait(full(step), step / STAGES & 1); }
    __device__ __forceinline__ void wait_empty(int step) const { barrier_wait(empty(step), (step / STAGES & 1) ^ 1); }
    __device__ __forceinline__ void init(int warps) const {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full(s), 1);
            barrier_init(empty(s), warps * ARRIVALS);
        }
    }
};
constexpr int AT_WRITERS = Tokens::SIZE, AT_DECAY = 2 * Tokens::SIZE,
              FACTORS = AT_DECAY + WIDE * 4;   // -W, Kd, D: as in memory
constexpr int AT_INVERSE = Tokens::SIZE, AT_STRENGTHS = AT_INVERSE + Square::SIZE,
              VALUES = AT_INVERSE + LA_INVERSE;   // V, N and strengths
typedef Stages<LA_STAGES, FACTORS, 1024, 0> FactorStages;
typedef Stages<2, VALUES, FactorStages::END, 16 * LA_STAGES> ValueStages;
constexpr int AT_STATES = ValueStages::END;
static_assert(LA_SHARED == AT_STATES + 2 * GroupRows::SIZE && LA_WARPS == 8 && LA_TILES == 1,
              "LA_SHARED is the size that the launch requests");

// By one thread, the producer of the stages: factors LA_STAGES - 1 chunks ahead, values two
struct Loader {
    const VectorArguments& a;
    const ChunkTraversal& segment;
    FactorStages factors;
    ValueStages values;
    __device__ __forceinline__ void load_factors(int step) const {
        if (step >= segment.steps) return;
        factors.wait_empty(step);
        barrier_expect(factors.full(step), FACTORS);
        run_in(factors.at(step), a.factors + (segment.stored + segment.first + step) * FACTORS, FACTORS,
               factors.full(step));
    }
    __device__ __forceinline__ void load_values(int step) const {
        if (step >= segment.steps) return;
        const int chunk = segment.first + step;
        const u32 at = values.at(step), full = values.full(step);
        values.wait_empty(step);
        barrier_expect(full, VALUES);
        tile_in<true>(at, a.v, full, (u32)segment.head / (u32)a.group_v, segment.token(chunk), segment.row);
        run_in(at + AT_INVERSE, a.inverses + (segment.stored + chunk) * LA_INVERSE, LA_INVERSE, full);
    }
    __device__ __forceinline__ void begin() const {
#pragma unroll 1
        for (int step = 0; step < LA_STAGES - 1; step++) {
            if (step < ValueStages::STAGES) load_values(step);
            load_factors(step);
        }
    }
    __device__ __forceinline__ void load_ahead(int step) const {   // while `step` is computed
        load_factors(step + LA_STAGES - 1);
        load_values(step + ValueStages::STAGES);
    }
};

// S += U Kd over the sixteens of tokens from FIRST on, begun; new_values: U^T
template <int FIRST, int N> LA_DEVICE void begin_writes(float (&S)[16][4], const u32 (&new_values)[N][4], u32 factors) {
    accumulator_fence(S);
    products_begin();
#pragma unroll
    for (int d = 0; d < N; d++)
        product_AB_wide(S, new_values[d], panels_descriptor<Tokens>(factors + AT_WRITERS) + Tokens::across(FIRST + d));
    products_commit();
}

// The terms of values. Half of S is an operand at a time, in the same registers
LA_DEVICE void traverse_values(StateRows<1, WIDE>& state, FactorStages factors, ValueStages values, int steps, int warp,
                               int lane) {
    float (&S)[16][4] = state.x[0];
    for (int step = 0; step < steps; step++) {
        const u32 at = factors.at(step), own = values.at(step);
        float x[8][4];
        u32 operands[4][4];
        values.wait_full(step);
        load_values(x, own, 16 * warp, lane);
        begin_solution(x, operands, own + AT_INVERSE, own + AT_STRENGTHS, lane, [] {});   // V^T beta + (V^T beta) N^T
        factors.wait_full(step);
        end_product<0>(x);
        warp_arrive(values.empty(step), lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            state_operands(operands, state, 4 * half);
            begin_product<Tokens>(x, operands, at + half * Tokens::PANEL);   // U
            if (half == 0) end_product<0>(x);
        }
        scale_state(S, at + AT_DECAY, lane);
        end_product<0>(x);
        token_operands(operands, x);
        begin_writes<0>(S, operands, at);
        end_product<0>(S);
        warp_arrive(factors.empty(step), lane);
    }
}
// The image of the rows of the identity. For want of registers S as an operand lies in shared memory, and U is made
// for 32 tokens at a time
LA_DEVICE void traverse_identity(StateRows<1, WIDE>& state, const Loader& loader, int steps, int warp, int lane) {
    float (&S)[16][4] = state.x[0];
    const FactorStages factors = loader.factors;
    const int group = warp >> 2;
    const u32 operand = factors.shared + AT_STATES + group * GroupRows::SIZE;
    for (int step = 0; step < steps; step++) {
        const u32 at = factors.at(step);
        {
            u32 x[8][4];
            state_operands(x, state, 0);
            store_state<GroupRows>(operand, x, 16 * (warp & 3), lane);
        }
        publish_shared();
        group_barrier(group);
        factors.wait_full(step);
        scale_state(S, at + AT_DECAY, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x[4][4];
            u32 new_values[2][4];
            const u64 rows = panel_descriptor(operand),
                      erasers = panel_descriptor(at + half * 32 * 128);   // of S; of -W from token 32 half on
            accumulator_fence(x);
            products_begin();
#pragma unroll
            for (int d = 0; d < 8; d++)
                product_part<0, 4, 0, 0>(x, rows + GroupRows::along(d), erasers + Tokens::along(d), d > 0);   // U
            products_commit();
            if (half == 1) {
                if (threadIdx.x == LOADING_THREAD) loader.load_ahead(step);
                __syncwarp();
            }
            end_product<0>(x);
            token_operands(new_values, x);
            if (half) begin_writes<2>(S, new_values, at);
            else begin_writes<0>(S, new_values, at);
            end_product<0>(S);
        }
        warp_arrive(factors.empty(step), lane);
    }
}

// A warp's number among the eight of its role. Computed again where it is used: not held in registers over the chunks
LA_DEVICE int own_warp() { return __shfl_sync(0xffffffffu, opaque(threadIdx.x) >> 5 & 7, 0); }

LA_DEVICE void compute_added(const VectorArguments& a, const ChunkTraversal& segment, const Loader& loader, int lane) {
    const int warp = own_warp();
    StateRows<1, WIDE> state;
    if (segment.segment == 0 && a.start.data)
        state.template load<LA_V, LA_K>(a.start, segment.slot / a.start_group, 16 * warp, lane);
    else state.clear();
    traverse_values(state, loader.factors, loader.values, segment.steps, warp, lane);
    float* to = a.added + blockIdx.x * (i64)STATE + (16 * own_warp() + (lane >> 2)) * WIDE + (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < 32; i++)
        *(float2*)(to + (i & 1) * 8 * WIDE + (i >> 1) * 8) = {state.x[0][i >> 1][2 * (i & 1)],
                                                              state.x[0][i >> 1][2 * (i & 1) + 1]};
}
LA_DEVICE void compute_transfer(const VectorArguments& a, const ChunkTraversal& segment, const Loader& loader,
                                int lane) {
    const int warp = own_warp(), row = 16 * warp + (lane >> 2), column = (lane & 3) * 2;
    StateRows<1, WIDE> state;
    state.each([&](int r, int c, float& y) { y = row + r == column + c ? 1.f : 0.f; });
    traverse_identity(state, loader, segment.steps, warp, lane);
    Transfer::store(a.transfers + blockIdx.x * (i64)Transfer::BYTES, state.x[0], 16 * own_warp(), lane);
}

extern "C" __global__ void __launch_bounds__(512, 1) transfers(const __grid_constant__ VectorArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const ChunkTraversal segment(a, a.segments - 1, a.chunks);
    if (segment.segment >= segment.last + a.every) return;   // of a packed sequence with fewer segments
    const bool first = segment.segment == 0 && !a.every, loads = threadIdx.x == LOADING_THREAD;
    const Loader loader = {a, segment, {shared}, {shared}};
    if (loads) {
        loader.factors.init(first ? 8 : 16);
        loader.values.init(8);
        barriers_made();
        loader.begin();
    }
    __syncthreads();
    if (threadIdx.x < 256) {
        claim_registers<VALUES_REGISTERS>();
        compute_added(a, segment, loader, threadIdx.x & 31);
        return;
    }
    release_registers<IDENTITY_REGISTERS>();
    if (!first) compute_transfer(a, segment, loader, threadIdx.x & 31);
    else if (loads)
        for (int step = 0; step < segment.steps; step++) loader.load_ahead(step);
}
