// The action of the inner segments of a sequence on the state: S -> S M + added, a transfer matrix and an offset, value
// row by key column.
//
// `added` is the chain from a state of zeros, M the chain of the rows of the identity without values; the first segment
// begins with the initial state instead, so that its `added` is the state itself and its M is not needed. The last one
// is not needed. Between other ranks both of every segment are. A block is one warpgroup on 64 rows of one of the two.
// M is diag(d) + R in memory (tile/transfer.cuh). Rows that have decayed below the least normal number are zeros: their
// block stops.
#include "attention/delta.cuh"
#include "tile/transfer.cuh"

constexpr int STAGES = 2, HALF = Tokens::PANEL;
constexpr int AT_K = 0, AT_V = AT_K + Tokens::SIZE, AT_A = AT_V + HALF, AT_SUMS = AT_A + Square::SIZE,
              STAGE = AT_SUMS + 1024;   // e, d
constexpr int AT_BARRIERS = STAGES * STAGE, SUMS = 2 * C * 4;
constexpr int LOOK = 8;   // chunks between looks at what is left of M
constexpr float LEAST = 1.17549435e-38f;
static_assert(LA_SHARED == AT_BARRIERS + 64 && LA_WARPS == 8, "LA_SHARED is the size that the launch requests");

extern "C" __global__ void __launch_bounds__(128, 3) adds(const __grid_constant__ DeltaArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory), full = shared + AT_BARRIERS, empty = full + 8 * STAGES;
    const int half = blockIdx.x & 1, segments = a.segments - 1, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0),
              lane = threadIdx.x & 31;
    const bool transfer = blockIdx.x & 2;
    const DeltaTraversal traversal(a, blockIdx.x >> 2, segments, a.chunks);
    if (traversal.segment >= traversal.last + a.every || (transfer && traversal.segment == 0 && !a.every)) return;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4 * ARRIVALS);
        }
        barriers_made();
    }
    __syncthreads();
    auto load = [&](int step) {
        const int s = step % STAGES, chunk = traversal.first + step;
        const u32 at = shared + s * STAGE, bar = full + 8 * s;
        const char* block = a.checkpoints + (traversal.block + chunk) * CHECKPOINT;
        if (step >= STAGES) barrier_wait(empty + 8 * s, (step / STAGES - 1) & 1);
        barrier_expect(bar, Tokens::SIZE + (transfer ? 0 : HALF) + Square::SIZE + SUMS);
        tile_in(at + AT_K, a.k, bar, (u32)traversal.head / (u32)a.group_k, traversal.token(chunk), traversal.row);
        if (!transfer)
            box_in(at + AT_V, a.v, bar, 64 * half, (u32)traversal.head / (u32)a.group_v, traversal.token(chunk),
                   traversal.row);
        run_in(at + AT_A, block, Square::SIZE, bar);
        run_in(at + AT_SUMS, block + AT_E, SUMS, bar);
    };
    if (threadIdx.x == 0) load(0);
    const int row = 64 * half + 16 * warp;
    StateRows<1, WIDE> state;
    float (&S)[16][4] = state.x[0];
    state.clear();
    if (transfer)
        state.each([&](int r, int c, float& y) { y = row + r + (lane >> 2) == c + (lane & 3) * 2 ? 1.f : 0.f; });
    else if (traversal.segment == 0 && a.start.data)
        state.template load<LA_V, LA_K>(a.start, traversal.slot / a.start_group, row, lane);
    int step = 0;
    while (step < traversal.steps) {
        const int s = step % STAGES;
        const u32 at = shared + s * STAGE;
        const float *e = (const float*)(memory + s * STAGE + AT_SUMS) + (lane & 3) * 2, *d = e + C;
        const u64 keys = panels_descriptor<Tokens>(at + AT_K);
        float x[8][4];
        u32 f[8][4], w[4][4];
        state_operands(f, state, 0);
        barrier_wait(full + 8 * s, step / STAGES & 1);
        begin_ABt(x, f, keys);                                                // S K^T
        if (threadIdx.x == 0 && step + 1 < traversal.steps) load(step + 1);   // while they run
        __syncwarp();
        end_products<0>(x);
        error_operands(w, x, at + AT_V, 16 * warp, e, lane, !transfer);
        begin_ABt(x, w, panel_descriptor(at + AT_A));   // U = (V^T - e S K^T) A^T
        scale_tiles(S, last_decay(e - (lane & 3) * 2));
        end_products<0>(x);
        token_operands(w, x, d);
        begin_add_AB(S, w, keys);   // S = e_last S + (U d) K
        end_products<0>(S);
        warp_arrive(empty + 8 * s, lane);
        if (++step % LOOK == 0 && transfer) {
            bool is_left = false;
            state.each([&](int, int, float& y) { is_left |= !(fabsf(y) < LEAST); });   // NaN is
            if (!__syncthreads_or(is_left)) {
                state.clear();
                break;
            }
        }
    }
    if (threadIdx.x == 0 && step < traversal.steps)
        barrier_wait(full + 8 * (step % STAGES), step / STAGES & 1);   // a copy on its way arrives
    const i64 slot = traversal.slot * segments + traversal.segment;
    if (transfer) Transfer::store(a.transfers + slot * Transfer::BYTES, S, row, lane);
    else state.template store<WIDE, WIDE>({a.added, STATE, WIDE, 1}, slot, row, lane);
}
