// The words of CUDA, on a host: a block's threads are fibers that take turns.
//
// A thread runs until it waits: __syncthreads() for all threads of the block, __shfl_*_sync and the like for those of
// its warp. Threads that have returned count as arrived, and their lanes hold NaN.
#pragma once
#include "host.h"

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ thread_local
#define __align__(n) __attribute__((aligned(n)))

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
};
static Dim3 threadIdx, blockIdx, blockDim, gridDim;

static thread_local __align__(1024) char memory[1 << 18];   // the dynamic shared memory, by either name
#ifdef LA_SHARED
#define shared memory
#endif

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) double2 {
    double x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }

// -fsanitize=alignment calls this at an access to an address that is no multiple of the type's alignment, which a
// device does not make; the launch then fails.
static char misaligned[256];
static void check_aligned(const char* file, unsigned line, const void* p, size_t bytes) {
    if ((uintptr_t)p % bytes && !misaligned[0])
        snprintf(misaligned, sizeof misaligned, "%s:%u: address %p is no multiple of %zu", file, line, p, bytes);
}
struct AccessPlace {   // as the compiler passes it
    const char* file;
    unsigned line, column;
    const void* type;
    unsigned char log_alignment, kind;
};
extern "C" void __ubsan_handle_type_mismatch_v1(AccessPlace* at, uintptr_t p) {
    check_aligned(at->file, at->line, (const void*)p, (size_t)1 << at->log_alignment);
}

