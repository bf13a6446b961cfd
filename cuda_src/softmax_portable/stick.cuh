// Stick-breaking attention by products of warps: blocks of N queries meet tiles of N keys.
//
//     y_tj = scale log2(e) q_t.k_j,   rest_tj = log2(1 + 2^y_tj),   left_tj = sum_{j < i < t} rest_ti
//     s_tj = 2^(y_tj - rest_tj),      a_tj = 2^(y_tj - rest_tj - left_tj),      out_t = sum_j a_tj v_j
//
// Keys come from the newest on. Once all queries of a block have less than 2^-127 left their shares are exactly 0, and
// the block ends. With attend_current j and i go up to t.
#pragma once
#include "softmax_portable/portable.cuh"

#include "arguments/softmax/StickArguments.cuh"

constexpr int N = LA_ROWS, WARPS = N / 16, THREADS = 32 * WARPS;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float NOTHING = 127.f;   // left: no share is more than 0
typedef Tile<WIDTH_K, BYTES> KeyTile;
typedef Tile<WIDTH_V, BYTES> ValueTile;
constexpr int AT_SECOND = N * KeyTile::ROW,
              PAIR =
                  AT_SECOND + N * ValueTile::ROW;   // rows of K and V numbers: keys and values, queries and cotangents

// A lane's two rows of a block of queries
struct Rows16 {
    const PortableArguments& a;
    const Owner& own;
    const int lane, row0, i0;
    float left[2];   // minus log2 of the rest

    __device__ __forceinline__ Rows16(const PortableArguments& a, const Owner& own, int i0)
        : a(a), own(own), lane(threadIdx.x & 31), row0((threadIdx.x >> 5) * 16), i0(i0) {
#pragma unroll
        for (int h = 0; h < 2; h++) left[h] = query(h) < own.T ? 0.f : NOTHING;
    }
    __device__ __forceinline__ int query(int h) const { return i0 + row0 + (lane >> 2) + 8 * h; }
    __device__ __forceinline__ bool is_over() const { return left[0] >= NOTHING && left[1] >= NOTHING; }

    // log2 of s and rest of a score
    __device__ __forceinline__ void logs(float score, int h, int j, float& share, float& rest) const {
        const bool reads = query(h) < own.T && query(h) - j >= a.causal - 1;
        const float y = score * (a.scale * LOG2_E), t = log1pf(exp2_approx(-fabsf(y))) * LOG2_E;
        share = reads ? fminf(y, 0.f) - t : minus_infinity();
        rest = reads ? fmaxf(y, 0.f) + t : 0.f;
    }
    // (1 - s) G - s before. In 16 bits x is s; in float32 log2 s, from which 1 - s has all its digits as s goes to 1
    __device__ __forceinline__ static float share_or_log(float log_share) {
        return Element::EXACT ? log_share : exp2_approx(log_share);
    }
    __device__ __forceinline__ static float gradient(float x, float g, float before) {
        return Element::EXACT ? -expm1f(x * LN_2) * g - exp2_approx(x) * before : g - x * (before + g);
    }
    // of a tile of keys from j0 on: scores become s, in float32 log2 s, and shares a; left moves past it
    __device__ __forceinline__ void take(float (&s)[N / 8][4], float (&shares)[N / 8][4], int j0) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = 0.f;   // of the later keys of the tile
#pragma unroll
            for (int n = N / 8 - 1; n >= 0; n--) {
                const int j = j0 + n * 8 + (lane & 3) * 2;
                float &x = s[n][2 * h], &y = s[n][2 * h + 1], share[2], rest[2];
                logs(x, h, j, share[0], rest[0]);
                logs(y, h, j + 1, share[1], rest[1]);
                const float pair = rest[0] + rest[1], next = __shfl_xor_sync(0xffffffffu, pair, 1), both = pair + next;
                const float after = __shfl_xor_sync(0xffffffffu, both, 2);
                const float taken = sum + ((lane & 1 ? 0.f : next) + (lane & 2 ? 0.f : after));
                shares[n][2 * h + 1] = exp2_approx(share[1] - (left[h] + taken));
                shares[n][2 * h] = exp2_approx(share[0] - (left[h] + (taken + rest[1])));
                x = share_or_log(share[0]);
                y = share_or_log(share[1]);
                sum += both + after;
            }
            left[h] += sum;
        }
    }
    // dz = (1 - s) G - s sum_{i < j} G_ti in the place of s or log2 s, G = shares times dout.v; earlier: the sums
    // before the tile, moved past it
    __device__ __forceinline__ void give(float (&s)[N / 8][4], const float (&shares)[N / 8][4],
                                         const float (&dp)[N / 8][4], float (&earlier)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = 0.f;
#pragma unroll
            for (int n = 0; n < N / 8; n++) {
                const float g = shares[n][2 * h] * dp[n][2 * h], f = shares[n][2 * h + 1] * dp[n][2 * h + 1];
                const float pair = g + f, next = __shfl_xor_sync(0xffffffffu, pair, 1), both = pair + next;
                const float other = __shfl_xor_sync(0xffffffffu, both, 2);
                const float before = earlier[h] + (sum + ((lane & 1 ? next : 0.f) + (lane & 2 ? other : 0.f)));
                s[n][2 * h] = gradient(s[n][2 * h], g, before);
                s[n][2 * h + 1] = gradient(s[n][2 * h + 1], f, before + g);
                sum += both + other;
            }
            earlier[h] += sum;
        }
    }
};
// the newest tile of keys that a block of queries reads, 0 if it reads none
LA_DEVICE int newest_tile(const PortableArguments& a, const Owner& own, int i0) {
    return max(min(i0 + N, own.T) - a.causal, 0) / N * N;
}
// where the sums before a tile of keys are stored: (pairs of the launch, tiles, tokens), left and earlier
LA_DEVICE float2* mark_of(const StickArguments& s, int pair, int j0, int t) {
    return (float2*)s.marks + ((i64)pair * s.tiles + j0 / N) * (s.tiles * N) + t;
}
