// The sum of weights that divides the outputs of a NORMALISED read-out: a recurrence of one row a head, beside the
// passes over the values.
//
//     z_t = e^{g_t} z_{t-1} + w_t k_t        s_t = scale q_t . z_t
//     dq_t += scale c_t z_t                  R_t = scale c_t q_t + e^{g_{t+1}} R_{t+1}        c_t: the gradient of s_t
//     dk_t += w_t R_t                        dw_t = k_t . R_t        dg_t = dg_{t+1} + c_t s_t - w_t dw_t
//
// Sequences are cut into parts of PART tokens. `adds` sums up a part, `carry` goes from part to part, and the others
// begin with what it has left: z before a part, or with LA_BACK e^{g} R after it, whose product with z there is dg of
// the next token. Of up to FEW parts they may add up themselves what the others add, without `carry` (a.few). A warp
// has 128 channels, four a lane, and goes token by token; rows of GROUP tokens are loaded ahead.
#include "arguments/matrix_state/NormaliserArguments.cuh"
#include "attention/tokens.cuh"
#include "tile/reduce.cuh"
#include "tile/vec4.cuh"

#ifndef LA_BACK   // 1: of `adds` and `carry`, from the last token to the first
#define LA_BACK 0
#endif
#ifndef LA_WIDE   // 1: four elements of a row are one access
#define LA_WIDE 1
#endif
constexpr int K = LA_K, KIND = LA_DTYPE, WARPS = (K + 127) / 128, PART = 128, GROUP = 8, FEW = 8;
static_assert(WARPS <= 8, "a block has at most 256 threads");

// z or R of a part is row `slot` of its array; a sequence has a row more than parts, for z after the last
LA_DEVICE i64 first_slot(const Sequence& s, i64 sequence) { return s.index / PART + 2 * sequence; }
LA_DEVICE int parts_of(const Sequence& s) { return (s.T + PART - 1) / PART; }

struct Part {   // of a block
    int head, sequence, part, first, stop, warp, lane;
    int channel, count;   // the first of a lane, which has `count`
    Sequence s;
    i64 slot;
    __device__ __forceinline__ Part(const NormaliserArguments& a, int block) {
        head = block % a.heads;
        block /= a.heads;
        part = block % a.parts;
        sequence = block / a.parts;
        s = sequence_of(a.offsets, sequence, a.T);
        first = part * PART;
        stop = min(first + PART, s.T);
        slot = first_slot(s, sequence) + part;
        warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        channel = threadIdx.x * 4;
        count = K - channel;
    }
    __device__ __forceinline__ i64 row(const NormaliserArguments& a, int token) const {   // of numbers of the outputs
        return (s.index + token) * a.heads + head;
    }
};

struct Vector {   // a lane's channels
    float x[4];
    __device__ __forceinline__ void load(const float* row, int count) {
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = j < count ? row[j] : 0.f;
    }
    __device__ __forceinline__ void add(float factor, const Vec4<KIND>& y) {
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] += factor * y[j];
    }
    __device__ __forceinline__ void multiply(float factor) {
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] *= factor;
    }
    __device__ __forceinline__ float dot(const Vec4<KIND>& y) const {
        return x[0] * y[0] + x[1] * y[1] + (x[2] * y[2] + x[3] * y[3]);
    }
};
LA_DEVICE const float* vector_of(const float* vectors, const Part& at, i64 slot, int heads, int head) {
    return vectors + (slot * heads + head) * K + at.channel;
}

// y: what is before part `stop` of z, or after it of R (back): `parts` has it, or (few) what each part adds
LA_DEVICE void enter(Vector& y, bool few, bool back, const Part& at, int stop, const float* parts, const float* decays,
                     const float* start, int heads, int head) {
    const i64 first = at.slot - at.part;
    if (!few) {
        y.load(vector_of(parts, at, first + stop, heads, head), at.count);
        return;
    }
    Vector added[FEW];
    float decay[FEW];
    const int count = parts_of(at.s), many = back ? count - 1 - stop : stop;
#pragma unroll
    for (int n = 0; n < FEW; n++) {
        const i64 slot = first + (back ? count - 1 - n : n);
        added[n].load(vector_of(parts, at, slot, heads, head), n < many ? at.count : 0);
        decay[n] = n < many ? decays[slot * heads + head] : 1.f;
    }
    y.load(vector_of(start, at, at.sequence, heads, head), start == nullptr ? 0 : at.count);
#pragma unroll
    for (int n = 0; n < FEW; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) y.x[j] = decay[n] * y.x[j] + added[n].x[j];
}

struct Group {   // GROUP rows; zeros from `stop` on
    Vec4<KIND> x[GROUP];
    __device__ __forceinline__ void load(const Rows& from, const Part& at, int token) {
        const char* p = rows_of(from, at.s, at.head) + token * from.token + at.channel * bytes_of(KIND);
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            x[i].template load<LA_WIDE>(p + i * from.token, token + i < at.stop ? at.count : 0);
    }
};
LA_DEVICE void store_row(const Rows& to, const Part& at, int token, const Vector& y) {
    if (token >= at.stop || at.count <= 0) return;
    char* p = own_rows(to, at.s, at.head) + token * to.token + at.channel * bytes_of(KIND);
    if constexpr (LA_WIDE) store_vec4<KIND>(p, y.x);
    else
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j < at.count) store_element<KIND>(p + j * bytes_of(KIND), y.x[j]);
}

