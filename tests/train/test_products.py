"""Products by cuBLAS and graphs of functions: what CuPy's stubs see, or a GPU."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.runtime.cuda import graphs, launch, products
from tests.cuda.emulation import device, emulated, public  # noqa: F401

from .device import NOT_SUPPORTED, cupy  # noqa: F401

STORAGE = [np.dtype(x) for x in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)]
LAYOUTS = {  # x, W: rows, columns, of a few columns of a larger array, of every second number, batches
    "rows": lambda xp, x, W: (x, W),
    "one matrix": lambda xp, x, W: (x[0], W),
    "turned": lambda xp, x, W: (x.swapaxes(-2, -1).copy().swapaxes(-2, -1), W.T.copy().T),
    "parts": lambda xp, x, W: (x.repeat(3, -1)[..., : x.shape[-1]], W.repeat(2, -1)[..., : W.shape[-1]]),
    "apart": lambda xp, x, W: (x.repeat(2, -1)[..., ::2], W.repeat(2, -1)[..., ::2]),
    "each its own": lambda xp, x, W: (x, xp.stack([W, W + W, -W])),
    "of one": lambda xp, x, W: (x[1], xp.stack([W, W + W, -W])),
    "one row": lambda xp, x, W: (x[:, :1], W),
    "one column": lambda xp, x, W: (x, W[:, :1]),
    "one product": lambda xp, x, W: (x[..., :1], W[:1]),
}


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products(cupy, layout, dtype):  # noqa: F811
    rng = np.random.default_rng(0)
    drawn = [cupy.bring(rng.standard_normal(s).astype(dtype)) for s in ((3, 5, 7), (7, 4))]
    x, W = LAYOUTS[layout](cupy.xp, *drawn)
    exact = np.matmul(*(np.asarray(cupy.see(z)).astype(np.float64) for z in (x, W)))
    found = products.product(x, W)
    assert found.shape == exact.shape
    assert found.dtype == dtype
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(cupy.see(found).astype(np.float64), exact, rtol=eps, atol=16 * eps)
    if cupy.launched is not None:
        assert cupy.blas.calls == ["create", "product"]


def test_products_of_other_arrays_are_those_of_their_library(cupy):  # noqa: F811
    x, W = (cupy.bring(np.ones((2, 2), t)) for t in (np.float32, np.float64))
    assert cupy.see(products.product(x, W)).tolist() == [[2, 2], [2, 2]]
    assert products.product(x[:0], x).shape == (0, 2)
    if cupy.launched is not None:
        assert not cupy.blas.calls


def test_an_error_of_the_library_is_one(cupy):  # noqa: F811
    if cupy.launched is None:
        pytest.skip("cuBLAS makes none")
    cupy.blas.status = NOT_SUPPORTED
    with pytest.raises(RuntimeError, match="cublasCreate_v2: cuBLAS returned the status 15"):
        products.product(*2 * (cupy.bring(np.ones((2, 2), np.float32)),))


def test_cupy_multiplies_where_the_library_is_not_found(monkeypatch):
    def not_there():
        raise OSError

    cuda = SimpleNamespace(runtime=SimpleNamespace(runtimeGetVersion=lambda: 1_234_000))
    cuda.device = SimpleNamespace(get_cublas_handle=lambda: 1)
    monkeypatch.setattr(launch, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(products, "_libraries", {})
    assert products.library() is None  # there is no libcublas.so.1234
    x = np.ones((2, 2), np.float32)
    assert products.product(x, x).tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize("dtype", STORAGE[:2], ids=str)
def test_dense_layers_in_16_bits_are_products_in_16_bits(cupy, dtype):  # noqa: F811
    """Rounded once, gradients too; with a bias they are float32, rounded at the end."""
    rng = np.random.default_rng(0)
    x, W, dy = (rng.standard_normal(s).astype(dtype) for s in ((2, 70, 9), (9, 6), (2, 70, 6)))
    for bias in (None, np.ones(6, dtype)):
        more = [] if bias is None else [cupy.bring(bias)]
        y, pullback = la.vjp(la.nn.linear, cupy.bring(x), cupy.bring(W), *more)
        grads = pullback(cupy.bring(dy))
        wide = [z.astype(np.float64) for z in (x, W, dy)]
        exact = [
            wide[0] @ wide[1] + (bias is not None),
            wide[2] @ wide[1].T,
            np.einsum("btk,btm->km", wide[0], wide[2]),
        ]
        for found, right in zip((y, grads.x, grads.weight), exact, strict=True):
            assert found.dtype == dtype
            eps = float(ml_dtypes.finfo(dtype).eps)
            np.testing.assert_allclose(cupy.see(found).astype(np.float64), right, rtol=eps, atol=1e-4)


def test_losses_of_hidden_states_do_not_wait_for_the_device(cupy, monkeypatch):  # noqa: F811
    """Many logits at a time, and a few rows at a time; a label of no column is NaN, one that is ignored 0."""
    from linattn_np.nn import ends

    def read(x):
        raise AssertionError("the host reads labels")

    rng = np.random.default_rng(0)
    x, W = (rng.standard_normal(s).astype(np.float32) for s in ((70, 9), (9, 6)))
    labels = rng.integers(0, 6, 70)
    labels[[3, 50]] = -100
    expected, pull = la.vjp(la.nn.cross_entropy, x.astype(np.float64), labels, W.astype(np.float64))
    exact = pull(1.0)
    monkeypatch.setattr(ends, "_on_host", read)
    for most in (1 << 25, 1):
        monkeypatch.setattr(ends, "NUMBERS_ON_DEVICE", most)
        monkeypatch.setattr(ends, "NUMBERS", 1)
        given = [cupy.bring(z) for z in (x, labels, W)]
        loss, pullback = la.vjp(la.nn.cross_entropy, *given)
        grads = pullback(1.0)
        assert np.isclose(float(loss), expected, rtol=1e-6)
        np.testing.assert_allclose(cupy.see(grads.x), exact.x, atol=1e-6)
        np.testing.assert_allclose(cupy.see(grads.weight), exact.weight, atol=1e-6)
        given[1][7] = 6
        assert np.isnan(float(la.nn.cross_entropy(*given)))


class Cuda:
    """The parts of CuPy that a capture needs, which note what is done."""

    def __init__(self, fails=False):
        self.done, self.fails = [], fails
        self.cuda = self
        self.MemoryPool = lambda allocate: SimpleNamespace(malloc=allocate)
        self.Memory, self.MemoryPointer = lambda size: size, lambda memory, offset: (memory, offset)
        self.stream = SimpleNamespace(begin_capture=lambda: self.done.append("begin"), end_capture=self.end)

    def end(self):
        self.done.append("end")
        if self.fails:
            raise RuntimeError("the capture was invalidated")
        return SimpleNamespace(launch=lambda stream: self.done.append("launch"))

    def get_current_stream(self):
        return self.stream

    def get_default_memory_pool(self):
        return SimpleNamespace(free_all_blocks=lambda: self.done.append("free"))

    def get_default_pinned_memory_pool(self):
        return SimpleNamespace(malloc=lambda size: ("pinned", size))

    def set_pinned_memory_allocator(self, malloc):
        self.pinned = malloc

    def using_allocator(self, malloc):
        import contextlib

        self.malloc = malloc
        return contextlib.nullcontext()

    def empty(self, shape, dtype):
        return np.empty(shape, dtype).view(Settable)


class Settable(np.ndarray):
    def set(self, x):
        self[...] = x


def test_a_graph_is_captured_once_and_holds_its_memory(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(launch, "cupy", lambda: cuda)

    def double(x):
        cuda.done.append("f")
        cuda.malloc(1 << 20) if "begin" in cuda.done else None
        return 2 * x

    own = graphs.Graphs(double, "double")
    assert own(np.ones(2)).tolist() == [2, 2]
    assert cuda.done == ["f"]
    for _ in range(2):
        own(np.ones(2))
    assert cuda.done == ["f", "free", "begin", "f", "end", "launch", "launch"]
    assert own._memory == [(1 << 20, 0)]
    assert cuda.pinned(4) == ("pinned", 4)
    for n in range(20):  # shapes without a graph are called
        own(np.ones(n))
    assert len(own._inputs) == graphs.MOST
    assert own(np.ones(19)).tolist() == [2.0] * 19
    own.clear()
    assert not own._memory
    assert own(np.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("fails", [False, True])
def test_what_copies_from_the_host_is_not_captured(monkeypatch, fails):
    cuda, calls = Cuda(fails), []
    monkeypatch.setattr(launch, "cupy", lambda: cuda)

    def table(x):
        calls.append(x.copy())
        if "begin" in cuda.done and "end" not in cuda.done:
            cuda.pinned(8)
        return x

    own = graphs.Graphs(table, "table")
    own(np.ones(2))
    with pytest.warns(UserWarning, match="table is not one CUDA graph: RuntimeError: an array of the host is copied"):
        found = own(np.full(2, 3.0))
    assert found.tolist() == [3, 3]
    assert cuda.done == ["free", "begin", "end"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert own(np.full(2, 4.0)).tolist() == [4, 4]  # it is not tried again
    assert len(calls) == 4
    assert cuda.pinned(4) == ("pinned", 4)


def test_what_draws_numbers_is_not_captured(monkeypatch):
    """A graph would repeat the mask of its capture."""
    cuda, rng = Cuda(), np.random.default_rng(0)
    monkeypatch.setattr(launch, "cupy", lambda: cuda)
    own = graphs.Graphs(lambda x: la.nn.dropout(np.asarray(x), rng=rng, p=0.5), "dropout")
    masks = [own(np.ones(64)).tolist()]
    with pytest.warns(UserWarning, match="RuntimeError: random numbers are drawn anew in each call"):
        masks.append(own(np.ones(64)).tolist())
    masks.append(own(np.ones(64)).tolist())
    assert len({str(mask) for mask in masks}) == 3


@pytest.mark.gpu
def test_a_graph_on_a_device_has_the_bits_of_its_calls():
    """Products of cuBLAS and temporary memory in a graph, other work between its launches."""
    cp = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    W = cp.asarray(rng.standard_normal((256, 256)).astype(np.float32))

    def f(x):
        y = products.product(x, W)
        return products.product(cp.tanh(y), W.T) + 1

    with cp.cuda.Stream(non_blocking=True):
        cp.cuda.Device().synchronize()
        own = graphs.Graphs(f, "f")
        for _ in range(4):
            x = rng.standard_normal((128, 256)).astype(np.float32)
            found = own(x)
            other = [cp.full(1 << n, cp.nan, np.float32) for n in range(8, 22)]
            assert found.get().tobytes() == f(cp.asarray(x)).get().tobytes()
            assert all(bool(cp.isnan(y).all()) for y in other)
        assert len(own._graphs) == 1


@pytest.mark.gpu
def test_what_copies_from_the_host_is_not_captured_on_a_device():
    cp = pytest.importorskip("cupy")
    with cp.cuda.Stream(non_blocking=True):
        own = graphs.Graphs(lambda x: x + cp.asarray(np.arange(3.0)), "f")
        own(np.ones(3))
        with pytest.warns(UserWarning, match="f is not one CUDA graph"):
            found = own(np.ones(3))
        assert found.get().tolist() == [1, 2, 3]
