// The gradients of vector decay that need both states, of one chunk and half of the key channels at a time: dq, dk, dg
// (du; with erase also r.k for dbeta), from S before and G = dL/dS after the chunk.
//
//     Z = scale lower of dO U^T,       Y = -strict lower of dW U^T                  (without erase U = V, and no Y)
//     dq = readers(scale dO S^T, Z),   r = readers(-dW S^T, Y),   w = writers(U G^T; (Z, q), (Y, k)),   dk = r + w
//     dg_t = sum over l >= t of (q_l.dq_l + k_l.r_l - k_l.w_l), channel by channel,
//         + sum over j of (the part of k_j.w_j through G) + e^B <S, G>
//
// The dots of dg are taken of the accumulators and the copies that the products read, both terms, before the last
// factor: so a pair that does not cross t is the same number on both sides. With erase second terms are gone by then
// and such a pair cancels to 2^-18 of itself; Z's diagonal, the largest, is added apart. A chunk that decays by more
// than 2^-116 within a block is left to the build with LA_EXACT 1: the other one says so in `flags`.
#include "vector/backward/exact.cuh"
#include "vector/backward/horner.cuh"

// Products without decay, grams in shared memory; the chunk is left to the exact build if any thread says `far`
LA_DEVICE bool multiply(float (&x)[8][4], float (&erases)[8][4], Own& copies, const VectorGradArguments& a,
                        const ChunkPlace& place, const Lane& me, bool far, int phase) {
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
    }
    __syncthreads();   // later data go where tiles have been
    store_gram<BEFORE || DIAGONAL_APART, BEFORE && EXACT_BLOCKS, BONUS || DIAGONAL_APART>(
        z, me.shared + AT_Z, me.shared + AT_Z_REST, me.shared + AT_OWN, me.shared + AT_NEAR, a.scale, me);
    if constexpr (ERASE) store_gram<true, false, false>(y, me.shared + AT_Y, me.shared + AT_Y_REST, 0, 0, -1.f, me);
    if constexpr (ERASE && !EXACT_BLOCKS) copies.copy_rest(a, place, me);
    publish_shared();
    return __syncthreads_or(far);
}

// Sums over the blocks, left in shared memory as rows of tokens
LA_DEVICE void sum_blocks(float (&x)[8][4], float (&erases)[8][4], float scale, const Lane& me) {
    constexpr Terms keys = {AT_KP, AT_KP_REST, 0}, z = {AT_Z, AT_Z_REST, 0}, y = {AT_Y, AT_Y_REST, 0};
    if (me.group == 0) {
        constexpr float START = EXACT_BLOCKS ? 1.f : 1.f / MIDDLE;
        const float f[2] = {scale * START, scale * START}, g[2] = {-START, -START};
        scale_columns<0, 8>(x, f);
        if constexpr (ERASE) {
            scale_columns<0, 8>(erases, g);
            read_blocks(x, erases, keys, z, y, me);
            if (!EXACT_BLOCKS) __syncthreads();   // all second terms have been read
            stage_sums(erases, AT_ERASES, me);
        } else read_blocks(x, keys, z, me);
        stage_sums(x, AT_READS, me);
    } else {
        if constexpr (EXACT_BLOCKS) stage_given(x, me);
        else crossing_writes(x, me);
        write_blocks(x, {AT_QP, AT_QP_REST, 0}, z, {AT_KR, AT_KR_REST, 0}, y, me);
        if (ERASE && !EXACT_BLOCKS) __syncthreads();
        stage_sums(x, AT_WRITES, me);
    }
}

LA_DEVICE void store_copies(char* to, const float (&x)[PER]) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(pack_bf16(x[0], x[1])), "r"(pack_bf16(x[2], x[3]))
                 : "memory");
}
LA_DEVICE void store_queries(char* to, const float (&x)[PER]) {
    if constexpr (LA_DQ == 2) *(float4*)to = {x[0], x[1], x[2], x[3]};
    else store_copies(to, x);
}

