"""Tile operations, each in a small kernel against its NumPy twin."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.runtime.cuda import launch, nvrtc
from linattn_np.runtime.cuda.compile import architecture, compile_source
from linattn_np.runtime.cuda.sources import of_text

KINDS = {"bfloat16": (0, 2), "float16": (1, 2), "float32": (2, 4)}
BOUND = {"bfloat16": 1e-6, "float16": 1e-6, "float32": 2e-6}  # inputs are exact: only the sums round

# X Y^T and X^T Y of two 64 x LA_K tiles by one warp, through every load and the product
PRODUCTS = """
#include "attention/config.cuh"
#include "tile/copy.cuh"
typedef Tile<LA_K, Element::BYTES> X;
extern "C" __global__ void entry(const char* x, const char* y, float* rows, float* columns) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 at = shared_address(memory), bt = at + 64 * X::ROW;
    const int lane = threadIdx.x;
    for (int i = lane; i < 64 * X::ROW / LA_ALIGN; i += 32) {
        const int r = i / (X::ROW / LA_ALIGN), byte = i % (X::ROW / LA_ALIGN) * LA_ALIGN;
        copy_in<LA_ALIGN>(at + X::piece(r, byte / 16) + byte % 16, x + i * LA_ALIGN, true);
        copy_in<LA_ALIGN>(bt + X::piece(r, byte / 16) + byte % 16, y + i * LA_ALIGN, true);
    }
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    auto write = [&](float* out, int width, int row, int column, const float (&c)[2][4]) {
        for (int n = 0; n < 8; n++) {
            const int r = row + (lane >> 2) + (n >> 1 & 1) * 8, d = column + (n >> 2) * 8 + (lane & 3) * 2 + (n & 1);
            out[r * width + d] = c[n >> 2][n & 3];
        }
    };
    for (int row = 0; row < 64; row += 16)
        for (int column = 0; column < 64; column += 16) {
            float c[2][4] = {};
            for (int d = 0; d < LA_K; d += 16) {
                Element::B b[2];
                const auto a = Element::operand(load_a_rows<Element, X>(at, row, d, lane));
                load_b_rows<Element, X>(b, bt, column, d, lane);
                Element::multiply(c[0], a, b[0]);
                Element::multiply(c[1], a, b[1]);
            }
            write(rows, 64, row, column, c);
        }
    for (int row = 0; row < LA_K; row += 16)
        for (int column = 0; column < LA_K; column += 16) {
            float c[2][4] = {};
            for (int t = 0; t < 64; t += 16) {
                Element::B b[2];
                const auto a = Element::operand(load_a_columns<Element, X>(at, t, row, lane));
                load_b_columns<Element, X>(b, bt, t, column, lane);
                Element::multiply(c[0], a, b[0]);
                Element::multiply(c[1], a, b[1]);
            }
            write(columns, LA_K, row, column, c);
        }
}
"""

# accumulators (value row, token) to rows of tokens
STORES = """
#include "attention/store.cuh"
typedef Tile<32, Element::BYTES> X;
extern "C" __global__ void entry(const float* x, char* y) {   // x: (32 rows, 64 tokens), y: (50 tokens, 30 columns)
    extern __shared__ __align__(128) unsigned char memory[];
    const int lane = threadIdx.x;
    float out[2][8][4];
    for (int m = 0; m < 2; m++)
        for (int i = 0; i < 8; i++)
            for (int n = 0; n < 4; n++)
                out[m][i][n] = x[(m * 16 + (lane >> 2) + (n >> 1) * 8) * 64 + i * 8 + (lane & 3) * 2 + (n & 1)];
    stage_rows<Element, X, 2, 64>(out, shared_address(memory), 0, lane);
    store_rows<X, 64, 32, 30>(y, 30 * Element::BYTES, shared_address(memory), LA_REVERSE ? 49 : 0, 50, 0, 0, lane);
}
"""

SUMS = """
#include "tile/reduce.cuh"
extern "C" __global__ void entry(const float* x, float* prefix, float* all, float* columns) {   // x: (32 lanes, 16)
    const int lane = threadIdx.x;
    float y[16];
    for (int i = 0; i < 16; i++) y[i] = x[lane * 16 + i];
    prefix[lane] = prefix_sum(y[0], lane);
    all[lane] = warp_sum(y[0]);
    column_sums<16>(y, lane);
    for (int i = 0; i < 2; i++) columns[(lane & 3) * 16 + column_eighth(lane) * 2 + i] = y[i];
}
"""


def constants(dtype, **more):
    return {"LA_DTYPE": KINDS[dtype][0], **more}


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", KINDS)
def test_they_compile(arch, dtype):
    for text, more in ((PRODUCTS, {"LA_K": 48}), (STORES, {"LA_ALIGN": 4}), (SUMS, {})):
        cubin, *_ = compile_source(of_text("tile_test.cu", text), constants(dtype, **more), arch, cached=False)
        assert cubin.startswith(b"\x7fELF")


@pytest.fixture
def run(tmp_path):
    cp = pytest.importorskip("cupy")

    def run(text, given, *arrays, threads=32, shared=48 * 1024):
        cubin, *_ = compile_source(
            of_text("tile_test.cu", text), given, architecture(launch.capability()), cached=False
        )
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.cubin"
        path.write_bytes(cubin)
        kernel = cp.RawModule(path=str(path)).get_function("entry")
        there = [cp.asarray(x) for x in arrays]
        kernel((1,), (threads,), tuple(there), shared_mem=shared)
        return [x.get() for x in there]

    return run


def typed(dtype):
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("K", [16, 32, 48, 64, 96])
@pytest.mark.parametrize("align", [16, 8, 4, 2])
def test_products(run, dtype, K, align):
    if align < KINDS[dtype][1]:
        pytest.skip("an element is wider")
    rng = np.random.default_rng(K)
    x, y = rng.standard_normal((2, 64, K)).astype(typed(dtype))
    rows, columns = np.full((64, 64), np.nan, np.float32), np.full((K, K), np.nan, np.float32)
    given = constants(dtype, LA_K=K, LA_ALIGN=align)
    _, _, rows, columns = run(PRODUCTS, given, x.view(np.uint8), y.view(np.uint8), rows, columns)
    x, y = x.astype(np.float64), y.astype(np.float64)
    assert np.abs(rows - x @ y.T).max() <= BOUND[dtype] * np.abs(x @ y.T).max()
    assert np.abs(columns - x.T @ y).max() <= BOUND[dtype] * np.abs(x.T @ y).max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("reverse", [0, 1])
def test_rows_are_stored(run, dtype, reverse):
    x = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    y = np.full((50, 30), 7).astype(typed(dtype))
    given = constants(dtype, LA_ALIGN=4, LA_REVERSE=reverse)
    found = run(STORES, given, x, y.view(np.uint8))[1].view(y.dtype).reshape(y.shape)
    expected = x[:30, :50].T.astype(y.dtype)
    assert (found == (expected[::-1] if reverse else expected)).all()


@pytest.mark.gpu
def test_sums(run):
    x = np.random.default_rng(0).integers(-8, 8, (32, 16)).astype(np.float32)  # exact in any order
    empty = np.full(32, np.nan, np.float32)
    _, prefix, everything, columns = run(SUMS, {}, x, empty, empty, np.full((4, 16), np.nan, np.float32))
    assert (prefix == np.cumsum(x[:, 0])).all()
    assert (everything == x[:, 0].sum()).all()
    assert (columns == x.reshape(8, 4, 16).sum(axis=0)).all()
