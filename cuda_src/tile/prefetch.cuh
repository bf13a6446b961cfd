// Requests to bring memory into the L2 cache ahead of its bulk copy (bulk.cuh); nothing waits for them.
#pragma once
#include "tile/bulk.cuh"

LA_DEVICE void box_prefetch(const TensorMap& map, int column, int head, int token, int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(column),
                 "r"(head), "r"(token), "r"(batch)
                 : "memory");
}