// r_t.k_t over half of the channels, for dbeta
LA_DEVICE void store_erase_dot(const float (&dots)[PER], int r, const VectorGradArguments& a, const ChunkPlace& place,
                               const Lane& me) {
    float sum = (dots[0] + dots[1]) + (dots[2] + dots[3]);
#pragma unroll
    for (int d = 8; d; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    const int t = place.chunk * C + me.first + r;
    if ((me.lane & 15) == 0 && t < place.of.sequence.T)
        a.erase_dots[(place.half * (i64)a.heads + place.of.head) * a.tokens + place.of.sequence.index + t] = sum;
}

// Of one row: dq, dk, and the dots that dg is made of
struct RowGradients {
    float dq[PER], dk[PER], read[PER], write[PER];
};

// Gradients of a lane's row r before q's own write: dq, dk, and the dots that dg is made of
LA_DEVICE void row_gradients(RowGradients& row, const float (&suf)[PER], const Pairs& pairs, const Own& own, int r,
                             const VectorGradArguments& a, const ChunkPlace& place, const Lane& me) {
    float x[PER], y[PER], qp[PER], kp[PER];
    load_four(x, me.staged(AT_READS, r));
    load_four(y, me.staged(AT_WRITES, r));
    if constexpr (RESTS_APART) {
        load_terms(qp, me.row(AT_QP, r), me.row(AT_QP_REST, r));
        load_terms(kp, me.row(AT_KP, r), me.row(AT_KP_REST, r));
    } else if constexpr (DOTS_OF_COPIES) {
        load_copies(qp, me.row(AT_QP, r));
        load_copies(kp, me.row(AT_KP, r));
    }
#pragma unroll
    for (int c = 0; c < PER; c++) {
        row.dq[c] = x[c] * own.reads(r, c);
        row.dk[c] = y[c] * (EXACT_BLOCKS ? suf[c] : own.over(r, c));
        row.read[c] = DOTS_OF_COPIES ? qp[c] * x[c] : own.q.at(r, c) * row.dq[c];
        row.write[c] = DOTS_OF_COPIES ? kp[c] * y[c] : own.k.at(r, c) * row.dk[c];
    }
    if constexpr (ERASE) {
        float e[PER], kr[PER];
        load_four(e, me.staged(AT_ERASES, r));
        if constexpr (EXACT_BLOCKS) load_copies(kr, me.row(AT_KR, r));
#pragma unroll
        for (int c = 0; c < PER; c++) {
            kr[c] = (EXACT_BLOCKS ? kr[c] : own.erases(r, c)) * e[c];
            row.dk[c] += e[c] * own.pre[r][c];
            if constexpr (EXACT_BLOCKS) {
                kr[c] += own.k.at(r, c) * pairs.erase[r][c];
                row.dk[c] += pairs.erase[r][c];
            }
            row.read[c] += kr[c];
        }
        store_erase_dot(kr, r, a, place, me);
    }
    if constexpr (EXACT_BLOCKS) pairs.add_to(row.dq, row.dk, row.read, row.write, suf, own, r, me);
}

// dq and dk of the lane's rows to memory; db[r] becomes the sum of db over the slice's rows from r on, and (exact) of
// its earlier rows' terms of G
LA_DEVICE void store_rows_of(float (&db)[OWN][PER], float (&bonus)[PER], const Pairs& pairs, const Own& own,
                             const VectorGradArguments& a, const ChunkPlace& place, const Lane& me) {
    const int first = place.chunk * C + me.first, channel = place.half * HALF + me.channel,
              left = channel < LA_K ? place.of.sequence.T - first : 0;
    char* const to_q =
        own_rows(a.dq, place.of.sequence, place.of.head) + first * a.dq.token + channel * (LA_DQ == 2 ? 4 : 2);
    char* const to_k = own_rows(a.dk, place.of.sequence, place.of.head) + first * a.dk.token + channel * 2;
    const float4 u = BONUS && channel < LA_K
                         ? *(const float4*)(a.u + (u32)place.of.head / (u32)a.group_u * LA_K + channel)
                         : float4{};
    const float weights[PER] = {u.x, u.y, u.z, u.w};
    float later[PER] = {0.f, 0.f, 0.f, 0.f}, suf[PER] = {own.suf[0], own.suf[1], own.suf[2], own.suf[3]}, other[PER];
#pragma unroll
    for (int r = OWN - 1; r >= 0; r--) {
        RowGradients row;
        row_gradients(row, suf, pairs, own, r, a, place, me);
        const float both = BONUS || DIAGONAL_APART ? load_shared(me.shared + AT_OWN + (me.first + r) * 4) : 0.f;
#pragma unroll
        for (int c = 0; c < PER; c++) {
            if constexpr (DIAGONAL_APART) {
                row.dq[c] += both * own.k.at(r, c);
                row.dk[c] += both * own.q.at(r, c);
            }
            if constexpr (BONUS) {
                row.dq[c] += both * weights[c] * own.k.at(r, c);
                row.dk[c] += both * weights[c] * own.q.at(r, c);
                bonus[c] += both * own.q.at(r, c) * own.k.at(r, c);
            }
            db[r][c] = (BEFORE ? later[c] : later[c] + row.read[c]) - row.write[c];
            later[c] = BEFORE ? db[r][c] + row.read[c] : db[r][c];
            if constexpr (COMPLEMENT) db[r][c] -= own.a[r][c] * row.dk[c];
            if constexpr (EXACT_BLOCKS) suf[c] *= own.a[r][c];
        }
        if (r < left) {
            store_queries(to_q + r * a.dq.token, row.dq);
            if constexpr (!COMPLEMENT) store_copies(to_k + r * a.dk.token, row.dk);
        }
    }
    other_half(other, later);
#pragma unroll
    for (int c = 0; c < PER; c++) {
        const float upper = me.upper() ? 0.f : other[c];
        later[c] += other[c];
#pragma unroll
        for (int r = 0; r < OWN; r++) db[r][c] += upper;
    }
    if (!me.upper()) Table{me.shared + AT_SUMS}.store(me.warp, me.channel, later);
    if constexpr (EXACT_BLOCKS) add_given(db, me);
}

// dg of the lane's rows: db summed over the later slices and all that crosses the chunk's end; a token that forgets
// everything has none
LA_DEVICE void store_gates(const float (&db)[OWN][PER], const Own& own, const VectorGradArguments& a,
                           const ChunkPlace& place, const Lane& me) {
    float end[PER], x[PER];
    load_four(end, me.shared + AT_CROSSING + me.channel * 4);
#pragma unroll
    for (int s = SLICES - 1; s > 0; s--)
        if (s > me.warp) {
            Table{me.shared + AT_SUMS}.load(x, s, me.channel);
#pragma unroll
            for (int c = 0; c < PER; c++) end[c] += x[c];
        }
    if constexpr (EXACT_BLOCKS)   // of earlier slices; db has its own
        for (int s = 0; s < me.warp; s++) {
            Table{me.shared + AT_GIVEN_SUMS}.load(x, s, me.channel);
#pragma unroll
            for (int c = 0; c < PER; c++) end[c] += x[c];
        }
    const int first = place.chunk * C + me.first, channel = place.half * HALF + me.channel,
              left = channel < LA_K ? place.of.sequence.T - first : 0;
    char* const to =
        own_rows(a.dg, place.of.sequence, place.of.head) + first * a.dg.token + channel * (LA_GATE == 2 ? 4 : 2);
#pragma unroll
    for (int r = 0; r < OWN; r++) {
#pragma unroll
        for (int c = 0; c < PER; c++) x[c] = EXACT_BLOCKS && own.a[r][c] == 0.f ? 0.f : db[r][c] + end[c];
        if (r >= left) continue;
        if constexpr (LA_GATE == 2) *(float4*)(to + r * a.dg.token) = {x[0], x[1], x[2], x[3]};
        else store_copies(to + r * a.dg.token, x);
    }
}

// the slices' terms of du, as floats a chunk
LA_DEVICE void store_bonus(const float (&bonus)[PER], const VectorGradArguments& a, const ChunkPlace& place,
                           const Lane& me) {
    const Table table = {me.shared + AT_DOUT};
    float both[PER];
    other_half(both, bonus);
#pragma unroll
    for (int c = 0; c < PER; c++) both[c] += bonus[c];
    if (!me.upper()) table.store(me.warp, me.channel, both);
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
    const bool far = own.extend(me, place.of.sequence.T - place.chunk * C - me.warp / 2 * 16);
    own.copy(me);
    float x[8][4], erases[8][4], db[OWN][PER], bonus[PER] = {0.f, 0.f, 0.f, 0.f};
    if (multiply(x, erases, own, a, place, me, far, phase) && !EXACT_BLOCKS) return true;
    const Raw raw(me);
    if constexpr (EXACT_BLOCKS) raw.store(own, me);
    sum_blocks(x, erases, a.scale, me);
    if constexpr (ERASE && !EXACT_BLOCKS) {
        own.load_rows(own.q, a.q, place, me);
        own.load_rows(own.k, a.k, place, me);
    }
    __syncthreads();
    Pairs pairs;
    if constexpr (EXACT_BLOCKS) pairs.make(raw, own, me);
    store_rows_of(db, bonus, pairs, own, a, place, me);
    __syncthreads();
    store_gates(db, own, a, place, me);
    if constexpr (BONUS) store_bonus(bonus, a, place, me);
    return false;
}

#if LA_EXACT
// a few blocks that redo the chunks that the other build flagged
extern "C" __global__ void __launch_bounds__(THREADS, 1) grads(const __grid_constant__ VectorGradArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    u32* const flagged = (u32*)(memory + AT_FLAGGED);   // 32 items a warp
    const u32 shared = shared_address(memory), warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        barrier_init(shared + AT_BARRIER, 1);
        barriers_made();
    }
    int phase = 0;
    for (u32 round = blockIdx.x; round < a.items; round += THREADS * gridDim.x) {
        const u32 item = round + threadIdx.x * gridDim.x,
                  mask = __ballot_sync(0xffffffffu, item < a.items && a.flags[item]);
        if (threadIdx.x % 32 == 0) flagged[warp] = mask;
        __syncthreads();
        for (int w = 0; w < THREADS / 32; w++)
            for (u32 left = flagged[w]; left; left &= left - 1) {
                const Lane me(opaque(shared));   // no address is held over the loop
                gradients(a, ChunkPlace(a, round + (32 * w + __ffs(left) - 1) * gridDim.x), me, phase);
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
    if (place.chunk >= place.of.chunks()) {
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
