// From what each segment of a sequence adds to the state with which each segment begins, in place, element by element:
//
//     S_begin(first) = S_0          S_begin(next) = 2^sum S_begin + added
#include "attention/state.cuh"
#include "attention/decay.cuh"
#include "attention/tokens.cuh"

struct Arguments {
    States states, start;        // start: S_0, one a start_group heads, or null
    i64 start_group;
    const float* sums;           // log2 decay of each segment
    const i64* offsets;
    i64 elements;                // of a state: rows x columns
    int T, heads, segments, chunks, columns, blocks;   // blocks: of a state
};

extern "C" __global__ void __launch_bounds__(256) segments(const __grid_constant__ Arguments a) {
    const i64 slot = blockIdx.x / a.blocks, element = (i64)(blockIdx.x % a.blocks) * 256 + threadIdx.x;
    if (element >= a.elements) return;
    const Sequence s = sequence_of(a.offsets, slot / a.heads, a.T);
    const int total = (s.T + LA_C - 1) / LA_C, used = max((total + a.chunks - 1) / a.chunks, 1);
    const i64 row = element / a.columns, column = element % a.columns;
    float S = a.start.data ? a.start.data[slot / a.start_group * a.start.slot + row * a.start.row + column * a.start.column] : 0.f;
    float* p = a.states.data + slot * a.segments * a.states.slot + row * a.states.row + column * a.states.column;
    for (int n = 0; n < used; n++) {
        const int segment = LA_REVERSE ? used - 1 - n : n;
        const bool final = n == used - 1;
        const float added = final ? 0.f : p[segment * a.states.slot];
        const float carry = final ? 0.f : exp2_approx(a.sums[slot * a.segments + segment]);
        p[segment * a.states.slot] = S;
        S = S * carry + added;
    }
}
