// Pairs inside a block of 16 rows one by one, in float32, for chunks that decay too far for quotients: the decay of a
// pair is a product down the rows between, so that any log decay in [-inf, 0] is exact. Pairs that no decay crosses,
// (q_i, k_i) and (a_i, k_(i-1)), are left out of the dots that the gate gradient is made of: they would be the largest.
#pragma once
#include "free/chunk_products.cuh"

LA_DEVICE void add_to(float2& x, float2 y, float f) {
    x.x += f * y.x;
    x.y += f * y.y;
}
struct Four {
    float zk, zb, yk, yb;
};   // pairs (i, j) of dO with v and w, of dw with v and w

// A lane's two channels of a block of a chunk whose rows lie as they came
struct OwnBlock {
    const Lane& me;
    int count;   // tokens of the chunk
    u32 table;
    __device__ __forceinline__ OwnBlock(const Lane& me, int count)
        : me(me), count(count), table(me.shared + AT_GATES + me.block * ROWS * ROWS * 16) {}
    // row r, from -1 to 16, of rows a, q, k, b
    __device__ __forceinline__ float2 row(int which, int r) const {
        const u32 x = load_word(me.shared + AT_ROWS + which * TILE + me.own() + lane_row(r, me.lane));
        return floats_of(!LA_RAGGED || me.block * ROWS + r < count ? x : 0);
    }
    __device__ __forceinline__ Four pair(int i, int j) const {
        Four x;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x.zk), "=f"(x.zb), "=f"(x.yk), "=f"(x.yb)
                     : "r"(table + (i * ROWS + j) * 16));
        return x;
    }
    // of dw in row r, from 0 to 16, with v and w of the row before, which may be another block's
    __device__ __forceinline__ float2 neighbours(int r) const {
        if (r % ROWS == 0) return load_shared2(me.shared + AT_NEAR + (me.block + r / ROWS) * 8);
        const Four x = pair(r, r - 1);
        return {x.yk, x.yb};
    }
    __device__ __forceinline__ u32 staged(int which, int r) const {
        return me.staged(which, me.panel, me.block * ROWS + r, 2 * me.lane);
    }
};
constexpr int ROWS_A = 0, ROWS_Q = 1, ROWS_K = 2, ROWS_B = 3;

constexpr int HALF = ROWS / 2;   // rows whose sums a lane holds at a time

// The terms of earlier rows of the block in dq and da, in half H of its rows
template <int H> LA_DEVICE void read_pairs(float2 (&q)[HALF], float2 (&r)[HALF], const float2 (&a)[ROWS],
                                           const OwnBlock& own) {
    constexpr int FIRST = HALF * H;
    float2 between = {1.f, 1.f};   // from row j to the half's first row, without its own
#pragma unroll
    for (int i = 0; i < HALF; i++) q[i] = r[i] = {0.f, 0.f};
#pragma unroll
    for (int j = FIRST + HALF - 2; j >= 0; j--) {
        if (j + 1 < FIRST) between *= a[j + 1];
        float2 k = own.row(ROWS_K, j) * between, b = own.row(ROWS_B, j) * between;
#pragma unroll
        for (int i = max(j + 1, FIRST); i < FIRST + HALF; i++) {
            const Four z = own.pair(i, j);
            if (i > j + 1) {
                add_to(r[i - FIRST], k, z.yk);
                add_to(r[i - FIRST], b, z.yb);
            }
            k *= a[i];
            b *= a[i];
            add_to(q[i - FIRST], k, z.zk);
            add_to(q[i - FIRST], b, z.zb);
        }
    }
}
// The terms of later rows of the block in dk and db, in half H of its rows
template <int H> LA_DEVICE void write_pairs(float2 (&k)[HALF], float2 (&b)[HALF], const float2 (&a)[ROWS],
                                            const OwnBlock& own) {
    constexpr int FIRST = HALF * H, LAST = FIRST + HALF - 1;
    float2 between = {1.f, 1.f};   // from the half's last row to row i
#pragma unroll
    for (int j = 0; j < HALF; j++) k[j] = b[j] = {0.f, 0.f};
#pragma unroll
    for (int i = FIRST + 1; i < ROWS; i++) {
        float2 q = own.row(ROWS_Q, i), r = own.row(ROWS_A, i);
        if (i > LAST) {
            r *= between;
            between *= a[i];
            q *= between;
        }
#pragma unroll
        for (int j = min(i - 1, LAST); j >= FIRST; j--) {
            const Four z = own.pair(i, j);
            if (i <= LAST || j < LAST) q *= a[j + 1];
            add_to(k[j - FIRST], q, z.zk);
            add_to(b[j - FIRST], q, z.zb);
            if (j + 1 == i) continue;
            if (j < LAST) r *= a[j + 1];
            add_to(k[j - FIRST], r, z.yk);
            add_to(b[j - FIRST], r, z.yb);
        }
    }
}

