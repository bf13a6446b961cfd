// For delta_scan_grads.cu: the chunk's products that every piece of the keys needs; and the gate's gradient.
#pragma once
#include "arguments/matrix_state/DeltaGradArguments.cuh"
#include "attention/delta_scan.cuh"

constexpr int C = LA_C, K = LA_K, V = LA_V, WARPS = LA_WARPS, THREADS = 32 * WARPS, ROWS = C / 16,
              GROUPS = WARPS / ROWS;
constexpr int KP = round_up(K, 16), VP = round_up(V, 16);
typedef Tile<VP, Element::BYTES> Values;
typedef Tile<C, Element::GRAM_BYTES> Gram;
// shared memory: dout, dv, U whole, Z and Y, sums of decays, beta, gates, the parts of db of each group
constexpr int AT_DOUT = 0, AT_DV = AT_DOUT + C * Values::ROW, AT_U = AT_DV + C * Values::ROW,
              AT_Z = AT_U + C * Values::ROW;
constexpr int AT_Y = AT_Z + C * Gram::ROW, AT_DECAY = AT_Y + C * Gram::ROW, AT_BETAS = AT_DECAY + Decay<C>::FLOATS * 4;
constexpr int AT_GATES = AT_BETAS + C * 4, AT_DOTS = AT_GATES + C * 4, AT_SMALL_END = AT_DOTS + GROUPS * 3 * C * 4 + 64;
static_assert(WARPS % ROWS == 0 && WARPS <= 16, "warps are whole columns of row blocks");

LA_DEVICE void load_writes(const DeltaGradArguments& a, const Traversal<C, 1, false>& traversal, u32 shared, int token,
                           int thread) {
    const Sequence& s = traversal.sequence;
    load_rows<Values, C, THREADS, V>(shared + AT_DOUT, rows_of(a.dout, s, traversal.head), a.dout.token, token, s.T, 0,
                                     thread);
    load_rows<Values, C, THREADS, V>(shared + AT_U, rows_of(a.new_values, s, traversal.head), a.new_values.token, token,
                                     s.T, 0, thread);
    load_rows<Values, C, THREADS, V>(shared + AT_DV, rows_of(a.dv, s, traversal.head), a.dv.token, token, s.T, 0,
                                     thread);
    load_gates<C, THREADS>(shared + AT_GATES, traversal.gates(a.g), a.g.token, token, s.T, thread);
    for (int i = thread; i < C; i += THREADS) {
        const float beta = token + i < s.T ? betas_of(a.beta, s, traversal.head)[(token + i) * a.beta.token] : 0.f;
        store_shared(shared + AT_BETAS + i * 4, beta < SMALLEST ? SMALLEST : beta);   // NaN stays NaN
    }
}

// two neighbouring elements of a tile
template <class E, class X> LA_DEVICE void store_pair(u32 base, int row, int column, float x, float y) {
    if constexpr (X::BYTES == 2) store_shared_u32(base + X::at(row, column), E::pair(x, y));
    else store_shared2(base + X::at(row, column), x, y);
}
// Row block `block` of Z (which 0) or Y (1), to shared memory; of Y also dbeta
template <int WHICH> LA_DEVICE void store_product(const DeltaGradArguments& a, const Traversal<C, 1, false>& traversal,
                                                  u32 shared, const Decay<C>& decay, int token, int block, int lane) {
    float p[ROWS][2][4];
#pragma unroll
    for (int i = 0; i < ROWS * 8; i++) p[i >> 3][(i >> 2) & 1][i & 3] = 0.f;
#pragma unroll
    for (int v = 0; v < VP; v += 16) {
        const auto x =
            Element::operand(load_a_rows<Element, Values>(shared + (WHICH ? AT_DV : AT_DOUT), 16 * block, v, lane));
#pragma unroll
        for (int j = 0; j < ROWS; j++)
            if (j <= block) {
                Element::B b[2];
                load_b_rows<Element, Values>(b, shared + AT_U, 16 * j, v, lane);
                Element::multiply(p[j][0], x, b[0]);
                Element::multiply(p[j][1], x, b[1]);
            }
    }
    const u32 to = shared + (WHICH ? AT_Y : AT_Z), betas = shared + AT_BETAS;
    const int i0 = 16 * block + (lane >> 2), column = (lane & 3) * 2;
    const bool small = LA_DTYPE == 1;
    if (WHICH && lane >> 3 == (lane & 3)) {   // this lane has two elements of the diagonal
        float diagonal[2] = {};
#pragma unroll
        for (int j = 0; j < ROWS; j++)
            if (j == block) {
                diagonal[0] = lane & 4 ? p[j][0][1] : p[j][0][0];
                diagonal[1] = lane & 4 ? p[j][1][3] : p[j][1][2];
            }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int t = token + i0 + 8 * m;
            const float beta = load_shared(betas + (i0 + 8 * m) * 4);
            if (t < traversal.sequence.T)
                a.dbeta[(traversal.sequence.index + t) * a.heads + traversal.head] =
                    small ? diagonal[m] : diagonal[m] / beta / beta;
        }
    }
    float factor[2];
    float2 until[2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int i = i0 + 8 * m, last = LA_BEFORE && WHICH ? i - 1 : i;   // token after whose decay the state is read
        factor[m] = WHICH ? (small ? -load_shared(betas + i * 4) : -1.f) : a.scale;
        until[m] = !LA_DECAY ? float2{} : last < 0 ? float2{} : decay.upto(last);
    }
