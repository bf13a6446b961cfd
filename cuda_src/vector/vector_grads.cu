// The gradients of vector decay that need both states, of one chunk and half of the key channels at a time: dq, dk, dg (du; with
// erase also r.k for dbeta), from S before and G = dL/dS after the chunk.
//
//     Z = scale lower of dO U^T,       Y = -strict lower of dW U^T                  (without erase U = V, and no Y)
//     dq = readers(scale dO S^T, Z),   r = readers(-dW S^T, Y),   w = writers(U G^T; (Z, q), (Y, k)),   dk = r + w
//     dg_t = sum over l >= t of (q_l.dq_l + k_l.r_l - k_l.w_l), channel by channel, + sum over j of (the part of k_j.w_j through G) + e^B <S, G>
//
// The dots of dg are taken of the accumulators and the *rounded* copies that the products read, before the last factor: so a pair that does not cross
// t is the same number on both sides and cancels to float32. A chunk that decays by more than 2^-116 within a block is left to the
// build with LA_EXACT 1: the other one says so in `flags`.
#include "vector/horner.cuh"
#if LA_EXACT
#include "vector/exact_grads.cuh"
#endif

// rows of the slice as they came, and Pre h of each
struct Own {
    Slice<LA_DTYPE, PER> q, k;
    float a[SLICE][PER], pre[SLICE][PER], start[PER];   // a: exact only

    __device__ __forceinline__ void load(const VectorGradArguments& x, const ChunkPlace& place, const Lane& me) {
        const Sequence& s = place.of.sequence;
        const int first = place.chunk * C + me.warp * SLICE, channel = place.half * HALF + me.lane * PER, head = place.of.head;
        Slice<LA_GATE, PER> g;
        g.load(rows_of(x.g, s, head), x.g.token, channel, first, s.T);
        q.load(rows_of(x.q, s, head), x.q.token, channel, first, s.T);
        k.load(rows_of(x.k, s, head), x.k.token, channel, first, s.T);
        decays_of(pre, g);
        if constexpr (EXACT_BLOCKS)
#pragma unroll
            for (int r = 0; r < SLICE; r++)
#pragma unroll
                for (int c = 0; c < PER; c++) a[r][c] = pre[r][c];
        run_down(pre);
        me.decays().store(me.warp, me.lane, pre[SLICE - 1]);
    }
    // the decay that queries of row r read with, times h
    __device__ __forceinline__ float reads(int r, int c) const { return !BEFORE ? pre[r][c] : r ? pre[r - 1][c] : start[c]; }

    // copies of the slice; whether a block decays too far for them. The table of decays is whole
    __device__ __forceinline__ bool copy(const Lane& me) {
        bool far = false;
#pragma unroll
        for (int c = 0; c < PER; c++) start[c] = EXACT_BLOCKS ? 1.f : MIDDLE;
        if (me.warp & 1) {
            float first[PER];
            me.decays().load(first, me.warp - 1, me.lane);
#pragma unroll
            for (int c = 0; c < PER; c++) {
                start[c] *= first[c];
                far |= first[c] * pre[SLICE - 1][c] < SMALLEST_DECAY;
            }
        }
        float rest[PER] = {1.f, 1.f};
        if constexpr (EXACT_BLOCKS)
            if (!(me.warp & 1)) me.decays().load(rest, me.warp + 1, me.lane);
#pragma unroll
        for (int r = 0; r < SLICE; r++)
#pragma unroll
            for (int c = 0; c < PER; c++) pre[r][c] *= start[c];
#pragma unroll
        for (int i = 0; i < SLICE; i++) {
            const int r = EXACT_BLOCKS ? SLICE - 1 - i : i;
            float x[PER], y[PER], z[PER];
#pragma unroll
            for (int c = 0; c < PER; c++) {
                x[c] = q.at(r, c) * reads(r, c);
                y[c] = k.at(r, c) * (EXACT_BLOCKS ? rest[c] : reciprocal(fmaxf(pre[r][c], MIDDLE * SMALLEST_DECAY)));
                z[c] = k.at(r, c) * pre[r][c];
                if constexpr (EXACT_BLOCKS) rest[c] *= a[r][c];
            }
            store_row<PER>(me.row(AT_QP, r), x);
            store_row<PER>(me.row(AT_KP, r), y);
            if constexpr (ERASE) store_row<PER>(me.row(AT_KR, r), z);
        }
        return far;
    }
};

