// From what segments do to the state to the state that each begins with: next = S M + added, in float32, sixteen rows a block.
//
//     forward   begin(s + 1) = begin(s) M_s + added(s), added(0) being begin(1) itself
//     reverse   the same for gradients from the last segment down, with M_s transposed
//
// The matrices do not wait for the states: each comes while the one before it is multiplied by. Products are of three tf32 terms,
// lo hi + hi lo + hi hi, 2^-21 of their size; a warp has eight columns.
#include "attention/delta.cuh"

constexpr int ROWS = 16, PARTS = WIDE / ROWS, WARPS = 16, THREADS = 32 * WARPS;
constexpr int LINE = WIDE + 8, COLUMN = ROWS + 4, MATRIX = WIDE * LINE * 4;   // numbers from row to row of M, from column to column of S: no two lanes meet
static_assert(LA_SHARED == 2 * MATRIX + WIDE * COLUMN * 8, "LA_SHARED is what the launch asks for");

struct Terms { u32 hi, lo; };   // of a number of S
LA_DEVICE Terms terms_of(float x) {
    Terms r;
    split_tf32(x, r.hi, r.lo);
    return r;
}

// y += x M for sixteen rows and this warp's columns; the three terms apart, so that products wait less for one another
LA_DEVICE void multiply_rows(float (&y)[4], const Terms* x, const float* M, int lane) {
    const int row = lane >> 2, k = lane & 3;
    float less[4] = {}, rest[4] = {};
    x += k * COLUMN + row;
    M += k * LINE + row;
#pragma unroll 8
    for (int i = 0; i < WIDE; i += 8) {
        Terms a[4], b[2];
#pragma unroll
        for (int n = 0; n < 4; n++) a[n] = x[(i + 4 * (n >> 1)) * COLUMN + 8 * (n & 1)];
#pragma unroll
        for (int n = 0; n < 2; n++) b[n] = terms_of(M[(i + 4 * n) * LINE]);
        mma_tf32(less, a[0].lo, a[1].lo, a[2].lo, a[3].lo, b[0].hi, b[1].hi);
        mma_tf32(rest, a[0].hi, a[1].hi, a[2].hi, a[3].hi, b[0].lo, b[1].lo);
        mma_tf32(y, a[0].hi, a[1].hi, a[2].hi, a[3].hi, b[0].hi, b[1].hi);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] += less[i] + rest[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) segments(const __grid_constant__ DeltaArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Terms* x = (Terms*)(memory + 2 * MATRIX);   // sixteen rows of S, column by column
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, column = 8 * warp + (lane & 3) * 2, inner = a.segments - 1;
    const i64 slot = blockIdx.x / PARTS;
    const Sequence sequence = sequence_of(a.offsets, slot / a.heads, a.T);
    const int last = max((sequence.T + C - 1) / C - 1, 0) / a.chunks;
    const i64 place = (blockIdx.x % PARTS * ROWS + row) * WIDE + column;
    auto segment = [&](int n) { return LA_REVERSE ? last - n : n; };
    const u32 to = shared_address(memory) + (warp * LINE + lane * 4) * 4;
    auto load = [&](int n) {   // M of step n, a row a warp
        const float* from = (LA_REVERSE ? a.transposed : a.transfers) + (slot * inner + segment(n)) * STATE + threadIdx.x * 4;
#pragma unroll
        for (int i = 0; i < WIDE; i += WARPS) copy_in<16>(to + (n & 1) * MATRIX + i * LINE * 4, (const char*)(from + i * WIDE), true);
    };
    float next[4];
    auto load_added = [&](int n) {   // reverse: added(s) of segments 1 .. last are at s - 1
        const float* added = a.added + (slot * inner + segment(n) - LA_REVERSE) * STATE + place;
#pragma unroll
        for (int i = 0; i < 2; i++) {   // rows row + 8 i
            const float2 z = *(const float2*)(added + i * 8 * WIDE);
            next[2 * i] = z.x;
            next[2 * i + 1] = z.y;
        }
    };
    if (last > 1) load(1);
    copy_commit();
    if (last > 0) load_added(0);
    for (int n = 0; n < last; n++) {
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) y[i] = next[i];
        if (n + 1 < last) load_added(n + 1);
        if (n) {
            copy_wait<0>();
            __syncthreads();   // M and the rows are there, and the other M has been read
            if (n + 1 < last) load(n + 1);
            copy_commit();
            multiply_rows(y, x, (const float*)(memory + (n & 1) * MATRIX) + 8 * warp, lane);
            __syncthreads();
        }
        float* begin = a.begins + (slot * a.segments + segment(n) + (LA_REVERSE ? -1 : 1)) * STATE + place;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 z = {y[2 * i], y[2 * i + 1]};
            *(float2*)(begin + i * 8 * WIDE) = z;
            Terms* there = x + column * COLUMN + row + 8 * i;
            there[0] = terms_of(z.x);
            there[COLUMN] = terms_of(z.y);
        }
    }
    copy_wait<0>();
}