struct Numbers {   // of the token of a lane below GROUP: e^g, w, scale c; of the others and past the last token 1, 0, 0
    float g, decay, weight, c;
    __device__ __forceinline__ void load(const NormaliserArguments& a, const Part& at, int token, bool both) {
        const int t = token + at.lane;
        const bool valid = at.lane < GROUP && t < at.stop;
        g = 0.f;
        if (LA_DECAY && valid)
            g = a.g.data[at.s.row * a.g.batch + (at.s.first + t) * a.g.token + (u32)at.head / (u32)a.g.group * a.g.head];
        decay = expf(g);
        weight = c = 0.f;
        if (valid && (both || !LA_BACK))
            weight = a.w == nullptr ? 1.f : a.w[(at.s.index + t) * (a.heads / a.group_w) + at.head / a.group_w];
        if (valid && (both || LA_BACK)) c = a.scale * a.c[at.row(a, t)];
    }
    __device__ __forceinline__ float decay_of(int i) const { return LA_DECAY ? __shfl_sync(~0u, decay, i) : 1.f; }
    __device__ __forceinline__ float weight_of(int i) const { return __shfl_sync(~0u, weight, i); }
    __device__ __forceinline__ float c_of(int i) const { return __shfl_sync(~0u, c, i); }
};

// the sums of GROUP numbers over all threads; that of number i in the lanes i mod GROUP
typedef float (*Shared)[GROUP];
LA_DEVICE float total(float (&x)[GROUP], Shared shared, const Part& at) {
    column_sums<GROUP>(x, at.lane);
    float sum = x[0];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int i = at.lane % GROUP;
    sum = __shfl_sync(~0u, sum, (i >> 2 & 1) * 4 + (i >> 1 & 1) * 8 + (i & 1) * 16);
    if (WARPS > 1) {
        if (at.lane < GROUP) shared[at.warp][i] = sum;
        __syncthreads();
        sum = 0.f;
        for (int n = 0; n < WARPS; n++) sum += shared[n][i];
        __syncthreads();
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) adds(const __grid_constant__ NormaliserArguments a) {
    const Part at(a, blockIdx.x);
    if (at.first >= at.stop) return;
    Vector y = {{0.f, 0.f, 0.f, 0.f}};
    float all = 1.f;
    const int groups = (at.stop - at.first + GROUP - 1) / GROUP;
    for (int n = 0; n < groups; n++) {
        const int token = at.first + (LA_BACK ? groups - 1 - n : n) * GROUP;
        Group rows;
        Numbers numbers;
        rows.load(LA_BACK ? a.q : a.k, at, token);
        numbers.load(a, at, token, false);
#pragma unroll
        for (int m = 0; m < GROUP; m++) {
            const int i = LA_BACK ? GROUP - 1 - m : m;
            const float decay = numbers.decay_of(i);
            if (!LA_BACK) y.multiply(decay);
            y.add(LA_BACK ? numbers.c_of(i) : numbers.weight_of(i), rows.x[i]);
            if (LA_BACK) y.multiply(decay);
            all *= decay;
        }
    }
    float* to = a.begins + (at.slot * a.heads + at.head) * K + at.channel;
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (j < at.count) to[j] = y.x[j];
    if (threadIdx.x == 0) a.decays[at.slot * a.heads + at.head] = all;
}

// In place: from what parts add to what they begin with; a thread has a channel.
extern "C" __global__ void __launch_bounds__(128) carry(const __grid_constant__ NormaliserArguments a) {
    constexpr int BLOCKS = (K + 127) / 128, AHEAD = 8;
    const int channel = blockIdx.x % BLOCKS * 128 + threadIdx.x, head = blockIdx.x / BLOCKS % a.heads;
    const i64 sequence = blockIdx.x / BLOCKS / a.heads;
    if (channel >= K) return;
    const Sequence s = sequence_of(a.offsets, sequence, a.T);
    const int count = parts_of(s);
    const i64 step = (i64)a.heads * K, own = (sequence * a.heads + head) * K + channel;
    float* parts = a.begins + (first_slot(s, sequence) * a.heads + head) * K + channel;
    const float* decays = a.decays + first_slot(s, sequence) * a.heads + head;
    float y = a.start == nullptr ? 0.f : a.start[own];
    for (int n = 0; n < count; n += AHEAD) {
        float added[AHEAD], decay[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const i64 part = LA_BACK ? count - 1 - n - i : n + i;
            added[i] = n + i < count ? parts[part * step] : 0.f;
            decay[i] = n + i < count ? decays[part * a.heads] : 1.f;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (n + i < count) parts[(LA_BACK ? count - 1 - n - i : n + i) * step] = y;
            y = decay[i] * y + added[i];
        }
    }
    if (!LA_BACK) parts[count * step] = y;
    if (a.end != nullptr) a.end[own] = y;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) sums(const __grid_constant__ NormaliserArguments a) {
    __shared__ float shared[WARPS][GROUP];
    const Part at(a, blockIdx.x);
    if (at.first >= at.stop) return;
    Vector z;
    enter(z, a.few & 1, false, at, at.part, a.begins, a.decays, a.start, a.heads / a.group, at.head / a.group);
    for (int token = at.first; token < at.stop; token += GROUP) {
        Group k, q;
        Numbers numbers;
        k.load(a.k, at, token);
        q.load(a.q, at, token);
        numbers.load(a, at, token, false);
        float dots[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            z.multiply(numbers.decay_of(i));
            z.add(numbers.weight_of(i), k.x[i]);
            dots[i] = z.dot(q.x[i]);
        }
        const float sum = total(dots, shared, at);
        if (threadIdx.x < GROUP && token + at.lane < at.stop) a.sums[at.row(a, token + at.lane)] = a.scale * sum;
    }
}

LA_DEVICE void read_grads(const NormaliserArguments& a, const Part& at) {
    const bool add = a.add & 1;
    Vector z;
    enter(z, a.few & 1, false, at, at.part, a.begins, a.decays, a.start, a.heads / a.group, at.head / a.group);
    for (int token = at.first; token < at.stop; token += GROUP) {
        Group k, dq;
        Numbers numbers;
        k.load(a.k, at, token);
        if (add) dq.load(a.dq, at, token);
        numbers.load(a, at, token, true);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            z.multiply(numbers.decay_of(i));
            z.add(numbers.weight_of(i), k.x[i]);
            Vector y = z;
            y.multiply(numbers.c_of(i));
            if (add) y.add(1.f, dq.x[i]);
            store_row(a.dq, at, token + i, y);
        }
    }
}

