// The chain of vector decay backward: G = dL/dS (transposed, value row by key column) from a segment's end to its start.
//
//     dv^T = G^T Kd^T + scale dO^T P,      G^T <- e^B G^T + dO^T Qg,      Qg = scale q e^{b},   Kd = k e^{B - b}
//
// P is without scale, as the forward stores it.//
// b: decays from the chunk's start (with BEFORE a query's excludes its own token), all exponents <= 0: no decay divides here. G after each chunk goes
// to memory in bfloat16, as the products of vector_grads.cu read it. Warpgroups 0 and 1: 64 value rows of G^T each, in registers, where
// the decay is a factor of columns. Warpgroups 2 and 3 scale q and k of the chunks ahead, in a ring that the copy engine fills.
//
// LA_ADDS 1: what a segment adds to G before it, from its first chunk on and only as long as some channel is not forgotten, with the decays of
// the whole segment.
#include "vector/slices.cuh"
#include "tile/wgmma_part.cuh"
#include "tile/wgmma_wide.cuh"
#include "attention/state.cuh"
#include "attention/store.cuh"
#include "attention/group.cuh"
#include "arguments/matrix_state/VectorReverseArguments.cuh"   // after TensorMap

constexpr bool ADDS = LA_ADDS;
constexpr int STAGES = 3, GROUPS_OF_VALUES = round_up(LA_V, 64) / 64, CONSUMERS = 128 * GROUPS_OF_VALUES, COPIERS = 256, PER = 4;
// a stage: copies of q and k, dO, P, decay of the chunk a channel; then tables of slices for two chunks, G on its way out
constexpr int AT_Q = 0, AT_K = AT_Q + Tokens::SIZE, AT_DOUT = AT_K + Tokens::SIZE, AT_GRAM = AT_DOUT + Tokens::SIZE, STAGE = AT_GRAM + Square::SIZE;
constexpr int AT_TABLES = STAGES * STAGE, AT_AFTER = AT_TABLES + 2 * SliceTable<PER>::BYTES, AT_CARRIES = AT_AFTER + Whole::SIZE;
constexpr int AT_RING = AT_CARRIES + STAGES * WIDE * 4, AT_LOADED = AT_RING + 16 * STAGES;
static_assert(LA_SHARED == AT_LOADED + 8 * STAGES && LA_WARPS == 8, "LA_SHARED is what the launch asks for");
constexpr int CHAIN_REGISTERS = 136, COPY_REGISTERS = 120;
static_assert(CHAIN_REGISTERS + COPY_REGISTERS <= 256, "registers of 512 threads; a block that asks for more waits for ever");

struct Walk {
    VectorPlace of;
    int segment, first, steps, last;   // first chunk, number of chunks; the sequence's last segment
    __device__ __forceinline__ Walk(const VectorReverseArguments& a, u32 number)
        : of(a.offsets, a.T, a.heads, a.slots, number / a.segments / a.heads, number / a.segments % a.heads), segment(number % a.segments) {
        const int total = of.chunks();
        last = max(total - 1, 0) / a.chunks;
        first = segment * a.chunks;
        steps = min(total - first, a.chunks);
    }
    __device__ __forceinline__ int chunk(int step) const { return ADDS ? first + step : first + steps - 1 - step; }
};

// Of a stage: copied in by the copy engine; scaled (full) and read (empty) is the ring's
LA_DEVICE u32 loaded(u32 shared, int step) { return shared + AT_LOADED + step % STAGES * 8; }

// log decays of the next chunk in registers; scaled copies of this one in place of q and k
struct Producer {
    const VectorReverseArguments& a;
    const Walk& walk;
    u32 shared;
    Ring<STAGES> ring;
    int warp, lane;
    const char* g;
    Slice<LA_GATE, PER> gates;

