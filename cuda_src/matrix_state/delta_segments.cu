// From what segments do to the state to the state that each begins with: next = S M + added, in float32, sixteen rows a block.
//
//     forward   begin(s + 1) = begin(s) M_s + added(s), added(0) being begin(1) itself
//     reverse   the same for gradients from the last segment down, with M_s transposed
//
// The matrices do not wait for the states: each comes while the one before it is multiplied by.
#include "attention/delta.cuh"

constexpr int ROWS = 16, PARTS = WIDE / ROWS, MATRIX = STATE * 4;   // bytes of M
static_assert(LA_SHARED == 2 * MATRIX + WIDE * ROWS * 4, "LA_SHARED is what the launch asks for");

extern "C" __global__ void __launch_bounds__(256) segments(const __grid_constant__ DeltaArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    float* x = (float*)(memory + 2 * MATRIX);   // sixteen rows of S, column by column
    const u32 shared = shared_address(memory);
    const int column = (threadIdx.x & 63) * 2, four = (threadIdx.x >> 6) * 4, inner = a.segments - 1;
    const i64 slot = blockIdx.x / PARTS;
    const Sequence sequence = sequence_of(a.offsets, slot / a.heads, a.T);
    const int last = max((sequence.T + C - 1) / C - 1, 0) / a.chunks;
    const i64 place = (blockIdx.x % PARTS * ROWS + four) * WIDE + column;
    auto segment = [&](int n) { return LA_REVERSE ? last - n : n; };
    auto load = [&](int n) {   // M of step n
        const char* from = (const char*)((LA_REVERSE ? a.turned : a.transfers) + (slot * inner + segment(n)) * STATE);
        for (int i = threadIdx.x; i < MATRIX / 16; i += 256) copy_in<16>(shared + (n & 1) * MATRIX + i * 16, from + i * 16, true);
    };
    if (last > 1) load(1);
    copy_commit();
    for (int n = 0; n < last; n++) {
        // reverse: added(s) of segments 1 .. last lie at s - 1
        const int from = segment(n), to = LA_REVERSE ? from - 1 : from + 1;
        const float* added = a.added + (slot * inner + (LA_REVERSE ? from - 1 : from)) * STATE + place;
        float2 y[4];
#pragma unroll
        for (int r = 0; r < 4; r++) y[r] = *(const float2*)(added + r * WIDE);
        if (n) {
            copy_wait<0>();
            __syncthreads();   // M and the rows are there, and the other M has been read
            if (n + 1 < last) load(n + 1);
            copy_commit();
            const float* M = (const float*)(memory + (n & 1) * MATRIX) + column;
#pragma unroll 16
            for (int i = 0; i < WIDE; i++) {
                const float2 m = *(const float2*)(M + i * WIDE);
                const float4 z = *(const float4*)(x + i * ROWS + four);
                y[0].x += z.x * m.x; y[1].x += z.y * m.x; y[2].x += z.z * m.x; y[3].x += z.w * m.x;
                y[0].y += z.x * m.y; y[1].y += z.y * m.y; y[2].y += z.z * m.y; y[3].y += z.w * m.y;
            }
            __syncthreads();
        }
        float* begin = a.begins + (slot * a.segments + to) * STATE + place;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            *(float2*)(begin + r * WIDE) = y[r];
            x[column * ROWS + four + r] = y[r].x;
            x[(column + 1) * ROWS + four + r] = y[r].y;
        }
    }
    copy_wait<0>();
}
