// From what segments do to the state to the state that each begins with: next = S M + added, in float32, sixteen rows a block.
//
//     forward   begin(s + 1) = begin(s) M_s + added(s), added(0) being begin(1) itself
//     reverse   the same for gradients from the last segment down, with M_s transposed
//
// The matrices do not wait for the states: each comes while the two before it are multiplied by. Products are of three terms in bfloat16,
// lo hi + hi lo + hi hi, 2^-16 of their size: M itself is of products of rounded operands. A warp has sixteen columns.
#include "attention/delta.cuh"

constexpr int ROWS = 16, PARTS = WIDE / ROWS, WARPS = 8, THREADS = 32 * WARPS, MATRICES = 3;
constexpr int LINE = WIDE + 4, MATRIX = WIDE * LINE * 4;             // numbers from row to row of M: no two lanes meet
constexpr int ROW = WIDE * 2 + 16, PLANE = ROWS * ROW, AT_ROWS = MATRICES * MATRIX;   // bytes of a row of S; of a term
static_assert(LA_SHARED == AT_ROWS + 2 * PLANE, "LA_SHARED is what the launch asks for");

struct Terms { u32 hi, lo; };   // of two numbers
LA_DEVICE Terms terms_of(float x, float y) {
    const u32 hi = pack_bf16(x, y);
    return {hi, pack_bf16(x - low_bf16(hi), y - high_bf16(hi))};
}

// y += x M for sixteen rows and this warp's columns; the three terms apart, so that products wait less for one another
LA_DEVICE void multiply_rows(float (&y)[2][4], u32 x, const float* M, int lane) {
    float less[2][4] = {}, rest[2][4] = {};
    x += (lane & 15) * ROW + (lane >> 4) * 16;
    M += (lane & 3) * 2 * LINE + (lane >> 2);
#pragma unroll
    for (int i = 0; i < WIDE; i += 16) {
        u32 hi[4], lo[4];
        load_matrix(hi, x + i * 2);
        load_matrix(lo, x + i * 2 + PLANE);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const float* m = M + i * LINE + 8 * t;
            const Terms b[2] = {terms_of(m[0], m[LINE]), terms_of(m[8 * LINE], m[9 * LINE])};
            const u32 large[2] = {b[0].hi, b[1].hi}, small[2] = {b[0].lo, b[1].lo};
            mma_bf16(less[t], lo, large);
            mma_bf16(rest[t], hi, small);
            mma_bf16(y[t], hi, large);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) y[i >> 2][i & 3] += less[i >> 2][i & 3] + rest[i >> 2][i & 3];
}

extern "C" __global__ void __launch_bounds__(THREADS) segments(const __grid_constant__ DeltaArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, column = 16 * warp + (lane & 3) * 2, inner = a.segments - 1;
    const i64 slot = blockIdx.x / PARTS;
    const Sequence sequence = sequence_of(a.offsets, slot / a.heads, a.T);
    const int last = max((sequence.T + C - 1) / C - 1, 0) / a.chunks;
    const i64 place = (blockIdx.x % PARTS * ROWS + row) * WIDE + column;
    auto segment = [&](int n) { return LA_REVERSE ? last - n : n; };
    auto load = [&](int n) {   // M of step n, a row a warp
        if (n < last) {
            const float* from = (LA_REVERSE ? a.transposed : a.transfers) + (slot * inner + segment(n)) * STATE + threadIdx.x * 4;
            const u32 to = shared + n % MATRICES * MATRIX + (warp * LINE + lane * 4) * 4;
#pragma unroll
            for (int i = 0; i < WIDE; i += WARPS) copy_in<16>(to + i * LINE * 4, (const char*)(from + i * WIDE), true);
        }
        copy_commit();
    };
    float next[2][4];
    auto load_added = [&](int n) {   // reverse: added(s) of segments 1 .. last are at s - 1
        const float* added = a.added + (slot * inner + segment(n) - LA_REVERSE) * STATE + place;
#pragma unroll
        for (int i = 0; i < 4; i++) {   // columns 8 (i / 2), rows row + 8 (i % 2)
            const float2 z = *(const float2*)(added + (i >> 1) * 8 + (i & 1) * 8 * WIDE);
            next[i >> 1][2 * (i & 1)] = z.x;
            next[i >> 1][2 * (i & 1) + 1] = z.y;
        }
    };
    if (last > 0) load_added(0);
    load(1);
    load(2);
    for (int n = 0; n < last; n++) {
        float y[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) y[i >> 2][i & 3] = next[i >> 2][i & 3];
        if (n + 1 < last) load_added(n + 1);
        if (n) {
            copy_wait<1>();
            __syncthreads();   // M and the rows are there, and the M before it has been read
            load(n + 2);
            multiply_rows(y, shared + AT_ROWS, (const float*)(memory + n % MATRICES * MATRIX) + 16 * warp, lane);
            __syncthreads();
        }
        float* begin = a.begins + (slot * a.segments + segment(n) + (LA_REVERSE ? -1 : 1)) * STATE + place;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 z = {y[i >> 1][2 * (i & 1)], y[i >> 1][2 * (i & 1) + 1]};
            *(float2*)(begin + (i >> 1) * 8 + (i & 1) * 8 * WIDE) = z;
            const Terms x = terms_of(z.x, z.y);
            const u32 there = shared + AT_ROWS + (row + 8 * (i & 1)) * ROW + (column + (i >> 1) * 8) * 2;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(there), "r"(x.hi) : "memory");
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(there + PLANE), "r"(x.lo) : "memory");
        }
    }
    copy_wait<0>();
}
