// From the offset of each segment of a sequence to the state with which each segment begins, in place, element by
// element:
//
//     S_begin(first) = S_0          S_begin(next) = 2^sum S_begin + added
#include "arguments/matrix_state/SegmentsArguments.cuh"
#include "attention/state.cuh"
#include "attention/decay.cuh"
#include "attention/tokens.cuh"

extern "C" __global__ void __launch_bounds__(256) segments(const __grid_constant__ SegmentsArguments a) {
    const i64 slot = blockIdx.x / a.blocks, element = (i64)(blockIdx.x % a.blocks) * 256 + threadIdx.x;
    if (element >= a.elements) return;
    const Sequence s = sequence_of(a.offsets, slot / a.heads, a.T);
    const int total = (s.T + LA_C - 1) / LA_C, used = max((total + a.chunks - 1) / a.chunks, 1);
    const i64 row = element / a.columns, column = element % a.columns;
    float S = a.start.data
                  ? a.start.data[slot / a.start_group * a.start.slot + row * a.start.row + column * a.start.column]
                  : 0.f;
    float* p = a.states.data + slot * a.segments * a.states.slot + row * a.states.row + column * a.states.column;
    constexpr int TOGETHER = 8;   // loads in flight
    for (int n0 = 0; n0 < used; n0 += TOGETHER) {
        float added[TOGETHER], carry[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const int n = n0 + i, segment = LA_REVERSE ? used - 1 - n : n;
            const bool needed = n < used - 1;   // the last offset is not
            added[i] = needed ? p[segment * a.states.slot] : 0.f;
            carry[i] = needed ? a.sums[slot * a.segments + segment] : 0.f;
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const int n = n0 + i, segment = LA_REVERSE ? used - 1 - n : n;
            if (n >= used) break;
            p[segment * a.states.slot] = S;
            S = S * exp2_approx(carry[i]) + added[i];
        }
    }
}