// Products without decay, grams in shared memory; the chunk is left to the exact build if any thread says `far`
LA_DEVICE bool multiply(float (&x)[8][4], float (&erases)[8][4], const VectorGradArguments& a, const ChunkPlace& place, const Lane& me, bool far, int phase) {
    barrier_wait(me.shared + AT_BARRIER, phase);
    const int own = place.of.own(place.chunk);
    if (own < C) {
        clear_rows<THREADS>(me.shared + AT_DOUT, own, threadIdx.x);
        clear_rows<THREADS>(me.shared + AT_WRITTEN, own, threadIdx.x);
        if constexpr (ERASE) clear_rows<THREADS>(me.shared + AT_ERROR, own, threadIdx.x);
        publish_shared();
        __syncthreads();
    }
    float z[4][4], y[4][4];
    begin_state(x, me.tile(me.group ? AT_AFTER : AT_STATE), me.tile(me.group ? AT_WRITTEN : AT_DOUT));
    const u64 written = me.tile(AT_WRITTEN) + (me.group ? 32 * 128 >> 4 : 0);
    begin_gram(z, me.tile(AT_DOUT), written);
    if constexpr (ERASE) {
        begin_gram(y, me.tile(AT_ERROR), written);
        if (me.group == 0) begin_state(erases, me.tile(AT_STATE), me.tile(AT_ERROR));
    }
    state_products(me);
    products_wait<0>();
    accumulator_fence(x);
    accumulator_fence(z);
    if constexpr (ERASE) {
        accumulator_fence(y);
        accumulator_fence(erases);
        __syncthreads();   // Z and Y go where dO has been
    }
    store_gram<BEFORE>(z, me.shared + AT_Z, me.shared + AT_OWN, a.scale, me);
    if constexpr (ERASE) store_gram<true>(y, me.shared + AT_Y, 0, -1.f, me);
    publish_shared();
    return __syncthreads_or(far);
}

// Sums over the blocks, left in shared memory as rows of tokens
LA_DEVICE void sum_blocks(float (&x)[8][4], float (&erases)[8][4], float scale, const Lane& me) {
    const u64 keys = me.tile(AT_KP), z = me.tile(AT_Z), y = me.tile(AT_Y);
    if (me.group == 0) {
        constexpr float START = EXACT_BLOCKS ? 1.f : 1.f / MIDDLE;
        const float f[2] = {scale * START, scale * START}, g[2] = {-START, -START};
        scale_columns<0, 8>(x, f);
        if constexpr (ERASE) {
            scale_columns<0, 8>(erases, g);
            read_blocks(x, erases, keys, z, y, me);
            stage_sums(erases, AT_ERASES, me);
        } else read_blocks(x, keys, z, me);
        stage_sums(x, AT_READS, me);
    } else {
        if constexpr (EXACT_BLOCKS) stage_given(x, me);
        else crossing_writes(x, me);
        write_blocks(x, me.tile(AT_QP), z, me.tile(AT_KR), y, me);
        stage_sums(x, AT_WRITES, me);
    }
}

LA_DEVICE void store_pair(char* to, float x, float y) { asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(pack_bf16(x, y)) : "memory"); }

