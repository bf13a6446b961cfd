// The factors of a chunk of the delta rule that need no state, chunk by chunk in parallel: A, and e, d, b, beta
// (delta.cuh). With LA_UNIT the diagonal of the keys' gram matrix is their squared length without eps.
//
// One block of four warps a chunk and head. L and A take the place of the keys once these have been read, the diagonal
// blocks of L that of A until it is made; two warps invert these, two each.
#include "attention/inverse.cuh"

constexpr int AT_LOWER = 0, AT_CHECKPOINT = Square::SIZE;   // A, then e, d, b, beta, as they leave
constexpr int AT_ROOTS = AT_CHECKPOINT + CHECKPOINT, AT_RHO = AT_ROOTS + C * 4, AT_BARRIER = AT_RHO + C * 4;
static_assert(LA_SHARED == AT_BARRIER + 32 && AT_CHECKPOINT + Square::SIZE == Tokens::SIZE &&
                  4 * DIAGONAL <= Square::SIZE,
              "LA_SHARED is the size that the launch requests");
constexpr float SMALLEST = 1e-8f;   // of beta: its gradient divides by beta

// of tokens `token` (even) and the next, 0 past the end; STEPS: of steps, the first of its token
template <int STEPS> LA_DEVICE float2 two_of(const Gate& x, const DeltaTraversal& traversal, int token) {
    const float* p = x.data + traversal.sequence.row * x.batch + (traversal.sequence.first + token) / STEPS * x.token +
                     (u32)traversal.head / (u32)x.group * x.head;
    const int T = traversal.sequence.T;
    return {token < T && token % STEPS == 0 ? p[0] : 0.f, STEPS == 1 && token + 1 < T ? p[x.token] : 0.f};
}

// e, d, b, beta and the roots of beta, two tokens a lane of one warp
LA_DEVICE void sums_of_chunk(const DeltaArguments& a, const DeltaTraversal& traversal, float* e, float* roots,
                             int lane) {
    const int token = traversal.first * C + 2 * lane;
    float2 g = {0.f, 0.f}, beta = two_of<1>(a.beta, traversal, token);
    if (LA_DECAY) {
        g = two_of<LA_STEPS>(a.g, traversal, token);
        g = {log2_decay(g.x), log2_decay(g.y)};
    }
    beta = {beta.x < SMALLEST ? SMALLEST : beta.x, beta.y < SMALLEST ? SMALLEST : beta.y};   // NaN stays NaN
    const float second = prefix_sum(g.x + g.y, lane), before = __shfl_up_sync(0xffffffffu, second, 1);
    const float first = (lane ? before : 0.f) + g.x, last = __shfl_sync(0xffffffffu, second, 31);
    float* d = e + C;
    *(float2*)(e + 2 * lane) = {exp2_approx(fminf(first, 0.f)), exp2_approx(fminf(second, 0.f))};
    *(float2*)(d + 2 * lane) = {decay_between(last, first), decay_between(last, second)};
    *(float2*)(d + C + 2 * lane) = {first, second};
    *(float2*)((float*)((char*)e - AT_E + AT_BETA) + 2 * lane) = beta;
    *(float2*)(roots + 2 * lane) = {sqrtf(beta.x), sqrtf(beta.y)};
}

// by one thread: for all, the tokens of the chunk and where its checkpoint is; the copy of its keys begun
LA_DEVICE void begin_load(const DeltaArguments& a, const DeltaTraversal& traversal, u32 shared, int own) {
    const u32 barrier = shared + AT_BARRIER;
    store_shared_u32(barrier + 16, own);
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(barrier + 8),
                 "l"(a.checkpoints + (traversal.block + traversal.first) * CHECKPOINT)
                 : "memory");
    barrier_init(barrier, 1);
    barriers_made();
    if (own > 0) {
        barrier_expect(barrier, Tokens::SIZE);
        tile_in(shared, a.k, barrier, (u32)traversal.head / (u32)a.group_k, traversal.token(traversal.first),
                traversal.row);
    }
}
// by one thread, to where begin_load has said
LA_DEVICE void store_checkpoint(u32 shared) {
    char* to;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(to) : "r"(shared + AT_BARRIER + 8));
    run_out(to, shared + AT_CHECKPOINT, AT_QUERY);
    out_commit();
    out_read();
}

extern "C" __global__ void __launch_bounds__(128, 8) block(const __grid_constant__ DeltaArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory), barrier = shared + AT_BARRIER;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0),
              task = (warp + blockIdx.x) & 3;    // tasks rotate over the schedulers
    const int lane = opaque(threadIdx.x & 31);   // read once
    float *e = (float*)(memory + AT_CHECKPOINT + AT_E), *sums = (float*)(memory + AT_CHECKPOINT + AT_B),
          *roots = (float*)(memory + AT_ROOTS), *rhos = (float*)(memory + AT_RHO);
    float* lengths = (float*)(memory + AT_CHECKPOINT + AT_KEY);
    if (task == 0) {                                                  // only this one looks up where the chunk is
        const DeltaTraversal traversal(a, blockIdx.x, a.chunks, 1);   // each chunk a segment
        const int own = traversal.steps > 0 ? traversal.own(a, traversal.first) : 0;
        if (lane == 0) begin_load(a, traversal, shared, own);
        __syncwarp();
        group_barrier(0);
        if (own > 0) sums_of_chunk(a, traversal, e, roots, lane);
    } else group_barrier(0);
    if (a.offsets) {
        int own;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(own) : "r"(barrier + 16));
        if (own <= 0) return;
        barrier_wait(barrier, 0);
        if (own < C) {
            clear_rows<128, 2, 1>(shared, own, threadIdx.x);
            publish_shared();
            __syncthreads();
        }
    } else barrier_wait(barrier, 0);
    float x[8][4];
    key_gram(x, shared);
#if LA_UNIT
    store_lengths(x, lengths, a.eps, warp, lane);
#endif
    __syncthreads();   // keys have been read; sums are there
#if LA_UNIT
    e[threadIdx.x] *= lengths[threadIdx.x % C];   // and d behind it
#endif
    store_lower(x, shared + AT_LOWER, (float*)(memory + AT_CHECKPOINT + warp * DIAGONAL), roots, lengths, warp, lane);
    __syncthreads();
    if (((task ^ (blockIdx.x >> 2)) & 2) == 0) {
        const int number = 2 * (task & 1) + (lane >> 4);
        const float* diagonal = (const float*)(memory + AT_CHECKPOINT + number * DIAGONAL);
        invert_diagonal(shared + AT_LOWER, diagonal, number, lane);
        store_rho(rhos, diagonal, sums, roots, number, lane);
    }
    __syncthreads();
    store_inverse(shared + AT_LOWER, shared + AT_CHECKPOINT, rhos, sums, roots, task, lane);
    publish_shared();
    __syncthreads();
    if (threadIdx.x == 0) store_checkpoint(shared);
}
