// Which chunk of which sequence a slot of the states is: sequence n has those from its first on. Slots of a ragged
// batch are at least as many as chunks, and some stay unused.
#pragma once
#include "attention/tokens.cuh"

LA_DEVICE i64 first_slot(const i64* offsets, i64 n, int chunks) {
    return offsets == nullptr ? n * chunks : offsets[n] / LA_C + n;
}
// the sequence of a slot
LA_DEVICE int sequence_of_slot(const i64* offsets, i64 slot, int chunks, int sequences) {
    if (offsets == nullptr) return (int)(slot / chunks);
    int low = 0, high = sequences;   // first_slot(low) <= slot < first_slot(high)
    while (high - low > 1) {
        const int n = (low + high) / 2;
        if (first_slot(offsets, n, chunks) <= slot) low = n;
        else high = n;
    }
    return low;
}
LA_DEVICE const float* numbers_of(const Gate& y, const Sequence& s, u32 head) {   // of each token
    return y.data + s.row * y.batch + s.first * y.token + head / (u32)y.group * y.head;
}
