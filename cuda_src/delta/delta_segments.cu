// From what segments do to the state to the state that each begins with: next = S M + added, in float32, sixteen rows a block.
//
//     forward   begin(s + 1) = begin(s) M_s + added(s), added(0) being begin(1) itself
//     reverse   the same for gradients from the last segment down, with M_s transposed
//
// M is diag(d) + R, R in bfloat16 (tile/transfer.cuh). With S in two terms of bfloat16, lo + hi = S to 2^-17 of its size,
//
//     next = added + S d + lo R + hi R
//
// where S d is a product of float32 registers. One copy brings a matrix, one more the rows of `added`, several steps ahead: M is in
// registers before the state that it multiplies is there. A warp has sixteen columns.
#include "attention/delta.cuh"
#include "tile/transfer.cuh"

typedef Transfer::Rest Rest;
constexpr int ROWS = 16, PARTS = WIDE / ROWS, WARPS = WIDE / 16, THREADS = 32 * WARPS, MATRICES = 5, OFFSETS = 2;   // matrices, offsets in flight
constexpr int ROW = WIDE * 2 + 16, PLANE = ROWS * ROW, ADDED = ROWS * WIDE * 4;   // bytes of a row of S and of a term; of rows of `added`
constexpr int AT_ADDED = MATRICES * Transfer::BYTES, AT_ROWS = AT_ADDED + OFFSETS * ADDED, AT_BARRIERS = AT_ROWS + 4 * PLANE;
static_assert(LA_SHARED == AT_BARRIERS + 64 && Transfer::WIDTH == WIDE, "LA_SHARED is what the launch asks for");
static_assert(8 * (MATRICES + OFFSETS) <= 64, "the barriers fit");

// R of this warp's sixteen columns, of each sixteen rows; reverse: of R^T
LA_DEVICE void load_rest(u32 (&b)[WIDE / 16][4], u32 rest, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < WIDE / 16; i++) {
        if (LA_REVERSE) load_matrix(b[i], rest + Rest::block_piece(16 * warp, 2 * i, (lane & 7) | ((lane >> 4) << 3), (lane >> 3) & 1));
        else load_matrix_transposed(b[i], rest + Rest::block_piece(16 * i, 2 * warp, lane & 15, lane >> 4));
    }
}
// y += x R for sixteen rows; the two terms apart, so that products wait less for one another
LA_DEVICE void multiply_rows(float (&y)[2][4], u32 x, const u32 (&b)[WIDE / 16][4], int lane) {
    float less[2][4] = {};
    x += (lane & 15) * ROW + (lane >> 4) * 16;
#pragma unroll
    for (int i = 0; i < WIDE / 16; i++) {
        const u32 left[2] = {b[i][0], b[i][1]}, right[2] = {b[i][2], b[i][3]};   // eight columns each
        u32 hi[4], lo[4];
        load_matrix(hi, x + i * 32);
        load_matrix(lo, x + i * 32 + PLANE);
        mma_bf16(less[0], lo, left);
        mma_bf16(less[1], lo, right);
        mma_bf16(y[0], hi, left);
        mma_bf16(y[1], hi, right);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) y[i >> 2][i & 3] += less[i >> 2][i & 3];
}

// Two numbers of the next S in two terms
LA_DEVICE void store_terms(u32 to, float2 z) {
    const u32 hi = pack_bf16(z.x, z.y), lo = pack_bf16(z.x - low_bf16(hi), z.y - high_bf16(hi));
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(hi) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + PLANE), "r"(lo) : "memory");
}

// What a block reads of a sequence and head, by the copy engine, step by step: offsets from step 0 on, matrices from step 1 on
struct Steps {
    const DeltaArguments& a;
    u32 shared;
    i64 slot;
    int first, last;   // of its rows; number of steps

    __device__ __forceinline__ u32 full(int n) const { return shared + AT_BARRIERS + (n - 1) % MATRICES * 8; }   // M of step n
    __device__ __forceinline__ u32 offset_full(int n) const { return shared + AT_BARRIERS + (MATRICES + n % OFFSETS) * 8; }
    __device__ __forceinline__ static int matrix_at(int n) { return (n - 1) % MATRICES * Transfer::BYTES; }
    __device__ __forceinline__ static int added_at(int n) { return AT_ADDED + n % OFFSETS * ADDED; }
    __device__ __forceinline__ void wait_matrix(int n) const { barrier_wait(full(n), (n - 1) / MATRICES & 1); }
    __device__ __forceinline__ void wait_added(int n) const { barrier_wait(offset_full(n), n / OFFSETS & 1); }