template <class A, class B> static A bits_as(B x) {
    static_assert(sizeof(A) == sizeof(B), "one size");
    A y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
static inline float __int_as_float(int x) { return bits_as<float>(x); }
static inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
static inline int __float_as_int(float x) { return bits_as<int>(x); }
static inline double __hiloint2double(int hi, int lo) {
    return bits_as<double>((uint64_t)(uint32_t)hi << 32 | (uint32_t)lo);
}
static inline int __double2loint(double x) { return (int)(uint32_t)bits_as<uint64_t>(x); }
static inline int __double2hiint(double x) { return (int)(uint32_t)(bits_as<uint64_t>(x) >> 32); }
// of GPUs: never parts of one fused operation
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline unsigned atomicAdd(unsigned* to, unsigned x) {
    const unsigned before = *to;
    *to += x;
    return before;
}
static inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned from) {
    const uint64_t all = (uint64_t)y << 32 | x;
    unsigned found = 0;
    for (int n = 0; n < 4; n++) found |= (unsigned)(all >> 8 * (from >> 4 * n & 7) & 255) << 8 * n;
    return found;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
template <class T> static T __ldg(const T* p) { return *p; }
template <class T> static T __ldcs(const T* p) { return *p; }
template <class T> static void __stcs(T* p, T x) { *p = x; }
template <class T> static typename std::enable_if<std::is_arithmetic<T>::value, T>::type min(T a, T b) {
    return b < a ? b : a;
}
template <class T> static typename std::enable_if<std::is_arithmetic<T>::value, T>::type max(T a, T b) {
    return a < b ? b : a;
}
static inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
static inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
static inline void sincospif(float x, float* s, float* c) {
    *s = (float)sin(M_PI * x);
    *c = (float)cos(M_PI * x);
}
static inline double rsqrt(double x) { return 1. / sqrt(x); }
#define __expf expf
#define __logf logf
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __frcp_rn(float x) { return 1.f / x; }
static inline float __saturatef(float x) { return x > 1.f ? 1.f : x > 0.f ? x : 0.f; }

// The threads of a block

struct Meeting {   // of threads that wait for one another
    int expected = 0, arrived = 0;
    unsigned round = 0;
};
// makecontext gives each fiber its stack, once; from then on _longjmp goes from one to the next, without a system call.
// All libraries of a process share the fibers, and a fiber may have begun in another one: threadIdx is of each library.
// Others run during a wait (noipa: the compiler sees only that `next` does not return, and would keep values of memory).
struct Fibers {
    static constexpr int STACK = (1 << 19) + 17 * 64, MOST = 1024;
    char* stacks = (char*)malloc((size_t)STACK * MOST);   // never written as a whole: pages come as they are touched
    ucontext_t first, outside;
    jmp_buf host, at[MOST];
    bool running[MOST], begun[MOST] = {};
    const Meeting* waits[MOST];   // of a fiber, until its round is no longer rounds[n]
    unsigned rounds[MOST];
    Meeting all, warps[MOST / 32];
    uint64_t lanes[MOST];
    int count, now, left;
    void (*body)(const void*);
    const void* argument;

    static Fibers& own() {
        static Fibers block;
        return block;
    }
    bool ready(int n) const { return running[n] && (!waits[n] || waits[n]->round != rounds[n]); }
    [[noreturn]] void next() {   // the next one after this that need not wait, in a circle
        if (!left) _longjmp(host, 1);
        for (int n = now, tried = 0; tried < count; tried++) {
            if (++n == count) n = 0;
            if (ready(n)) {
                waits[n] = nullptr;
                now = n;
                _longjmp(at[n], 1);
            }
        }
        fprintf(stderr, "threads wait for one that waits for them\n");
        abort();
    }
    __attribute__((noipa)) void wait(const Meeting& m) {
        waits[now] = &m;
        rounds[now] = m.round;
        if (!_setjmp(at[now])) next();
        threadIdx.x = now;
    }
    void arrive(Meeting& m) {
        if (++m.arrived >= m.expected) {
            m.arrived = 0;
            m.round++;
        } else
            wait(m);
    }
    void leave(Meeting& m) {
        if (--m.expected > 0 && m.arrived >= m.expected) {
            m.arrived = 0;
            m.round++;
        }
    }
    __attribute__((noipa)) static void main_of_a_fiber() {   // one turn of the loop a block
        for (;;) {
            Fibers& b = own();
            b.turn();
            b.body(b.argument);
            b.finish();
        }
    }
    __attribute__((noipa)) void turn() {   // waits for the next block
        if (_setjmp(at[now])) return;
        if (begun[now]) next();
        begun[now] = true;
        swapcontext(&first, &outside);
    }
    uint64_t& last_word(int n) { return *(uint64_t*)(stacks + (size_t)n * STACK); }
    __attribute__((noipa)) void finish() {
        if (last_word(now) != 0) {
            fprintf(stderr, "the stack of a thread is full\n");
            abort();
        }
        running[now] = false;
        left--;
        memset(&lanes[now], 0xff, 8);
        leave(all);
        leave(warps[now / 32]);
    }
    __attribute__((noipa)) void run(int threads) {
        count = left = threads;
        all = Meeting();
        all.expected = threads;
        for (int n = 0; n < threads; n++) {
            if (n % 32 == 0) warps[n / 32] = Meeting();
            warps[n / 32].expected++;
            running[n] = true;
            waits[n] = nullptr;
            if (begun[n]) continue;
            now = n;
            last_word(n) = 0;
            getcontext(&first);
            first.uc_stack.ss_sp = stacks + (size_t)n * STACK;
            first.uc_stack.ss_size = STACK;
            first.uc_link = nullptr;
            makecontext(&first, main_of_a_fiber, 0);
            swapcontext(&outside, &first);
        }
        now = threads - 1;   // thread 0 begins
        if (!_setjmp(host)) next();
    }
};
static inline void __syncthreads() { Fibers::own().arrive(Fibers::own().all); }
static inline void __syncwarp(unsigned = ~0u) { Fibers::own().arrive(Fibers::own().warps[Fibers::own().now / 32]); }
static inline void __threadfence() {}

template <class T> static T exchanged(T x, int from) {   // the x of another lane
    Fibers& b = Fibers::own();
    static_assert(sizeof(T) <= 8, "a word");
    memcpy(&b.lanes[b.now], &x, sizeof x);
    __syncwarp();
    T y;
    memcpy(&y, &b.lanes[b.now / 32 * 32 + (from & 31)], sizeof y);
    __syncwarp();
    return y;
}
static inline int own_lane() { return Fibers::own().now % 32; }
template <class T> static T __shfl_sync(unsigned, T x, int from, int width = 32) {
    return exchanged(x, own_lane() / width * width + from % width);
}
template <class T> static T __shfl_xor_sync(unsigned, T x, int by, int = 32) { return exchanged(x, own_lane() ^ by); }
template <class T> static T __shfl_up_sync(unsigned, T x, int by, int width = 32) {
    return exchanged(x, own_lane() % width < by ? own_lane() : own_lane() - by);
}
template <class T> static T __shfl_down_sync(unsigned, T x, int by, int width = 32) {
    return exchanged(x, own_lane() % width + by >= width ? own_lane() : own_lane() + by);
}
static inline unsigned __ballot_sync(unsigned, int x) {
    Fibers& b = Fibers::own();
    const uint64_t own = x != 0;
    memcpy(&b.lanes[b.now], &own, 8);
    __syncwarp();
    unsigned found = 0;
    for (int n = 0; n < 32; n++) {
        const int lane = b.now / 32 * 32 + n;
        if (lane < b.count && b.running[lane]) found |= (unsigned)(b.lanes[lane] & 1) << n;
    }
    __syncwarp();
    return found;
}
static inline int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }

template <class A> static void run_grid(void (*entry)(A), const void* arguments, unsigned blocks, unsigned threads) {
    A a;
    memcpy((void*)&a, arguments, sizeof a);
    struct Call {
        void (*entry)(A);
        A& a;
    } call{entry, a};
    gridDim.x = blocks;
    blockDim.x = threads;
    Fibers::own().argument = &call;
    Fibers::own().body = [](const void* p) {
        threadIdx.x = Fibers::own().now;
        ((const Call*)p)->entry(((const Call*)p)->a);
    };
    for (unsigned n = 0; n < blocks; n++) {
        blockIdx.x = n;
        memset(memory, 0xff, sizeof memory);
        Fibers::own().run(threads);
    }
}
