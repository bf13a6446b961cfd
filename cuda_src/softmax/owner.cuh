// The work of a block of the kernels of gates: tokens of a head of a sequence.
#pragma once
#include "arguments/ops/Rows.cuh"
#include "softmax/decays.cuh"

#include "arguments/softmax/GateArguments.cuh"

constexpr int BLOCK = 128;   // tokens of a block of the gradients (place.cuh)

struct Owner {   // of a block: a sequence and a head
    int sequence, head, T;
    i64 batch, first;

    __device__ __forceinline__ Owner(const GateArguments& a, int pair)
        : sequence(pair / a.heads), head(pair % a.heads) {
        first = a.offsets ? a.offsets[sequence] : 0;
        batch = a.offsets ? 0 : sequence;
        T = a.offsets ? (int)(a.offsets[sequence + 1] - first) : a.T;
    }
    __device__ __forceinline__ i64 numbers(const GateArguments& a) const {
        return (batch * a.heads + head) * a.T + first;
    }
    // of the first block of 128 tokens of a head (or of what some heads share) among those of all heads and sequences
    __device__ __forceinline__ i64 slot(const GateArguments& a, int head) const {
        return (i64)head * a.slots + (a.offsets ? first / BLOCK + sequence : (i64)sequence * a.blocks);
    }
    __device__ __forceinline__ const char* gates(const Rows& g) const {
        return g.data + batch * g.batch + first * g.token + (i64)((u32)head / (u32)g.group) * g.head;
    }
};