LA_DEVICE void write_grads(const NormaliserArguments& a, const Part& at, float (&shared)[WARPS][GROUP]) {
    const bool add = a.add & 2;
    Vector R, z;
    enter(R, a.few & 2, true, at, at.part, a.later, a.later_decays, a.later_start, a.heads, at.head);
    float crossing = 0.f;   // dg of the token after this one
    if (LA_DECAY) {
        enter(z, a.few & 1, false, at, at.part + 1, a.begins, a.decays, a.start, a.heads / a.group, at.head / a.group);
        float dots[GROUP] = {z.x[0] * R.x[0] + z.x[1] * R.x[1] + (z.x[2] * R.x[2] + z.x[3] * R.x[3])};
        crossing = __shfl_sync(~0u, total(dots, shared, at), 0);
    }
    const int groups = (at.stop - at.first + GROUP - 1) / GROUP;
    for (int n = groups - 1; n >= 0; n--) {
        const int token = at.first + n * GROUP;
        Group q, k, dk;
        Numbers numbers;
        q.load(a.q, at, token);
        k.load(a.k, at, token);
        if (add) dk.load(a.dk, at, token);
        numbers.load(a, at, token, true);
        const bool own = at.lane < GROUP && token + at.lane < at.stop;
        const float s = LA_DECAY && own ? a.sums[at.row(a, token + at.lane)] * a.c[at.row(a, token + at.lane)] : 0.f;
        float dots[GROUP];
#pragma unroll
        for (int i = GROUP - 1; i >= 0; i--) {
            R.add(numbers.c_of(i), q.x[i]);
            dots[i] = R.dot(k.x[i]);
            Vector y = R;
            y.multiply(numbers.weight_of(i));
            if (add) y.add(1.f, dk.x[i]);
            store_row(a.dk, at, token + i, y);
            R.multiply(numbers.decay_of(i));
        }
        const float dw = total(dots, shared, at);
        if (a.dw != nullptr && own && at.warp == 0) a.dw[at.row(a, token + at.lane)] = dw;
        if constexpr (LA_DECAY) {   // past the last token nothing is added; a reset hides what comes after it
            const float more = s - numbers.weight * dw;
            const int reset = numbers.decay == 0.f;
            float dg = 0.f;
#pragma unroll
            for (int i = GROUP - 1; i >= 0; i--) {
                crossing = __shfl_sync(~0u, reset, i) ? 0.f : crossing + __shfl_sync(~0u, more, i);
                if (at.lane == i) dg = crossing;
            }
            if (own && at.warp == 0) a.dg[at.row(a, token + at.lane)] = dg;
        }
    }
}

// Two blocks a part: of dq, and of dk, dw and dg
extern "C" __global__ void __launch_bounds__(32 * WARPS) grads(const __grid_constant__ NormaliserArguments a) {
    __shared__ float shared[WARPS][GROUP];
    const Part at(a, blockIdx.x / 2);
    if (at.first >= at.stop) return;
    if (blockIdx.x % 2) write_grads(a, at, shared);
    else read_grads(a, at);
}
