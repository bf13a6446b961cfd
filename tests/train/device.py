"""Training on CuPy arrays without a GPU: stubs of CuPy, of its streams and of cuBLAS; kernels are emulated."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import array_api_compat
import ml_dtypes
import numpy as np
import pytest

from linattn_np.runtime.cuda import graphs, launch, products
from tests.cuda.emulation import device, emulated, public  # noqa: F401
from tests.matrix_state.cuda.step_twin import CUPY, Stub, stub
from tests.matrix_state.cuda.token.host import allocated

KINDS = {0: np.dtype(np.float32), 1: np.dtype(np.float64), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}
OK, NOT_SUPPORTED = 0, 15


class Blas:
    """cuBLAS on a host; `calls` are the names of its functions that were called."""

    def __init__(self):
        self.calls, self.workspace, self.status = [], None, OK

    def cublasCreate_v2(self, made):
        self.calls.append("create")
        return self.status

    def cublasSetMathMode(self, handle, mode):
        assert mode == products.EXACT_SUMS
        return OK

    def cublasSetStream_v2(self, handle, stream):
        self.workspace = None
        return OK

    def cublasSetWorkspace_v2(self, handle, pointer, size):
        assert pointer % 256 == 0
        assert products.LEAST <= size <= products.WORKSPACE
        self.workspace = pointer
        return OK

    def cublasGemmStridedBatchedEx(self, handle, turn_a, turn_b, m, n, k, alpha, a, kind_a, lead_a, apart_a, b, kind_b,
                                   lead_b, apart_b, beta, c, kind_c, lead_c, apart_c, count, sums, how):  # fmt: skip
        assert self.workspace is not None
        assert how == -1
        assert sums == (products.DOUBLE if kind_a == 1 else products.FLOAT)
        assert lead_a >= (k if turn_a else m)
        assert lead_b >= (n if turn_b else k)
        assert lead_c >= m
        wide = np.float64 if kind_a == 1 else np.float32
        real = ctypes.c_double if kind_a == 1 else ctypes.c_float
        assert (real.from_address(alpha).value, real.from_address(beta).value) == (1, 0)
        self.calls.append("product")

        def matrix(at, kind, rows, columns, lead, n):
            """By columns, `lead` numbers apart."""
            item = KINDS[kind].itemsize
            size = ((columns - 1) * lead + rows) * item
            raw = np.frombuffer((ctypes.c_uint8 * size).from_address(at + n * item), np.uint8)
            return np.ndarray((rows, columns), KINDS[kind], raw.data, 0, (item, lead * item))

        for i in range(count):
            A = matrix(a, kind_a, *((k, m) if turn_a else (m, k)), lead_a, i * apart_a).astype(wide)
            B = matrix(b, kind_b, *((n, k) if turn_b else (k, n)), lead_b, i * apart_b).astype(wide)
            matrix(c, kind_c, m, n, lead_c, i * apart_c)[...] = (A.T if turn_a else A) @ (B.T if turn_b else B)
        return self.status


class Stream:
    """A stream; `capturing`: between begin and end."""

    ptr, capturing = 7, False

    def __init__(self, non_blocking=False):
        assert non_blocking

    def __enter__(self):
        Stream.current = self
        return self

    def __exit__(self, *error):
        Stream.current = None

    def synchronize(self):
        assert not self.capturing, "a stream that is captured cannot be waited for"

    def begin_capture(self):
        self.capturing = True

    def end_capture(self):
        self.capturing = False
        return SimpleNamespace(launch=lambda stream: None)


class Device:
    """A device as a context."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def synchronize(self):
        pass


def put(x, y):
    """CuPy's ndarray.set"""
    assert type(y) is np.ndarray
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    np.copyto(x, y)


@pytest.fixture
def cupy(public, monkeypatch):  # noqa: F811
    """CuPy's stub; `blas` its cuBLAS. Of a GPU: CuPy."""
    if public.launched is None:
        return public
    blas, real = Blas(), array_api_compat.array_namespace

    def namespace(*arrays, **how):
        return CUPY if any(isinstance(x, Stub) for x in arrays) else real(*arrays, **how)

    stubs = launch.cupy()
    own = stubs.cuda
    own.Stream, own.Device, own.device = Stream, Device, SimpleNamespace(get_cublas_handle=lambda: 1)
    own.runtime.getDeviceCount = lambda: 1
    own.get_current_stream = lambda n=-1: Stream.current or SimpleNamespace(ptr=0)
    Stream.current = None
    module = SimpleNamespace(cuda=own, asarray=lambda x: stub(np.asarray(x)), ascontiguousarray=CUPY.ascontiguousarray,
                             empty=lambda shape, dtype: stub(np.empty(shape, dtype)))  # fmt: skip
    monkeypatch.setattr(array_api_compat, "array_namespace", namespace)
    monkeypatch.setattr(Stub, "set", put, raising=False)
    monkeypatch.setattr(Stub, "device", Device(), raising=False)
    monkeypatch.setattr(Device, "id", 0, raising=False)
    monkeypatch.setattr(launch, "cupy", lambda: module)
    monkeypatch.setattr(launch, "allocator", lambda: allocated)
    monkeypatch.setattr(products, "library", lambda: blas)
    monkeypatch.setattr(products, "_handles", products._Handles())
    monkeypatch.setattr(graphs.Graphs, "_captured", repeated)
    return SimpleNamespace(**vars(public), blas=blas)


def repeated(self, inputs):
    """Stands for a capture: nothing is computed by it, and a launch computes f anew into the first results."""
    step = self._f.__self__
    run = step.task.run
    kept = [run.params.vector, step._numbers, *(x.vector for x in run.moments.values())]
    before = [x.copy() for x in kept]
    found = self._f(*inputs)
    for x, y in zip(kept, before, strict=True):
        x[...] = y
    results = found if isinstance(found, tuple) else (found,)

    def launch_graph(stream):
        again = self._f(*inputs)
        for x, y in zip(results, again if isinstance(again, tuple) else (again,), strict=True):
            x[...] = y

    for x in results:
        x[...] = np.nan
    graphs_made.append(self)
    return SimpleNamespace(launch=launch_graph), found


graphs_made = []