struct Places {   // a lane's rows of two gradients in memory
    char *first, *second;
    i64 first_step, second_step;
    int rows;   // that are there
    __device__ __forceinline__ void store(int r, float2 x, float2 y) const {
        if (r >= rows) return;
        *(u32*)(first + r * first_step) = pack(x);
        *(u32*)(second + r * second_step) = pack(y);
    }
};
// dq and da of half H of a lane's rows; in place of their sums, the dots. pre: decay of the rows before
template <int H> LA_DEVICE void store_readers(float2& pre, const float2 (&a)[ROWS], const Places& to,
                                              const OwnBlock& own) {
    float2 dq[HALF], da[HALF];
    read_pairs<H>(dq, da, a, own);
#pragma unroll
    for (int n = 0; n < HALF; n++) {
        const int r = HALF * H + n;
        const float2 before = pre, q = own.row(ROWS_Q, r), x = own.row(ROWS_A, r);
        const float2 of_q = load_shared2(own.staged(0, r)), of_a = load_shared2(own.staged(1, r));
        pre *= a[r];
        store_pair(own.staged(0, r), add(q * dq[n], floats_of(pack(q * pre)) * of_q));
        store_pair(own.staged(1, r), add(x * da[n], floats_of(pack(x * before)) * of_a));
        float2 y = add(dq[n], pre * of_q), z = add(da[n], before * of_a);
        const Four same = own.pair(r, r);
        add_to(y, own.row(ROWS_K, r), same.zk);
        add_to(y, own.row(ROWS_B, r), same.zb);
        if (r > 0 || own.me.block > 0) {   // with the row before
            const float2 near = own.neighbours(r);
            add_to(z, own.row(ROWS_K, r - 1), near.x);
            add_to(z, own.row(ROWS_B, r - 1), near.y);
        }
        to.store(r, y, z);
    }
}
// dk and db of half H of a lane's rows. In place of the sums of dk: what k and b of row r and those behind it write for
// later tokens
template <int H> LA_DEVICE void store_writers(float2& suf, float2& later, const float2 (&a)[ROWS], const Places& to,
                                              const OwnBlock& own) {
    float2 dk[HALF], db[HALF];
    write_pairs<H>(dk, db, a, own);
#pragma unroll
    for (int n = HALF - 1; n >= 0; n--) {
        const int r = HALF * H + n;
        const float2 k = own.row(ROWS_K, r), b = own.row(ROWS_B, r), q = own.row(ROWS_Q, r);
        const float2 of_k = load_shared2(own.staged(2, r)), of_b = load_shared2(own.staged(3, r));
        const float2 dot =
            add(add(k * dk[n], floats_of(pack(k * suf)) * of_k), add(b * db[n], floats_of(pack(b * suf)) * of_b));
        if (own.me.block * ROWS + r != own.count - 1)
            later = add(later, dot);   // the last token's writes cross no decay of the chunk
        store_pair(own.staged(2, r), later);
        float2 y = add(dk[n], suf * of_k), z = add(db[n], suf * of_b);
        const Four same = own.pair(r, r);
        add_to(y, q, same.zk);
        add_to(z, q, same.zb);
        if (r + 1 < ROWS || own.me.block < 3) {   // with the row behind
            const float2 near = own.neighbours(r + 1), x = own.row(ROWS_A, r + 1);
            add_to(y, x, near.x);
            add_to(z, x, near.y);
        }
        to.store(r, y, z);
        suf *= a[r];
    }
}
// In place of the dots of q: what of q and a crosses row r's token and those before it, of row r and those behind it;
// and of the block
LA_DEVICE float2 sum_readers(const OwnBlock& own) {
    float2 later = {0.f, 0.f};
#pragma unroll
    for (int r = ROWS - 1; r >= 0; r--) {
        later = add(later, load_shared2(own.staged(0, r)));
        store_pair(own.staged(0, r), later);
        later = add(later, load_shared2(own.staged(1, r)));
    }
    return later;
}