#pragma unroll
    for (int j = 0; j < ROWS; j++)
        if (j <= block)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int j0 = 16 * j + 8 * h + column;
                float2 from[2] = {}, b = small ? load_shared2(betas + j0 * 4) : float2{1.f, 1.f};
                if (LA_DECAY) decay.upto(j0, from);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    const int i = i0 + 8 * m;
                    const float u =
                        i >= j0 + WHICH ? factor[m] * b.x * p[j][h][2 * m] * Decay<C>::between(from[0], until[m]) : 0.f;
                    const float v = i >= j0 + 1 + WHICH
                                        ? factor[m] * b.y * p[j][h][2 * m + 1] * Decay<C>::between(from[1], until[m])
                                        : 0.f;
                    store_pair<Element, Gram>(to, i, j0, u, v);
                }
            }
}
// all of both: row blocks of Z from the first on, of Y from the last
LA_DEVICE void store_products(const DeltaGradArguments& a, const Traversal<C, 1, false>& traversal, u32 shared,
                              const Decay<C>& decay, int token, int warp, int lane) {
    const int block = warp % ROWS;
    if (warp < ROWS) store_product<0>(a, traversal, shared, decay, token, block, lane);
    if (GROUPS == 1 || (warp >= ROWS && warp < 2 * ROWS))
        store_product<1>(a, traversal, shared, decay, token, ROWS - 1 - block, lane);
}

// 16 rows and WIDTH columns of accumulators to rows of tokens in memory, first of them `token` and `column`; 16-bit
// ones by way of `own`, a tile that only this warp uses
template <class E, int WIDTH> LA_DEVICE void store_sums(char* rows, i64 stride, const float (&x)[WIDTH / 8][4], u32 own,
                                                        int token, int T, int column, int lane) {
    const int row = lane >> 2, pair = (lane & 3) * 2;
    if constexpr (E::BYTES == 2) {
        typedef Tile<WIDTH, 2> Own;
#pragma unroll
        for (int i = 0; i < WIDTH / 8; i++)
#pragma unroll
            for (int m = 0; m < 2; m++)
                store_pair<E, Own>(own, row + 8 * m, 8 * i + pair, x[i][2 * m], x[i][2 * m + 1]);
        __syncwarp();
        if (column < K) store_rows<Own, 16, WIDTH, K>(rows, stride, own, token, T, 0, column, lane);
        __syncwarp();
    } else
#pragma unroll
        for (int m = 0; m < 2; m++) {
            float* p = (float*)(rows + (token + row + 8 * m) * stride) + column + pair;
            if (token + row + 8 * m < T && column < K)
#pragma unroll
                for (int i = 0; i < WIDTH / 8; i++) {
                    const int c = column + pair + 8 * i;
                    if constexpr (LA_ALIGN >= 8) {
                        if (K % WIDTH == 0 || c < K) *(float2*)(p + 8 * i) = make_float2(x[i][2 * m], x[i][2 * m + 1]);
                    } else {
                        if (c < K) p[8 * i] = x[i][2 * m];
                        if (c + 1 < K) p[8 * i + 1] = x[i][2 * m + 1];
                    }
                }
        }
}

