// The chain of vector decay backward: G = dL/dS (transposed, value row by key column) from a segment's end to its start.
//
//     dv^T = G^T Kd^T + dO^T P,      G^T <- e^B G^T + dO^T Qg,      Qg = scale q e^{b},   Kd = k e^{B - b}
//
// b: decays from the chunk's start (with BEFORE a query's excludes its own token), all exponents <= 0: no decay divides here. G after each chunk goes
// to memory in bfloat16, as the products of vector_grads.cu read it. Warpgroups 0 and 1: 64 value rows of G^T each, in registers, where
// the decay is a factor of columns. Warpgroups 2 and 3 copy the chunks ahead into a ring: scaled q and k by threads, dO and P by the copy engine.
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
constexpr int AT_RING = AT_CARRIES + STAGES * WIDE * 4;
static_assert(LA_SHARED == AT_RING + 16 * STAGES && LA_WARPS == 8, "LA_SHARED is what the launch asks for");
constexpr int CHAIN_REGISTERS = 160, COPY_REGISTERS = 96;
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

// q, k and log decays of the next chunk in registers, copies of this one in the ring
struct Producer {
    const VectorReverseArguments& a;
    const Walk& walk;
    u32 shared;
    Ring<STAGES> ring;
    int warp, lane;
    const char *q, *k, *g;
    Slice<LA_DTYPE, PER> rows_q, rows_k;
    Slice<LA_GATE, PER> gates;

    __device__ __forceinline__ void load(int step) {
        const int channel = lane * PER, first = walk.chunk(step) * C + warp * SLICE, T = walk.of.sequence.T;
        gates.load(g, a.g.token, channel, first, T);
        rows_q.load(q, a.q.token, channel, first, T);
        if (!ADDS) rows_k.load(k, a.k.token, channel, first, T);
    }
    __device__ __forceinline__ void load_tiles(int step) const {
        const int chunk = walk.chunk(step);
        const u32 at = shared + step % STAGES * STAGE, full = ring.full(step);
        barrier_expect(full, TILE_BYTES + !ADDS * Square::SIZE);
        tile_in(at + AT_DOUT, a.dout, full, walk.of.head, walk.of.token(chunk), walk.of.row);
        if (!ADDS) run_in(at + AT_GRAM, a.grams + (walk.of.block + chunk) * LA_GRAM, Square::SIZE, full);
    }
    // copies of a chunk; `running`: with ADDS the decay of all chunks before it
    __device__ __forceinline__ void copy(int step, float (&running)[PER]) {
        float decay[SLICE][PER], pre[PER], suf[PER];
        decays_of(decay, gates);
        {
            float all[PER];
#pragma unroll
            for (int c = 0; c < PER; c++) all[c] = decay[0][c];
#pragma unroll
            for (int r = 1; r < SLICE; r++)
#pragma unroll
                for (int c = 0; c < PER; c++) all[c] *= decay[r][c];
            SliceTable<PER>{shared + AT_TABLES + (step & 1) * SliceTable<PER>::BYTES}.store(warp, lane, all);
        }
        groups_barrier<COPIERS>(3);
        float carry[PER];
#pragma unroll
        for (int c = 0; c < PER; c++) {
            pre[c] = a.scale * (ADDS ? running[c] : 1.f);
            suf[c] = carry[c] = 1.f;
        }
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
            float x[PER];
            SliceTable<PER>{shared + AT_TABLES + (step & 1) * SliceTable<PER>::BYTES}.load(x, s, lane);
#pragma unroll
            for (int c = 0; c < PER; c++) {
                if (s < warp) pre[c] *= x[c];
                if (s > warp) suf[c] *= x[c];
                carry[c] *= x[c];
            }
        }
        const u32 at = shared + step % STAGES * STAGE;
#pragma unroll
        for (int i = 0; i < SLICE; i++) {
            const int j = SLICE - 1 - i;
            float x[PER], y[PER];
#pragma unroll
            for (int c = 0; c < PER; c++) {
                if (!BEFORE) pre[c] *= decay[i][c];
                x[c] = rows_q.at(i, c) * pre[c];
                if (BEFORE) pre[c] *= decay[i][c];
                y[c] = rows_k.at(j, c) * suf[c];
                suf[c] *= decay[j][c];
            }
            store_row<PER>(at + AT_Q + slice_row<PER>(warp, i, lane), x);
            if (!ADDS) store_row<PER>(at + AT_K + slice_row<PER>(warp, j, lane), y);
        }
        if (warp == 0 && !ADDS) {
            const u32 to = shared + AT_CARRIES + step % STAGES * WIDE * 4 + lane * PER * 4;
            store_shared2(to, carry[0], carry[1]);
            store_shared2(to + 8, carry[2], carry[3]);
        }
        if (ADDS)
#pragma unroll
            for (int c = 0; c < PER; c++) running[c] *= carry[c];
    }
    __device__ __forceinline__ void run() {
        float running[PER] = {1.f, 1.f, 1.f, 1.f};
        if (walk.steps > 0) load(0);
        for (int step = 0; step < walk.steps; step++) {
            ring.wait_empty(step);
            if (warp == 0 && lane == 0) load_tiles(step);
            __syncwarp();
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

// G^T in bfloat16 to memory, once the last one has left shared memory: a warp's 16 rows
LA_DEVICE void store_after(char* to, u32 at, const u32 (&f)[8][4], int warp, int lane) {
    if (lane == 0) out_read();
    __syncwarp();
    store_state<Whole>(at, f, 16 * warp, lane);
    publish_shared();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
        for (int p = 0; p < round_up(LA_K, 64) / 64; p++) run_out(to + p * Whole::PANEL + warp * 2048, at + p * Whole::PANEL + warp * 2048, 2048);
        out_commit();
    }
    __syncwarp();
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
    // dv^T = G^T Kd^T + dO^T P, begun; G^T is rounded and goes to memory
    __device__ __forceinline__ void begin_values(float (&dv)[8][4], const u32 (&f)[8][4], u32 at, int chunk) {
        const int group = warp >> 2;
        const u64 keys = panel_descriptor(at + AT_K), dout = panel_descriptor(at + AT_DOUT + group * Tokens::PANEL), gram = panel_descriptor(at + AT_GRAM);
        accumulator_fence(dv);
        products_begin();
#pragma unroll
        for (int d = 0; d < 8; d++) product_ABt(dv, f[d], keys + Tokens::along(d), d > 0);
#pragma unroll
        for (int d = 0; d < 4; d++) product_AtB(dv, dout + Tokens::across(d), gram + Square::across(d), true);
        products_commit();
        store_after(a.ends + (walk.of.block + chunk) * LA_ENDS, shared + AT_AFTER, f, warp, lane);
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
        float (&G)[16][4] = state.x[0];
        const int group = warp >> 2;
        for (int step = 0; step < walk.steps; step++) {
            const int chunk = walk.chunk(step), own = walk.of.own(chunk);
            const u32 at = shared + step % STAGES * STAGE;
            ring.wait_full(step);
            if (own < C) {
                clear_rows<CONSUMERS>(at + AT_DOUT, own, threadIdx.x);
                publish_shared();
                groups_barrier<CONSUMERS>(4);
            }
            float dv[8][4];
            u32 f[8][4];
            if (!ADDS) {
                state_operands(f, state, 0);
                begin_values(dv, f, at, chunk);
                const u32 carries = shared + AT_CARRIES + step % STAGES * WIDE * 4 + (lane & 3) * 8;
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    const float2 d = load_shared2(carries + i * 32);
                    G[i][0] *= d.x; G[i][1] *= d.y; G[i][2] *= d.x; G[i][3] *= d.y;
                }
            }
            const u64 dout = panel_descriptor(at + AT_DOUT + group * Tokens::PANEL), queries = panels_descriptor<Tokens>(at + AT_Q);
            accumulator_fence(G);
            products_begin();
#pragma unroll
            for (int d = 0; d < 4; d++) product_AtB_wide(G, dout + Tokens::across(d), queries + Tokens::across(d));
            products_commit();
            products_wait<0>();
            accumulator_fence(G);
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
        ring.init(8 * ARRIVALS + 1, 4 * GROUPS_OF_VALUES * ARRIVALS);
        barriers_made();
    }
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (warp >= 8) {
        release_registers<COPY_REGISTERS>();
        Producer producer = {a, walk, shared, ring, warp - 8, lane, rows_of(a.q, walk.of.sequence, walk.of.head),
                             rows_of(a.k, walk.of.sequence, walk.of.head), rows_of(a.g, walk.of.sequence, walk.of.head)};
        producer.run();
    } else {
        claim_registers<CHAIN_REGISTERS>();
        Consumer consumer = {a, walk, shared, ring, warp, lane};
        if (warp < 4 * GROUPS_OF_VALUES) consumer.run();
    }
}
