// The largest |k_j| of every block of 128 keys of a head, which bounds logits (limit.cuh). Infinite where no keys can
// be skipped: gates above 0, or a sequence that decays too little. Sixteen lanes a row, of LA_K numbers.
#include "softmax/limit.cuh"
#include "softmax/owner.cuh"

constexpr int LANES = 16, PIECES = LA_K / 8, OWN = BLOCK * LANES / 256;   // rows of a lane
static_assert(PIECES <= LANES, "a piece of 16 bytes a lane");

// the largest |k_j| of a thread's rows of a block; `left` rows exist
LA_DEVICE float largest_norm(const char* rows, i64 stride, int left) {
    uint4 x[OWN];
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        const int row = threadIdx.x / LANES + n * (256 / LANES), piece = threadIdx.x % LANES;
        x[n] = {0, 0, 0, 0};
        if (row < left && piece < PIECES) x[n] = *(const uint4*)(rows + row * stride + piece * 16);
    }
    float most = 0.f;
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        float sum = add_squares(0.f, x[n]);
#pragma unroll
        for (int d = LANES / 2; d; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        most = max_or_nan(most, sum);
    }
    return sqrtf(most);
}
extern "C" __global__ void __launch_bounds__(256) norms(const __grid_constant__ GateArguments a) {
    __shared__ float warps[8];
    const int pairs = a.sequences * a.heads, pair = blockIdx.x % pairs, tile = blockIdx.x / pairs,
              lane = threadIdx.x & 31;
    const Owner owner(a, pair);
    const int left = owner.T - tile * BLOCK;
    if (left <= 0) return;
    const Decays* const sums = a.sums + owner.numbers(a);
    float most = -minus_infinity();
    if (weightless(0.f, sums[owner.T - 1], sums[0])) {
        const i64 head = (u32)owner.head / (u32)a.k.group, token = owner.first + tile * BLOCK;
        most = largest_norm(a.k.data + owner.batch * a.k.batch + token * a.k.token + head * a.k.head, a.k.token, left);
        const float* const g = (const float*)(owner.gates(a.g) + (tile * BLOCK + (i64)threadIdx.x) * a.g.token);
        if (threadIdx.x < min(left, BLOCK) && !(*g <= 0.f)) most = -minus_infinity();
    }
    most = warp_max_or_nan(most);
    if (lane == 0) warps[threadIdx.x >> 5] = most;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    most = warp_max_or_nan(warps[lane & 7]);
    if (lane == 0) a.norms[owner.slot(a, owner.head) + tile] = most;
}
