// Decays of key channels in a chunk of 64 tokens, four blocks of 16 rows: a lane owns two neighbouring channels of one
// block.
//
//     a_t = e^{g_t}     Pre_i = a_first .. a_i     Suf_j = a_(j+1) .. a_last     D = a of the whole block
//
// Only products of a are formed, never differences of sums: a = 0 (g = -inf) is exact and no exponent is ever positive.
// In a block, q Pre and k / Pre are operands of the diagonal block of P; h = 2^58 keeps both in the middle of the float
// range,
//
//     P_ij = sum over channels of (q_i Pre_i h) (k_j / (Pre_j h))
//     as long as Pre_j >= 2^-116, that is 80 nats in 16 rows
//
// Eight warps share a chunk: warp (block, panel) has channels 64 panel + 2 lane and the next of the block's rows.
#pragma once
#include "attention/decay.cuh"
#include "tile/wgmma.cuh"

#ifndef LA_GATE   // log decays in memory: 0 bfloat16, 2 float32
#define LA_GATE 0
#endif
#ifndef LA_BEFORE   // 1: queries read the state before the token's decay and write
#define LA_BEFORE 0
#endif

constexpr int C = 64, WIDE = 128, ROWS = 16;   // tokens of a chunk, channels of a tile, rows of a block
typedef Panels<WIDE, C> Tokens;                // q, k, v, ... of a chunk
typedef Panels<C, C> Square;                   // P of a chunk
constexpr int PANEL = Tokens::PANEL, BLOCK_BYTES = ROWS * 128;
constexpr int GATE_BYTES = LA_GATE == 2 ? 4 : 2, GATES = C * WIDE * GATE_BYTES;   // panels of 64 channels, or of 32
constexpr int QUOTIENTS =
    PANEL * GATE_BYTES / 2;   // from panel to panel of the quotients that replace a lane's log decays
constexpr float SMALLEST_DECAY = 0x1p-116f, MIDDLE = 0x1p58f, OVER_MIDDLE = 0x1p-58f;

LA_DEVICE float2 operator*(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }
LA_DEVICE float2 operator*(float2 x, float y) { return {x.x * y, x.y * y}; }
LA_DEVICE float2 operator-(float2 x) { return {-x.x, -x.y}; }
LA_DEVICE float2& operator*=(float2& x, float2 y) { return x = x * y; }
LA_DEVICE float2 floats_of(u32 x) { return {low_bf16(x), high_bf16(x)}; }
LA_DEVICE u32 pack(float2 x) { return pack_bf16(x.x, x.y); }
LA_DEVICE float2 decay_of(float2 g) { return {exp2_approx(g.x * LOG2_E), exp2_approx(g.y * LOG2_E)}; }
LA_DEVICE float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// 1 / x of x = h Pre; of an x that is too small that of the smallest, or anything: columns of P that nothing reads
LA_DEVICE float over(float x) { return reciprocal(fmaxf(x, SMALLEST_DECAY * MIDDLE)); }
LA_DEVICE float2 any_over(float2 x) { return {reciprocal(x.x), reciprocal(x.y)}; }

LA_DEVICE u32 load_word(u32 a) {
    u32 r;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(a));
    return r;
}
LA_DEVICE void store_word(u32 a, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
LA_DEVICE void store_pair(u32 a, float2 x) { store_shared2(a, x.x, x.y); }
// by a predicate, which leaves the code around it in one piece
LA_DEVICE void store_word_if(bool valid, u32 a, u32 x) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.shared.b32 [%0], %1; }" ::"r"(a), "r"(x), "r"((u32)valid)
                 : "memory");
}
LA_DEVICE void producers_barrier() { groups_barrier<256>(2); }
LA_DEVICE bool any_of_producers(bool x) {   // the same barrier, whose number is 3
    u32 r;
    asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, 3, 256, p; selp.u32 %0, 1, 0, q; }"
                 : "=r"(r)
                 : "r"((u32)x)
                 : "memory");
    return r;
}

// Byte offset of a lane's two channels in row r of a block, in a panel of 64 channels of 16 bits
LA_DEVICE u32 lane_row(int r, int lane) { return r * 128 + ((lane * 4) ^ ((r & 7) << 4)); }
// Log decays of those channels, as they lie in memory: `base` is that of the block's row 0 and the lane's panel
LA_DEVICE u32 gates_of(u32 gates, int block, int panel, int lane) {
    return gates + block * BLOCK_BYTES + (LA_GATE == 2 ? (2 * panel + (lane >> 4)) * PANEL : panel * PANEL);
}
LA_DEVICE float2 load_gate(u32 base, int r, int lane) {
    if constexpr (LA_GATE == 2) return load_shared2(base + r * 128 + (((lane & 15) * 8) ^ ((r & 7) << 4)));
    else return floats_of(load_word(base + lane_row(r, lane)));
}
// Decays of the block's first and last 8 rows
struct Halves {
    float2 first, last;
};
LA_DEVICE Halves halves_of(u32 base, int lane) {
    float2 g[ROWS], x = {0.f, 0.f}, y = {0.f, 0.f};
#pragma unroll
    for (int r = 0; r < ROWS; r++) g[r] = load_gate(base, r, lane);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        x = {x.x + g[r].x, x.y + g[r].y};
        y = {y.x + g[r + 8].x, y.y + g[r + 8].y};
    }
    return {decay_of(x), decay_of(y)};
}
// Decays of all blocks, through shared memory (4 blocks of 128 floats): of those before a block, behind it, the one
// between it and the block that is two away, all of them
struct Reach {
    float2 before, behind, between, all;
};
LA_DEVICE void store_decay(u32 decays, float2 own, int block, int panel, int lane) {
    store_pair(decays + block * 512 + panel * 256 + lane * 8, own);
}
LA_DEVICE Reach reach_of(u32 decays, float2 own, int block, int panel, int lane) {
    const u32 at = decays + panel * 256 + lane * 8;
    const float2 d0 = load_shared2(at), d1 = load_shared2(at + 512), d2 = load_shared2(at + 1024),
                 d3 = load_shared2(at + 1536);
    Reach x = {{1.f, 1.f}, {1.f, 1.f}, block == 3 ? d2 : d1, {}};
    if (block > 0) x.before *= d0;
    if (block > 1) x.before *= d1;
    if (block > 2) x.before *= d2;
    if (block < 3) x.behind *= d3;
    if (block < 2) x.behind *= d2;
    if (block < 1) x.behind *= d1;
    x.all = x.behind * own;   // used by block 0
    return x;
}