// dq and dk of the slice to memory; db[r] becomes the sum of db over its own rows from r on
LA_DEVICE void store_rows_of(float (&db)[SLICE][PER], float (&bonus)[PER], const Own& own, const VectorGradArguments& a, const ChunkPlace& place, const Lane& me) {
    const int first = place.chunk * C + me.warp * SLICE, channel = place.half * HALF + me.lane * PER, left = channel < LA_K ? place.of.sequence.T - first : 0;
    char* const to_q = own_rows(a.dq, place.of.sequence, place.of.head) + first * a.dq.token + channel * 2;
    char* const to_k = own_rows(a.dk, place.of.sequence, place.of.head) + first * a.dk.token + channel * 2;
    const float2 u = BONUS && channel < LA_K ? *(const float2*)(a.u + (u32)place.of.head / (u32)a.group_u * LA_K + channel) : float2{};
    float later[PER] = {0.f, 0.f};
#pragma unroll
    for (int r = SLICE - 1; r >= 0; r--) {
        const float2 x = load_shared2(me.staged(AT_READS, r)), y = load_shared2(me.staged(AT_WRITES, r));
        const u32 qp = __float_as_uint(load_shared(me.row(AT_QP, r))), kp = __float_as_uint(load_shared(me.row(AT_KP, r)));
        float dq[PER] = {x.x * own.reads(r, 0), x.y * own.reads(r, 1)};
        float dk[PER] = {y.x * reciprocal(own.pre[r][0]), y.y * reciprocal(own.pre[r][1])};
        float read[PER] = {low_bf16(qp) * x.x, high_bf16(qp) * x.y};
        if constexpr (ERASE) {
            const float2 e = load_shared2(me.staged(AT_ERASES, r));
            const u32 kr = __float_as_uint(load_shared(me.row(AT_KR, r)));
            const float dots[PER] = {low_bf16(kr) * e.x, high_bf16(kr) * e.y};
            dk[0] += e.x * own.pre[r][0];
            dk[1] += e.y * own.pre[r][1];
            read[0] += dots[0];
            read[1] += dots[1];
            const float sum = warp_sum(dots[0] + dots[1]);
            if (me.lane == 0 && r < left) a.erase_dots[(place.half * (i64)a.heads + place.of.head) * a.tokens + place.of.sequence.index + first + r] = sum;
        }
        const float write[PER] = {low_bf16(kp) * y.x, high_bf16(kp) * y.y};
#pragma unroll
        for (int c = 0; c < PER; c++) {
            db[r][c] = (BEFORE ? later[c] : later[c] + read[c]) - write[c];
            later[c] = BEFORE ? db[r][c] + read[c] : db[r][c];
            if constexpr (BONUS) {
                const float both = load_shared(me.shared + AT_OWN + (me.warp * SLICE + r) * 4), w = both * (c ? u.y : u.x);
                dq[c] += w * own.k.at(r, c);
                dk[c] += w * own.q.at(r, c);
                bonus[c] += both * own.q.at(r, c) * own.k.at(r, c);
            }
        }
        if (r < left) {
            store_pair(to_q + r * a.dq.token, dq[0], dq[1]);
            store_pair(to_k + r * a.dk.token, dk[0], dk[1]);
        }
    }
    SliceTable<PER>{me.shared + AT_SUMS}.store(me.warp, me.lane, later);
}

// dg of the slice: db summed over the later slices and all that crosses the chunk's end; a token that forgets everything has none
LA_DEVICE void store_gates(const float (&db)[SLICE][PER], const Own& own, const VectorGradArguments& a, const ChunkPlace& place, const Lane& me) {
    float all[PER] = {1.f, 1.f}, product[PER] = {0.f, 0.f}, end[PER];
#pragma unroll
    for (int s = SLICES - 1; s >= 0; s--) {
        float x[PER], y[PER];
        me.decays().load(x, s, me.lane);
        SliceTable<PER>{me.shared + AT_PRODUCTS}.load(y, s, me.lane);
#pragma unroll
        for (int c = 0; c < PER; c++) {
            all[c] *= x[c];
            product[c] += y[c];
        }
    }
    const float2 crossing = EXACT_BLOCKS ? float2{} : load_shared2(me.shared + AT_CROSSING + me.lane * 8);
    end[0] = crossing.x + all[0] * product[0];
    end[1] = crossing.y + all[1] * product[1];
    if constexpr (EXACT_BLOCKS)   // of earlier slices; db has its own
        for (int s = 0; s < me.warp; s++) {
            float x[PER];
            SliceTable<PER>{me.shared + AT_GIVEN_SUMS}.load(x, s, me.lane);
#pragma unroll
            for (int c = 0; c < PER; c++) end[c] += x[c];
        }
#pragma unroll
    for (int s = SLICES - 1; s > 0; s--) {
        float x[PER];
        SliceTable<PER>{me.shared + AT_SUMS}.load(x, s, me.lane);
#pragma unroll
        for (int c = 0; c < PER; c++) end[c] += s > me.warp ? x[c] : 0.f;
    }
    const int first = place.chunk * C + me.warp * SLICE, channel = place.half * HALF + me.lane * PER;
    char* const to = own_rows(a.dg, place.of.sequence, place.of.head) + first * a.dg.token + channel * (LA_GATE == 2 ? 4 : 2);
#pragma unroll
    for (int r = 0; r < SLICE; r++) {
        float x[PER];
#pragma unroll
        for (int c = 0; c < PER; c++) x[c] = EXACT_BLOCKS && own.a[r][c] == 0.f ? 0.f : db[r][c] + end[c];
        if (first + r >= place.of.sequence.T || channel >= LA_K) continue;
        if constexpr (LA_GATE == 2) *(float2*)(to + r * a.dg.token) = {x[0], x[1]};
        else store_pair(to + r * a.dg.token, x[0], x[1]);
    }
}