    __device__ __forceinline__ int segment(int n) const { return LA_REVERSE ? last - n : n; }
    __device__ __forceinline__ void copy_matrix(int n) const {
        if (n >= last) return;
        barrier_expect(full(n), Transfer::BYTES);
        run_in(shared + matrix_at(n), a.transfers + (slot * (a.segments - 1) + segment(n)) * Transfer::BYTES, Transfer::BYTES, full(n));
    }
    __device__ __forceinline__ void copy_added(int n) const {   // reverse: added(s) of segments 1 .. last are at s - 1
        if (n >= last) return;
        barrier_expect(offset_full(n), ADDED);
        run_in(shared + added_at(n), a.added + (slot * (a.segments - 1) + segment(n) - LA_REVERSE) * STATE + first * WIDE, ADDED, offset_full(n));
    }
    __device__ __forceinline__ void begin() const {   // by one thread
        for (int s = 0; s < MATRICES + OFFSETS; s++) barrier_init(shared + AT_BARRIERS + 8 * s, 1);
        barriers_made();
        for (int n = 0; n < OFFSETS; n++) copy_added(n);
        for (int n = 1; n <= MATRICES; n++) copy_matrix(n);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) segments(const __grid_constant__ DeltaArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, column = 16 * warp + (lane & 3) * 2;
    const i64 slot = blockIdx.x / PARTS;
    const Sequence sequence = sequence_of(a.offsets, slot / a.heads, a.T);
    const Steps steps = {a, shared_address(memory), slot, (int)(blockIdx.x % PARTS) * ROWS, max((sequence.T + C - 1) / C - 1, 0) / a.chunks};
    if (steps.last == 0) return;
    if (threadIdx.x == 0) steps.begin();
    __syncthreads();
    auto rows = [&](int n) { return steps.shared + AT_ROWS + (n & 1) * 2 * PLANE; };   // terms of S after step n
    float S[2][4] = {};
    for (int n = 0; n < steps.last; n++) {
        float y[2][4];
        steps.wait_added(n);
        const float* added = (const float*)(memory + Steps::added_at(n)) + row * WIDE + column;
#pragma unroll
        for (int i = 0; i < 4; i++) {   // columns 8 (i / 2), rows row + 8 (i % 2)
            const float2 z = pair_at(added, (i >> 1) * 8 + (i & 1) * 8 * WIDE);
            y[i >> 1][2 * (i & 1)] = z.x;
            y[i >> 1][2 * (i & 1) + 1] = z.y;
        }
        u32 b[WIDE / 16][4];
        if (n) {
            steps.wait_matrix(n);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 d = pair_at((const float*)(memory + Steps::matrix_at(n)), column + 8 * i);
                y[i][0] += S[i][0] * d.x; y[i][1] += S[i][1] * d.y; y[i][2] += S[i][2] * d.x; y[i][3] += S[i][3] * d.y;
            }
            load_rest(b, steps.shared + Steps::matrix_at(n) + Transfer::AT_REST, warp, lane);
        }
        __syncthreads();   // the terms of S are there; M and `added` have been read
        if (threadIdx.x == 0) {
            steps.copy_added(n + OFFSETS);
            if (n) steps.copy_matrix(n + MATRICES);
        }
        if (n) multiply_rows(y, rows(n - 1), b, lane);
        float* begin = a.begins + (slot * a.segments + steps.segment(n) + (LA_REVERSE ? -1 : 1)) * STATE + (steps.first + row) * WIDE + column;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 z = {y[i >> 1][2 * (i & 1)], y[i >> 1][2 * (i & 1) + 1]};
            *(float2*)(begin + (i >> 1) * 8 + (i & 1) * 8 * WIDE) = z;
            store_terms(rows(n) + (row + 8 * (i & 1)) * ROW + (column + (i >> 1) * 8) * 2, z);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) S[i >> 2][i & 3] = y[i >> 2][i & 3];
    }
}
