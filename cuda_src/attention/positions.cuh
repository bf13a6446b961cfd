// States at positions: those that a pass goes by at the ends of some chunks are stored, or gradients of them are added (LA_AT 1).
#pragma once
#include "attention/state.cuh"

#ifndef LA_AT   // 1: the arguments name positions
#define LA_AT 0
#endif

// the number of the position at the end of a chunk of the sequence, -1 if there is none
template <class Arguments> LA_DEVICE int position_after(const Arguments& a, int chunk) { return LA_AT ? __ldg(a.at_chunks + chunk) : -1; }

// heads that share a state have one slot, of the first of them; sequences are batch rows
template <class Arguments> LA_DEVICE bool has_position(const Arguments& a, int index, int head) { return LA_AT && index >= 0 && (u32)head % (u32)a.at_group == 0; }
template <class Arguments, class W> LA_DEVICE i64 position_slot(const Arguments& a, int index, const W& traversal) {
    return ((i64)(int)traversal.sequence.row * a.at_count + index) * ((u32)a.heads / (u32)a.at_group) + (u32)traversal.head / (u32)a.at_group;
}
template <int ROWS, int WIDTH, class X, class Arguments, class W> LA_DEVICE void store_position(X& state, const Arguments& a, int index, const W& traversal, int row, int lane) {
    if (has_position(a, index, traversal.head)) state.template store<ROWS, WIDTH>(a.at, position_slot(a, index, traversal), row, lane);
}
template <int ROWS, int WIDTH, class X, class Arguments, class W> LA_DEVICE void add_position(X& dstate, const Arguments& a, int index, const W& traversal, int row, int lane) {
    if (has_position(a, index, traversal.head))
        dstate.template each_at<ROWS, WIDTH>(a.at, position_slot(a, index, traversal), row, lane, [](const float* p, float& y, bool valid) { if (valid) y += *p; });
}