    __device__ __forceinline__ void load(int step) {
        gates.load(g, a.g.token, lane * PER, walk.chunk(step) * C + warp * SLICE, walk.of.sequence.T);
    }
    __device__ __forceinline__ void load_tiles(int step) const {
        const int chunk = walk.chunk(step), head = walk.of.head, token = walk.of.token(chunk), row = walk.of.row;
        const u32 at = shared + step % STAGES * STAGE, full = loaded(shared, step);
        barrier_expect(full, ADDS ? KEY_BYTES + TILE_BYTES : 2 * KEY_BYTES + TILE_BYTES + Square::SIZE);
        keys_in(at + AT_Q, a.q, full, (u32)head / (u32)a.group_q, token, row);
        if (!ADDS) keys_in(at + AT_K, a.k, full, (u32)head / (u32)a.group_k, token, row);
        tile_in(at + AT_DOUT, a.dout, full, head, token, row);
        if (!ADDS) run_in(at + AT_GRAM, a.grams + (walk.of.block + chunk) * LA_GRAM, Square::SIZE, full);
    }
    // this lane's channels of a tile; rows of other sequences are zeros
    __device__ __forceinline__ void rows_of_tile(Slice<LA_DTYPE, PER>& x, u32 tile, int chunk) const {
        const int own = lane * PER < LA_K ? walk.of.own(chunk) - warp * SLICE : 0;   // a panel past LA_K is not copied in
#pragma unroll
        for (int r = 0; r < SLICE; r++) {
            const float2 y = load_shared2(tile + slice_row<PER>(warp, r, lane));
            x.x[r][0] = r < own ? __float_as_uint(y.x) : 0;
            x.x[r][1] = r < own ? __float_as_uint(y.y) : 0;
        }
    }
    // e^g of a row, made where it is used: all rows at once would not fit in the registers
    __device__ __forceinline__ void decays(float (&d)[PER], int r) const {
        Slice<LA_GATE, PER> row;
#pragma unroll
        for (int i = 0; i < row.WORDS; i++) row.x[0][i] = opaque(gates.x[r][i]);
#pragma unroll
        for (int c = 0; c < PER; c++) d[c] = exp2_approx(row.at(0, c) * LOG2_E);
    }
    // decays of the chunk's slices to the table: before the slice (pre), behind it (suf), of all
    __device__ __forceinline__ void share_decays(float (&pre)[PER], float (&suf)[PER], float (&all)[PER], int step) const {
        const SliceTable<PER> table = {shared + AT_TABLES + (step & 1) * SliceTable<PER>::BYTES};
        float own[PER];
#pragma unroll
        for (int c = 0; c < PER; c++) {
            own[c] = gates.at(0, c);
#pragma unroll
            for (int r = 1; r < SLICE; r++) own[c] += gates.at(r, c);
            own[c] = exp2_approx(own[c] * LOG2_E);
            pre[c] = suf[c] = all[c] = 1.f;
        }
        table.store(warp, lane, own);
        groups_barrier<COPIERS>(3);
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
            float x[PER];
            table.load(x, s, lane);
#pragma unroll
            for (int c = 0; c < PER; c++) {
                pre[c] *= s < warp ? x[c] : 1.f;
                suf[c] *= s > warp ? x[c] : 1.f;
                all[c] *= x[c];
            }
        }
    }
    // copies of a chunk; `running`: with ADDS the decay of all chunks before it
    __device__ __forceinline__ void copy(int step, float (&running)[PER]) {
        float pre[PER], suf[PER], all[PER], x[PER];
        share_decays(pre, suf, all, step);
        const u32 at = shared + step % STAGES * STAGE;
        barrier_wait(loaded(shared, step), step / STAGES & 1);
        Slice<LA_DTYPE, PER> rows;
        rows_of_tile(rows, at + AT_Q, walk.chunk(step));
#pragma unroll
        for (int c = 0; c < PER; c++) pre[c] *= ADDS ? a.scale * running[c] : a.scale;
#pragma unroll
        for (int r = 0; r < SLICE; r++) {
            float d[PER];
            decays(d, r);
#pragma unroll
            for (int c = 0; c < PER; c++) {
                const float before = pre[c];
                pre[c] *= d[c];
                x[c] = rows.at(r, c) * (BEFORE ? before : pre[c]);
            }
            store_row<PER>(at + AT_Q + slice_row<PER>(warp, r, lane), x);
        }
        if (ADDS) {
#pragma unroll
            for (int c = 0; c < PER; c++) running[c] *= all[c];
            return;
        }
        rows_of_tile(rows, at + AT_K, walk.chunk(step));
#pragma unroll
        for (int r = SLICE - 1; r >= 0; r--) {
            float d[PER];
            decays(d, r);
#pragma unroll
            for (int c = 0; c < PER; c++) {
                x[c] = rows.at(r, c) * suf[c];
                suf[c] *= d[c];
            }
            store_row<PER>(at + AT_K + slice_row<PER>(warp, r, lane), x);
        }
        if (warp == 0) {
            const u32 to = shared + AT_CARRIES + step % STAGES * WIDE * 4 + lane * PER * 4;
            store_shared2(to, all[0], all[1]);
            store_shared2(to + 8, all[2], all[3]);
        }
    }
    __device__ __forceinline__ void run() {
        float running[PER] = {1.f, 1.f, 1.f, 1.f};
        if (walk.steps > 0) load(0);
        for (int step = 1 - STAGES; step < walk.steps; step++) {
            const int ahead = step + STAGES - 1;
            if (warp == 0 && lane == 0 && ahead < walk.steps) {
                ring.wait_empty(ahead);
                load_tiles(ahead);
            }
            __syncwarp();
            if (step < 0) continue;
            copy(step, running);
            if (step + 1 < walk.steps) load(step + 1);
            publish_shared();
            warp_arrive(ring.full(step), lane);
        }
        if (ADDS && warp == 0) {
            float* to = a.sums + (walk.of.slot * (a.segments - 1) + walk.segment - 1) * WIDE + lane * PER;
#pragma unroll
            for (int c = 0; c < PER; c++) to[c] = running[c];
        }
    }
};

