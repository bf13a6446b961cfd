// The -D constants of a kernel, checked once. README.md has the table.
#pragma once
#include "tile/mma.cuh"

#ifndef LA_DTYPE   // 0 bfloat16, 1 float16, 2 float32, 3 float32 in memory, tf32 in products
#define LA_DTYPE 0
#endif
#ifndef LA_DECAY   // 0 none, 1 one log decay a token and head, 2 one a key channel too (step.cu)
#define LA_DECAY 1
#endif
#ifndef LA_REVERSE   // 1: time runs backward, and a token's decay acts after its write
#define LA_REVERSE 0
#endif
#ifndef LA_ALIGN   // bytes that every row of every array is a multiple of: 16, 8, 4 or 2
#define LA_ALIGN 16
#endif

#if LA_DTYPE == 0
typedef Bfloat16 Element;
#elif LA_DTYPE == 1
typedef Float16 Element;
#elif LA_DTYPE == 2
typedef Float32 Element;
#elif LA_DTYPE == 3
typedef Tfloat32 Element;
#else
#error "LA_DTYPE is 0, 1, 2 or 3"
#endif
static_assert(LA_DECAY >= 0 && LA_DECAY <= 2, "LA_DECAY is 0, 1 or 2");
static_assert(LA_ALIGN == 16 || LA_ALIGN == 8 || LA_ALIGN == 4 || (LA_ALIGN == 2 && Element::BYTES == 2), "LA_ALIGN");
constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }
