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
#include "vector_backward/exact.cuh"
#include "vector_backward/horner.cuh"

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
    store_gram<BEFORE, BEFORE && EXACT_BLOCKS>(z, me.shared + AT_Z, me.shared + AT_OWN, me.shared + AT_NEAR, a.scale, me);
    if constexpr (ERASE) store_gram<true, false>(y, me.shared + AT_Y, 0, 0, -1.f, me);
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

LA_DEVICE void load_pair(float (&x)[PER], u32 at) {
    const float2 y = load_shared2(at);
    x[0] = y.x;
    x[1] = y.y;
}
LA_DEVICE void load_copies(float (&x)[PER], u32 at) {
    const u32 y = __float_as_uint(load_shared(at));
    x[0] = low_bf16(y);
    x[1] = high_bf16(y);
}
LA_DEVICE void store_pair(char* to, float x, float y) { asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(pack_bf16(x, y)) : "memory"); }

// dq and dk of the slice to memory; db[r] becomes the sum of db over its own rows from r on, and (exact) of what its earlier rows write for G
LA_DEVICE void store_rows_of(float (&db)[SLICE][PER], float (&bonus)[PER], const Pairs& pairs, const Own& own, const VectorGradArguments& a, const ChunkPlace& place, const Lane& me) {
    const int first = place.chunk * C + me.warp * SLICE, channel = place.half * HALF + me.lane * PER, left = channel < LA_K ? place.of.sequence.T - first : 0;
    char* const to_q = own_rows(a.dq, place.of.sequence, place.of.head) + first * a.dq.token + channel * 2;
    char* const to_k = own_rows(a.dk, place.of.sequence, place.of.head) + first * a.dk.token + channel * 2;
    const float2 u = BONUS && channel < LA_K ? *(const float2*)(a.u + (u32)place.of.head / (u32)a.group_u * LA_K + channel) : float2{};
    float later[PER] = {0.f, 0.f}, suf[PER];
    own.rest(suf, me);
#pragma unroll
    for (int r = SLICE - 1; r >= 0; r--) {
        const int t = me.warp * SLICE + r;
        float x[PER], y[PER], qp[PER], kp[PER], dq[PER], dk[PER], read[PER], write[PER];
        load_pair(x, me.staged(AT_READS, r));
        load_pair(y, me.staged(AT_WRITES, r));
        load_copies(qp, me.row(AT_QP, r));
        load_copies(kp, me.row(AT_KP, r));
#pragma unroll
        for (int c = 0; c < PER; c++) {
            dq[c] = x[c] * own.reads(r, c);
            read[c] = qp[c] * x[c];
            dk[c] = y[c] * (EXACT_BLOCKS ? suf[c] : reciprocal(own.pre[r][c]));
            write[c] = kp[c] * y[c];
        }
        if constexpr (ERASE) {
            float e[PER], kr[PER], dots[PER];
            load_pair(e, me.staged(AT_ERASES, r));
            load_copies(kr, me.row(AT_KR, r));
#pragma unroll
            for (int c = 0; c < PER; c++) {
                dots[c] = kr[c] * e[c];
                dk[c] += e[c] * own.pre[r][c];
                if constexpr (EXACT_BLOCKS) {
                    dots[c] += own.k.at(r, c) * pairs.erase[r][c];
                    dk[c] += pairs.erase[r][c];
                }
                read[c] += dots[c];
            }
            const float sum = warp_sum(dots[0] + dots[1]);
            if (me.lane == 0 && r < left) a.erase_dots[(place.half * (i64)a.heads + place.of.head) * a.tokens + place.of.sequence.index + first + r] = sum;
        }
        if constexpr (EXACT_BLOCKS) pairs.add_to(dq, dk, read, write, suf, own, r, t, me);
        if constexpr (BONUS) {
            const float both = load_shared(me.shared + AT_OWN + t * 4), w[PER] = {both * u.x, both * u.y};
#pragma unroll
            for (int c = 0; c < PER; c++) {
                dq[c] += w[c] * own.k.at(r, c);
                dk[c] += w[c] * own.q.at(r, c);
                bonus[c] += both * own.q.at(r, c) * own.k.at(r, c);
            }
        }
#pragma unroll
        for (int c = 0; c < PER; c++) {
            db[r][c] = (BEFORE ? later[c] : later[c] + read[c]) - write[c];
            later[c] = BEFORE ? db[r][c] + read[c] : db[r][c];
            if constexpr (EXACT_BLOCKS) suf[c] *= own.a[r][c];
        }
        if (r < left) {
            store_pair(to_q + r * a.dq.token, dq[0], dq[1]);
            store_pair(to_k + r * a.dk.token, dk[0], dk[1]);
        }
    }
    SliceTable<PER>{me.shared + AT_SUMS}.store(me.warp, me.lane, later);
    if constexpr (EXACT_BLOCKS) add_given(db, me);
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

// A chunk whose tiles are on their way. `next` runs once the products have left the first tiles. Returns whether the chunk is left to
// the exact build.
template <class Next> LA_DEVICE bool gradients(const VectorGradArguments& a, const ChunkPlace& place, const Lane& me, int phase, Next next) {
    Own own;
    own.load(a, place, me);
    __syncthreads();   // the table of decays is whole
    const bool far = own.copy(me, place.of.sequence.T - place.chunk * C - me.warp / 2 * 16);
    float x[8][4], erases[8][4], db[SLICE][PER], bonus[PER] = {0.f, 0.f};
    const bool left = multiply(x, erases, a, place, me, far, phase) && !EXACT_BLOCKS;
    next();
    if (left) return true;
    const Raw raw(me);
    if constexpr (EXACT_BLOCKS) raw.store(own);
    sum_blocks(x, erases, a.scale, me);
    __syncthreads();
    Pairs pairs;
    if constexpr (EXACT_BLOCKS) pairs.make(raw, own, me);
    store_rows_of(db, bonus, pairs, own, a, place, me);
    __syncthreads();
    store_gates(db, own, a, place, me);
    if constexpr (BONUS) store_bonus(bonus, a, place, me);
    return false;
}

// The next item from `item` on that is a chunk; others are flagged as nothing to do
LA_DEVICE u32 existing(const VectorGradArguments& a, u32 item) {
    for (; item < a.items; item += gridDim.x) {
        const ChunkPlace place(a, item);
        if (place.chunk < place.of.chunks()) break;
        if (threadIdx.x == 0) a.flags[item] = 0;
    }
    return item;
}

#if LA_EXACT
// redoes what the other build has flagged
extern "C" __global__ void __launch_bounds__(THREADS, ERASE ? 1 : 2) grads(const __grid_constant__ VectorGradArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ u32 flagged[THREADS / 32];
    const u32 shared = shared_address(memory), warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        barrier_init(shared + AT_BARRIER, 2);
        barriers_made();
    }
    int phase = 0;
    for (u32 round = blockIdx.x; round < a.items; round += THREADS * gridDim.x) {
        const u32 item = round + threadIdx.x * gridDim.x, mask = __ballot_sync(0xffffffffu, item < a.items && a.flags[item]);
        if (threadIdx.x % 32 == 0) flagged[warp] = mask;
        __syncthreads();
        for (int w = 0; w < THREADS / 32; w++)
            for (u32 left = flagged[w]; left; left &= left - 1) {
                const Lane me(opaque(shared));   // no address is held over the loop
                const ChunkPlace place(a, round + (32 * w + __ffs(left) - 1) * gridDim.x);
                if (threadIdx.x == 0) {
                    load_first(a, place, me.shared);
                    load_last(a, place, me.shared);
                }
                __syncwarp();
                gradients(a, place, me, phase, [] {});
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
    const u32 shared = shared_address(memory);
    u32 item = existing(a, blockIdx.x);
    if (threadIdx.x == 0) {
        barrier_init(shared + AT_BARRIER, 2);
        barriers_made();
        if (EARLY && item < a.items) load_first(a, ChunkPlace(a, item), shared);
    }
    for (int phase = 0; item < a.items; phase ^= 1) {
        const Lane me(opaque(shared));   // no address is held over the loop
        const ChunkPlace place(a, item);
        if (threadIdx.x == 0) {
            if (!EARLY) load_first(a, place, me.shared);
            load_last(a, place, me.shared);
        }
        __syncwarp();
        u32 following = item;
        const bool left = gradients(a, place, me, phase, [&] {
            following = existing(a, item + gridDim.x);
            if (following >= a.items) return;
            const ChunkPlace further(a, following);
            if (threadIdx.x == 0) {
                if (EARLY) load_first(a, further, me.shared);
                else prefetch_first(a, further);
                prefetch_last(a, further);
            }
            prefetch_rows(a, further, me);
        });
        if (threadIdx.x == 0) a.flags[item] = left;
        item = following;
        publish_shared();   // what was read and written is behind the copies to come
        __syncthreads();
    }
}
#endif