// G^T in bfloat16, a warp's 16 rows, once the last one has left shared memory: an operand here, and on its way to memory
LA_DEVICE void round_state(const StateRows<1, WIDE>& state, u32 at, int warp, int lane) {
    u32 f[8][4];
    state_operands(f, state, 0);
    if (lane == 0) out_read();
    __syncwarp();
    store_state<Whole>(at, f, 16 * warp, lane);
    publish_shared();
    __syncwarp();
}
LA_DEVICE void store_after(char* to, u32 at, int warp, int lane) {
    if (lane == 0) {
#pragma unroll
        for (int p = 0; p < KEY_BYTES / Tokens::PANEL; p++) run_out(to + p * Whole::PANEL + warp * 2048, at + p * Whole::PANEL + warp * 2048, 2048);
        out_commit();
    }
    __syncwarp();
}
// waits for all but N groups of products, of which the last one waited for is in c
template <int N, int TILES> LA_DEVICE void end_products(float (&c)[TILES][4]) {
    products_wait<N>();
    accumulator_fence(c);
}
// rows of the values' panel that are the sequence's own, where other sequences follow
LA_DEVICE void store_own(char* rows, i64 stride, u32 panel, int column, int own, int thread) {
    for (int i = thread; i < own * 8; i += 128) {
        const int r = i >> 3, c = i & 7;
        copy_out<16>(rows + r * stride + (column + c * 8) * 2, panel + Square::piece(r, c), column + c * 8 < LA_V);
    }
}

struct Consumer {
    const VectorReverseArguments& a;
    const Walk& walk;
    u32 shared;
    Ring<STAGES> ring;
    int warp, lane;
    StateRows<1, WIDE> state;   // G^T