// what the slices add to du, as floats a chunk; in the place of the copies of q, which all have read
LA_DEVICE void store_bonus(const float (&bonus)[PER], const VectorGradArguments& a, const ChunkPlace& place, const Lane& me) {
    const SliceTable<PER> table = {me.shared + AT_DOUT};
    table.store(me.warp, me.lane, bonus);
    __syncthreads();
    const int channel = place.half * HALF + threadIdx.x;
    if (threadIdx.x >= HALF || channel >= LA_K) return;
    float sum = 0.f;
    for (int s = 0; s < SLICES; s++) sum += table.at(s, threadIdx.x);
    a.du[place.block() * LA_K + channel] = sum;
}

// returns whether the chunk is left to the exact build
LA_DEVICE bool gradients(const VectorGradArguments& a, const ChunkPlace& place, const Lane& me, int phase) {
    if (threadIdx.x == 0) load_tiles(a, place, me.shared);
    __syncwarp();
    Own own;
    own.load(a, place, me);
    __syncthreads();   // the table of decays is whole
    const bool far = own.copy(me);
    float x[8][4], erases[8][4], db[SLICE][PER], bonus[PER] = {0.f, 0.f};
    if (multiply(x, erases, a, place, me, far, phase) && !EXACT_BLOCKS) return true;
#if LA_EXACT
    const Raw raw(me);
    raw.store(own.q, own.k, own.a);
#endif
    sum_blocks(x, erases, a.scale, me);
    __syncthreads();
#if LA_EXACT
    exact_rows(db, bonus, raw, a, place, me);
#else
    store_rows_of(db, bonus, own, a, place, me);
#endif
    __syncthreads();
    store_gates(db, own, a, place, me);
    if constexpr (BONUS) store_bonus(bonus, a, place, me);
    return false;
}

#if LA_EXACT
// a few blocks that redo what the other build has flagged
extern "C" __global__ void __launch_bounds__(THREADS, ERASE ? 1 : 2) grads(const __grid_constant__ VectorGradArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ u32 flagged[THREADS / 32];
    const Lane me(shared_address(memory));
    if (threadIdx.x == 0) {
        barrier_init(me.shared + AT_BARRIER, 1);
        barriers_made();
    }
    int phase = 0;
    for (u32 round = blockIdx.x; round < a.items; round += THREADS * gridDim.x) {
        const u32 item = round + threadIdx.x * gridDim.x, mask = __ballot_sync(0xffffffffu, item < a.items && a.flags[item]);
        if (me.lane == 0) flagged[me.warp] = mask;
        __syncthreads();
        for (int w = 0; w < THREADS / 32; w++)
            for (u32 left = flagged[w]; left; left &= left - 1) {
                const Lane again(opaque(me.shared));   // no address is held over the loop
                gradients(a, ChunkPlace(a, round + (32 * w + __ffs(left) - 1) * gridDim.x), again, phase);
                phase ^= 1;
                publish_shared();
                __syncthreads();
            }
        __syncthreads();
    }
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 2) grads(const __grid_constant__ VectorGradArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const ChunkPlace place(a, blockIdx.x);
    const bool exists = place.chunk < place.of.chunks();
    if (!exists) {
        if (threadIdx.x == 0) a.flags[blockIdx.x] = 0;
        return;
    }
    const Lane me(shared_address(memory));
    if (threadIdx.x == 0) {
        barrier_init(me.shared + AT_BARRIER, 1);
        barriers_made();
    }
    const bool left = gradients(a, place, me, 0);
    if (threadIdx.x == 0) a.flags[blockIdx.x] = left;
}
#endif
