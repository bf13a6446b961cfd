"""Warpgroup products on panels, and a ring of stages, each in a small kernel against its NumPy twin."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.runtime.cuda import launch, nvrtc
from linattn_np.runtime.cuda.compile import architecture, compile_source
from linattn_np.runtime.cuda.sources import of_text

# x, y: (64, 128), z: (64, 64), row by row; one warpgroup
PRODUCTS = """
#include "attention/group.cuh"
#include "tile/copy.cuh"
typedef Panels<128, 64> X;
typedef Panels<64, 64> Z;
template <class P> LA_DEVICE void load(u32 at, const char* x) {
    constexpr int PER_ROW = P::ROW / 16;
    for (int i = threadIdx.x; i < P::SIZE / 16; i += 128)
        copy_in<16>(at + P::piece(i / PER_ROW, i % PER_ROW), x + i * 16, true);
}
extern "C" __global__ void entry(const char* x, const char* y, const char* z, float* rows, float* columns,
                                 float* values, float* state) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 at = (shared_address(memory) + 1023) & ~1023, bt = at + X::SIZE, ct = bt + X::SIZE;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    load<X>(at, x);
    load<X>(bt, y);
    load<Z>(ct, z);
    copy_commit();
    copy_wait<0>();
    publish_shared();
    __syncthreads();
    const u64 a = panel_descriptor(at), b = panel_descriptor(bt), c = panel_descriptor(ct);
    float p[8][4], q[8][4], r[8][4];
    StateRows<1, 128> S;
    S.clear();
    u32 operand[4][4];
    for (int t = 0; t < 4; t++) load_operand<X>(operand[t], at, t * 16, warp * 16, lane);
    products_begin();
#pragma unroll
    for (int d = 0; d < 8; d++) product<0, 0>(p, a + X::along(d), b + X::along(d), d > 0);   // X Y^T
#pragma unroll
    for (int t = 0; t < 4; t++)
        product<1, 1>(q, a + X::panel(1) + X::across(t), b + X::across(t), t > 0);   // X[:, 64:]^T Y[:, :64]
#pragma unroll
    for (int t = 0; t < 4; t++) product<0, 0>(r, operand[t], c + Z::along(t), t > 0);   // X[:, :64]^T Z^T
#pragma unroll
    for (int t = 0; t < 4; t++) write_state<X>(S, operand[t], b + X::across(t));   // X[:, :64]^T Y
    products_commit();
    products_wait<0>();
    accumulator_fence(p);
    accumulator_fence(q);
    accumulator_fence(r);
    accumulator_fence(S.x[0]);
    auto write = [&](float* out, int width, int n, const float (&c)[4]) {
        const int row = warp * 16 + (lane >> 2), column = n * 8 + (lane & 3) * 2;
        for (int i = 0; i < 4; i++) out[(row + (i >> 1) * 8) * width + column + (i & 1)] = c[i];
    };
#pragma unroll
    for (int n = 0; n < 8; n++) write(rows, 64, n, p[n]), write(columns, 64, n, q[n]), write(values, 64, n, r[n]);
#pragma unroll
    for (int n = 0; n < 16; n++) write(state, 128, n, S.x[0][n]);
}
"""

# 128 threads fill two stages, half by copies and half by stores; each of 128 others sums all numbers of a stage
RING = """
#include "tile/barrier.cuh"
#include "tile/copy.cuh"
constexpr int STAGES = 2;
extern "C" __global__ void __launch_bounds__(256, 1) entry(const float* x, float* sums, int steps) {
    // x: (steps, 256), sums: (steps, 128)
    __shared__ float stages[STAGES][256];
    __shared__ u64 barriers[2 * STAGES];
    const Ring<STAGES> ring = {shared_address(barriers)};
    if (threadIdx.x == 0) ring.init(2 * 128, 128);
    __syncthreads();
    const int thread = threadIdx.x & 127;
    if (threadIdx.x < 128) {
        for (int step = 0; step < steps; step++) {
            ring.wait_empty(step);
            copy_in<4>(shared_address(&stages[step % STAGES][thread]), x + step * 256 + thread, true);
            stages[step % STAGES][128 + thread] = x[step * 256 + 128 + thread];
            ring.arrive_full(step);
        }
        copy_wait<0>();
    } else
        for (int step = 0; step < steps; step++) {
            ring.wait_full(step);
            float sum = 0.f;
            for (int i = 0; i < 256; i++) sum += stages[step % STAGES][i];
            ring.arrive_empty(step);
            sums[step * 128 + thread] = sum;
        }
}
"""


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("text", [PRODUCTS, RING])
def test_they_compile(text):
    cubin, *_ = compile_source(of_text("wgmma_test.cu", text), {"LA_C": 64, "LA_WARPS": 4}, "sm_90a", cached=False)
    assert cubin.startswith(b"\x7fELF")


@pytest.fixture
def run(tmp_path):
    cp = pytest.importorskip("cupy")
    if launch.capability() != 90:
        pytest.skip("needs compute capability 90")

    def run(text, threads, *arrays):
        cubin, *_ = compile_source(
            of_text("wgmma_test.cu", text), {"LA_C": 64, "LA_WARPS": 4}, architecture(launch.capability()), cached=False
        )
        path = tmp_path / "kernel.cubin"
        path.write_bytes(cubin)
        kernel = cp.RawModule(path=str(path)).get_function("entry")
        there = [cp.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays]
        kernel((1,), (threads,), tuple(there), shared_mem=48 * 1024 if text is PRODUCTS else 0)
        return [x.get() if hasattr(x, "get") else x for x in there]

    return run


@pytest.mark.gpu
def test_products(run):
    kind = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 64, 128)).astype(kind)
    z = rng.standard_normal((64, 64)).astype(kind)
    empty = [np.full((64, n), np.nan, np.float32) for n in (64, 64, 64, 128)]
    found = run(PRODUCTS, 128, *(a.view(np.uint8) for a in (x, y, z)), *empty)[3:]
    x, y, z = (a.astype(np.float64) for a in (x, y, z))
    for a, b in zip(found, (x @ y.T, x[:, 64:].T @ y[:, :64], x[:, :64].T @ z.T, x[:, :64].T @ y), strict=True):
        assert np.abs(a - b).max() <= 1e-6 * np.abs(b).max()


@pytest.mark.gpu
def test_ring(run):
    x = np.random.default_rng(0).integers(-8, 8, (37, 256)).astype(np.float32)  # exact in any order
    sums = run(RING, 256, x, np.full((37, 128), np.nan, np.float32), np.int32(37))[1]
    assert (sums == x.sum(axis=1, keepdims=True)).all()