// the parts of db of this warp's rows and columns, a lane's two rows each, and of <S, dS>
struct Dots {
    float reads[2], erases[2], writes[2], product;
};
LA_DEVICE void store_dots(u32 shared, Dots& dots, int warp, int group, int i0, int lane) {
    float (&reads)[2] = dots.reads, (&erases)[2] = dots.erases, (&writes)[2] = dots.writes;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int d = 1; d < 4; d <<= 1) {
            reads[m] += __shfl_xor_sync(0xffffffffu, reads[m], d);
            erases[m] += __shfl_xor_sync(0xffffffffu, erases[m], d);
            writes[m] += __shfl_xor_sync(0xffffffffu, writes[m], d);
        }
    const u32 to = shared + AT_DOTS + (group * 3 * C + i0) * 4;
    if ((lane & 3) == 0)
#pragma unroll
        for (int m = 0; m < 2; m++) {
            store_shared(to + 32 * m, reads[m]);
            store_shared(to + C * 4 + 32 * m, erases[m]);
            store_shared(to + 2 * C * 4 + 32 * m, writes[m]);
        }
    const float product = warp_sum(dots.product);
    if (lane == 0) store_shared(shared + AT_DOTS + GROUPS * 3 * C * 4 + warp * 4, product);
}

// dg of the chunk by one warp, C / 32 tokens a lane. A hard reset's own gradient is 0, and the sum over later reads
// ends before it.
LA_DEVICE void gate_gradients(const DeltaGradArguments& a, const Traversal<C, 1, false>& traversal, u32 shared,
                              const Decay<C>& decay, int token, int lane) {
    constexpr int N = C / 32;
    float end = 0.f, x[N], before[N], sum = 0.f;
    bool reset[N];
    for (int w = 0; w < WARPS; w++) end += load_shared(shared + AT_DOTS + GROUPS * 3 * C * 4 + w * 4);
    end *= decay.start(C - 1);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int t = lane * N + i;
        x[i] = 0.f;
        float written = 0.f;
        for (int n = 0; n < GROUPS; n++) {
            const u32 at = shared + AT_DOTS + (n * 3 * C + t) * 4;
            x[i] += load_shared(at) + (!LA_BEFORE  ? load_shared(at + C * 4)
                                       : t + 1 < C ? load_shared(at + (C + 1) * 4)
                                                   : 0.f);
            written += load_shared(at + 2 * C * 4);
        }
        before[i] = sum;
        sum += written;
        reset[i] = log2_decay(load_shared(shared + AT_GATES + t * 4)) <= FLOOR_LOG2;
    }
    end += prefix_sum(sum, lane) - sum;
    int next = __shfl_down_sync(0xffffffffu, (int)reset[0], 1);   // of the token after this lane's
    if (lane == 31) next = 0;
    int stop = next;
    float later = 0.f;
#pragma unroll
    for (int i = N - 1; i >= 0; i--) {
        later = x[i] + (i + 1 < N && reset[i + 1 < N ? i + 1 : 0] ? 0.f : later);
        if (i) stop |= reset[i];
    }
#pragma unroll
    for (int k = 1; k < 32; k <<= 1) {   // from each lane's first token to the next reset
        const float more = __shfl_down_sync(0xffffffffu, later, k);
        const int further = __shfl_down_sync(0xffffffffu, stop, k);
        if (lane + k < 32) {
            if (!stop) later += more;
            stop |= further;
        }
    }
    later = __shfl_down_sync(0xffffffffu, later, 1);
    if (lane == 31 || next) later = 0.f;
#pragma unroll
    for (int i = N - 1; i >= 0; i--) {
        const int t = token + lane * N + i;
        later = x[i] + (i + 1 < N && reset[i + 1 < N ? i + 1 : 0] ? 0.f : later);
        if (t < traversal.sequence.T)
            a.dg[(traversal.sequence.index + t) * a.heads + traversal.head] = reset[i] ? 0.f : later + before[i] + end;
    }
}
