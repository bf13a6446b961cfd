// From what segments do to the state to the state that each begins with: next = S M + added, in float32, sixteen rows a block.
//
//     forward   begin(s + 1) = begin(s) M_s + added(s), added(0) being begin(1) itself
//     reverse   the same for gradients from the last segment down, with M_s transposed
//
// The matrices do not wait for the states: each comes while the one before it is multiplied by. Products are of three tf32 terms,
// lo hi + hi lo + hi hi, 2^-21 of their size; a warp has sixteen columns.
#include "attention/delta.cuh"

constexpr int ROWS = 16, PARTS = WIDE / ROWS;
constexpr int LINE = WIDE + 8, COLUMN = ROWS + 8, MATRIX = WIDE * LINE * 4;   // floats from row to row of M, from column to column of S: no two lanes meet
static_assert(LA_SHARED == 2 * MATRIX + WIDE * COLUMN * 4, "LA_SHARED is what the launch asks for");

// tiles (16 rows of S) x (this warp's columns of M)
LA_DEVICE void multiply_rows(float (&y)[2][4], const float* x, const float* M, int lane) {
    const int row = lane >> 2, k = lane & 3;
#pragma unroll 4
    for (int i = 0; i < WIDE; i += 8) {
        u32 a[4], less[4];
#pragma unroll
        for (int n = 0; n < 4; n++) split_tf32(x[(i + k + 4 * (n >> 1)) * COLUMN + row + 8 * (n & 1)], a[n], less[n]);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            u32 b[2], rest[2];
#pragma unroll
            for (int m = 0; m < 2; m++) split_tf32(M[(i + k + 4 * m) * LINE + 8 * n + row], b[m], rest[m]);
            mma_tf32(y[n], less[0], less[1], less[2], less[3], b[0], b[1]);
            mma_tf32(y[n], a[0], a[1], a[2], a[3], rest[0], rest[1]);
            mma_tf32(y[n], a[0], a[1], a[2], a[3], b[0], b[1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) segments(const __grid_constant__ DeltaArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    float* x = (float*)(memory + 2 * MATRIX);   // sixteen rows of S, column by column
    const u32 shared = shared_address(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, column = 16 * warp + (lane & 3) * 2, inner = a.segments - 1;
    const i64 slot = blockIdx.x / PARTS;
    const Sequence sequence = sequence_of(a.offsets, slot / a.heads, a.T);
    const int last = max((sequence.T + C - 1) / C - 1, 0) / a.chunks;
    const i64 place = (blockIdx.x % PARTS * ROWS + row) * WIDE + column;
    auto segment = [&](int n) { return LA_REVERSE ? last - n : n; };
    auto load = [&](int n) {   // M of step n
        const char* from = (const char*)((LA_REVERSE ? a.turned : a.transfers) + (slot * inner + segment(n)) * STATE);
        for (int i = threadIdx.x; i < STATE / 4; i += 256)
            copy_in<16>(shared + (n & 1) * MATRIX + (i / (WIDE / 4) * LINE + i % (WIDE / 4) * 4) * 4, from + i * 16, true);
    };
    if (last > 1) load(1);
    copy_commit();
    for (int n = 0; n < last; n++) {
        // reverse: added(s) of segments 1 .. last lie at s - 1
        const int from = segment(n), to = LA_REVERSE ? from - 1 : from + 1;
        const float* added = a.added + (slot * inner + (LA_REVERSE ? from - 1 : from)) * STATE + place;
        float y[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {   // tile i >> 1, rows row + 8 (i & 1)
            const float2 z = *(const float2*)(added + (i & 1) * 8 * WIDE + (i >> 1) * 8);
            y[i >> 1][2 * (i & 1)] = z.x;
            y[i >> 1][2 * (i & 1) + 1] = z.y;
        }
        if (n) {
            copy_wait<0>();
            __syncthreads();   // M and the rows are there, and the other M has been read
            if (n + 1 < last) load(n + 1);
            copy_commit();
            multiply_rows(y, x, (const float*)(memory + (n & 1) * MATRIX) + 16 * warp, lane);
            __syncthreads();
        }
        float* begin = a.begins + (slot * a.segments + to) * STATE + place;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 z = {y[i >> 1][2 * (i & 1)], y[i >> 1][2 * (i & 1) + 1]};
            *(float2*)(begin + (i & 1) * 8 * WIDE + (i >> 1) * 8) = z;
            float* to_row = x + (column + (i >> 1) * 8) * COLUMN + row + 8 * (i & 1);
            to_row[0] = z.x;
            to_row[COLUMN] = z.y;
        }
    }
    copy_wait<0>();
}