    __device__ __forceinline__ void begin() {
        state.clear();
        if (ADDS) return;
        const i64 slot = walk.of.slot;
        if (walk.segment < walk.last) state.template load<WIDE, WIDE>({a.begins, STATE, WIDE, 1}, slot * a.segments + walk.segment, 16 * warp, lane);
        else if (a.start.data) state.template load<LA_V, LA_K>(a.start, slot / a.start_group, 16 * warp, lane);
    }
    __device__ __forceinline__ void end() {
        if (lane == 0) out_read();
        const i64 slot = walk.of.slot;
        if (ADDS) state.template store<WIDE, WIDE>({a.added, STATE, WIDE, 1}, slot * (a.segments - 1) + walk.segment - 1, 16 * warp, lane);
        else if (walk.segment == 0) state.template store<LA_V, LA_K>(a.end, slot, 16 * warp, lane);
    }
    // dv^T = dO^T P, begun
    __device__ __forceinline__ void begin_local(float (&dv)[8][4], u32 at) {
        const u64 dout = panel_descriptor(at + AT_DOUT + (warp >> 2) * Tokens::PANEL), gram = panel_descriptor(at + AT_GRAM);
        accumulator_fence(dv);
        products_begin();
#pragma unroll
        for (int d = 0; d < 4; d++) product_AtB(dv, dout + Tokens::across(d), gram + Square::across(d), d > 0);
        products_commit();
    }
    // dv^T = scale dv^T + G^T Kd^T, begun
    __device__ __forceinline__ void begin_values(float (&dv)[8][4], u32 at) {
        const u64 after = panel_descriptor(shared + AT_AFTER) + (warp >> 2) * Whole::across(4), keys = panel_descriptor(at + AT_K);
#pragma unroll
        for (int i = 0; i < 32; i++) dv[i >> 2][i & 3] *= a.scale;
        accumulator_fence(dv);
        products_begin();
#pragma unroll
        for (int d = 0; d < round_up(LA_K, 64) / 16; d++) product_ABt(dv, after + Whole::along(d), keys + Tokens::along(d), true);
        products_commit();
    }
    // G^T += dO^T Qg, begun
    __device__ __forceinline__ void begin_state(u32 at) {
        const u64 dout = panel_descriptor(at + AT_DOUT + (warp >> 2) * Tokens::PANEL), queries = panels_descriptor<Tokens>(at + AT_Q);
        accumulator_fence(state.x[0]);
        products_begin();
#pragma unroll
        for (int d = 0; d < 4; d++) product_AtB_wide(state.x[0], dout + Tokens::across(d), queries + Tokens::across(d));
        products_commit();
    }
    __device__ __forceinline__ void decay(int step) {
        float (&G)[16][4] = state.x[0];
        const u32 carries = shared + AT_CARRIES + step % STAGES * WIDE * 4 + (lane & 3) * 8;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 d = load_shared2(carries + i * 32);
            G[i][0] *= d.x; G[i][1] *= d.y; G[i][2] *= d.x; G[i][3] *= d.y;
        }
    }
    __device__ __forceinline__ void store_values(const float (&dv)[8][4], u32 at, int chunk) {
        const int group = warp >> 2, own = walk.of.own(chunk), thread = threadIdx.x & 127;
        const u32 panel = at + AT_DOUT + group * Tokens::PANEL;
        group_barrier(group);   // the panel of dO has been read
        const float (&o)[1][8][4] = (const float (&)[1][8][4])dv;
        stage_rows<Bfloat16, Square, 1, C>(o, panel, 16 * (warp & 3), lane);
        publish_shared();
        group_barrier(group);
        if (own < C) store_own(own_rows(a.out, walk.of.sequence, walk.of.head) + (i64)chunk * C * a.out.token, a.out.token, panel, 64 * group, own, thread);
        else if (thread == 0) {
            box_out(a.dv, panel, 64 * group, walk.of.head, walk.of.token(chunk), walk.of.row);
            out_commit();
            out_read();
        }
        __syncwarp();
    }
    __device__ __forceinline__ void run() {
        begin();
        for (int step = 0; step < walk.steps; step++) {
            const int chunk = walk.chunk(step), own = walk.of.own(chunk);
            const u32 at = shared + step % STAGES * STAGE;
            float dv[8][4];
            if (!ADDS) round_state(state, shared + AT_AFTER, warp, lane);
            barrier_wait(loaded(shared, step), step / STAGES & 1);
            if (own < C) {
                clear_rows<CONSUMERS>(at + AT_DOUT, own, threadIdx.x);
                publish_shared();
                groups_barrier<CONSUMERS>(4);
            }
            if (!ADDS) {
                begin_local(dv, at);
                group_barrier(warp >> 2);   // G is whole in shared memory
            }
            ring.wait_full(step);
            if (!ADDS) end_products<0>(dv);
            if (!ADDS) {
                decay(step);
                begin_values(dv, at);
            }
            begin_state(at);
            if (!ADDS) store_after(a.ends + (walk.of.block + chunk) * LA_ENDS, shared + AT_AFTER, warp, lane);
            end_products<0>(state.x[0]);
            if (!ADDS) {
                accumulator_fence(dv);
                store_values(dv, at, chunk);
            }
            publish_shared();   // what was read and written here is behind the copies to come
            warp_arrive(ring.empty(step), lane);
        }
        end();
    }
};

extern "C" __global__ void __launch_bounds__(512, 1) reverse(const __grid_constant__ VectorReverseArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const Walk walk(a, blockIdx.x);
    if (walk.segment > walk.last || (ADDS && walk.segment == 0)) return;   // nothing needs what the first segment adds
    const Ring<STAGES> ring = {shared + AT_RING};
    if (threadIdx.x == 0) {
        ring.init(8 * ARRIVALS, 4 * GROUPS_OF_VALUES * ARRIVALS);
        for (int s = 0; s < STAGES; s++) barrier_init(loaded(shared, s), 1);
        barriers_made();
    }
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (warp >= 8) {
        release_registers<COPY_REGISTERS>();
        Producer producer = {a, walk, shared, ring, warp - 8, lane, rows_of(a.g, walk.of.sequence, walk.of.head)};
        producer.run();
    } else {
        claim_registers<CHAIN_REGISTERS>();
        Consumer consumer = {a, walk, shared, ring, warp, lane};
        if (warp < 4 * GROUPS_OF_VALUES) consumer.run();
    }
}
