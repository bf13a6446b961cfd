// The gradient of the log decays of scan.cu's passes, by blocks of LA_MARK tokens that begin at token b:
//
//     dg_t = <S_{b-1}, dS_{b-1}> + sum over b <= j < t of (<k_j, dk_j> - <q_j, dq_j>)
//
// with the token's own write left out of both dots, or in both (scan.cu: STRICT): it is the same number there. These are
// all pairs of a writer before t and a reader from t on. At a token that forgets everything (e^g = 0 in float32) there
// are none: the sum is 0 and starts anew. Every term crosses at least one g, the cotangent of the final state too.
#include "arguments/matrix_state/GateGradArguments.cuh"
#include "attention/decay.cuh"
#include "attention/tokens.cuh"

constexpr int BLOCK = LA_MARK, EACH = BLOCK / 32;   // tokens of a block; rounds of 32

extern "C" __global__ void __launch_bounds__(128) gate_grad(const __grid_constant__ GateGradArguments a) {
    const int lane = threadIdx.x & 31;
    const i64 block =
        (i64)blockIdx.x * 4 + (threadIdx.x >> 5);   // heads fastest: neighbours write neighbouring numbers
    if (block >= a.blocks) return;
    const int head = block % a.heads, mark = block / a.heads % a.marks;
    const i64 n = block / a.heads / a.marks;
    const Sequence s = sequence_of(a.offsets, n, a.T);
    const int first = mark * BLOCK;
    if (first >= s.T) return;
    float crossing = 0.f;   // of the pairs that cross from the tokens before this round into it
    const float* products = a.products + ((n * a.heads + head) * a.marks + mark) * (i64)(a.parts * a.warps);
    for (int i = 0; i < a.parts * a.warps; i++) crossing += products[i];
    const float* g = a.g.data + s.row * a.g.batch + s.first * a.g.token + (u32)head / (u32)a.g.group * a.g.head;
#pragma unroll
    for (int round = 0; round < EACH; round++) {
        const int t = first + round * 32 + lane;
        const i64 at = s.index + t;
        float sum = 0.f;
        bool reset = false;
        if (t < s.T) {
            reset = log2_decay(g[t * a.g.token]) <= FLOOR_LOG2;
            for (int part = 0; part < a.parts; part++) {
                const i64 i = ((i64)part * a.heads + head) * a.tokens + at;
                sum += a.write_dots[i] - a.read_dots[i];
            }
        }
        bool hidden = reset;   // a reset from which `sum` begins hides earlier terms
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const float y = __shfl_up_sync(0xffffffffu, sum, d);
            const int h = __shfl_up_sync(0xffffffffu, (int)hidden, d);
            if (lane >= d && !hidden) sum += y, hidden = h;
        }
        if (!hidden) sum += crossing;
        const float before = __shfl_up_sync(0xffffffffu, sum, 1);
        if (t < s.T) a.dg[at * a.heads + head] = reset ? 0.f : lane ? before : crossing;
        crossing = __shfl_sync(0xffffffffu, sum, 31);
    }
}
