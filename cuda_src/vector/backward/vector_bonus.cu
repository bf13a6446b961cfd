// The gradient of the bonus, summed over the chunks of all sequences in an order of their own: 32 channels of a head a
// block.
#include "arguments/matrix_state/VectorBonusArguments.cuh"
#include "vector/backward/place.cuh"

constexpr int CHANNELS = 32, PARTS = 8;   // of a block; chunks that are added up at once

extern "C" __global__ void __launch_bounds__(CHANNELS* PARTS) bonus(const __grid_constant__ VectorBonusArguments a) {
    __shared__ float sums[PARTS][CHANNELS];
    constexpr int BLOCKS = (LA_K + CHANNELS - 1) / CHANNELS;
    const int head = blockIdx.x / BLOCKS, lane = threadIdx.x % CHANNELS, part = threadIdx.x / CHANNELS;
    const int channel = blockIdx.x % BLOCKS * CHANNELS + lane;
    float sum = 0.f;
    for (int n = 0; n < a.sequences; n++) {
        const VectorPlace place(a.offsets, a.T, a.heads, a.slots, n, head);
        for (int chunk = part; chunk < place.chunks(); chunk += PARTS)
            if (channel < LA_K) sum += a.parts[(place.block + chunk) * LA_K + channel];
    }
    sums[part][lane] = sum;
    __syncthreads();
    if (part > 0 || channel >= LA_K) return;
#pragma unroll
    for (int i = 1; i < PARTS; i++) sum += sums[i][lane];
    a.du[(i64)head * LA_K + channel] = sum;
}
