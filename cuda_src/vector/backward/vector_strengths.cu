// The gradient of beta, from sums that the other kernels have left: dbeta_i = (dW_i.v_i + r_i.k_i) / beta_i, with beta
// not below the smallest that A was made with.
#include "arguments/matrix_state/VectorStrengthArguments.cuh"
#include "vector/backward/place.cuh"

constexpr float SMALLEST_BETA = 1e-8f;

// 64 threads a chunk of a head
extern "C" __global__ void __launch_bounds__(256) strengths(const __grid_constant__ VectorStrengthArguments a) {
    const u32 item = blockIdx.x * 4 + threadIdx.x / C, row = threadIdx.x % C;
    if (item >= a.items) return;
    const VectorPlace place(a.offsets, a.T, a.heads, a.slots, item / a.heads / a.chunks, item % a.heads);
    const int chunk = item / a.heads % a.chunks, token = chunk * C + row;
    if (token >= place.sequence.T) return;
    const float* parts = (const float*)(a.ends + (place.block + chunk) * LA_ENDS + LA_END) + row;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < round_up(LA_V, 64) / 16; w++) sum += parts[w * C];
    const i64 index = place.sequence.index + token;
#pragma unroll
    for (int h = 0; h < round_up(LA_K, 64) / 64; h++)
        sum += a.erase_dots[(h * (i64)a.heads + place.head) * a.tokens + index];
    const float beta = a.beta.data[place.row * a.beta.batch + (place.sequence.first + token) * a.beta.token +
                                   (u32)place.head / (u32)a.beta.group * a.beta.head];
    a.dbeta[index * a.heads + place.head] = sum / fmaxf(beta, SMALLEST_BETA);
}
