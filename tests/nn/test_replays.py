"""Repeated calls of pieces on CuPy arrays are recorded launches: same bits, no other work of the host."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import device as device_plans
from linattn_np.call.replay import plans
from linattn_np.nn import declaration, destination
from linattn_np.nn.declaration import PIECES, Piece
from linattn_np.runtime import pools
from linattn_np.runtime.cuda import launch
from tests.cuda import emulation
from tests.cuda.emulation import device, emulated, public  # noqa: F401
from tests.matrix_state.cuda.step_twin import CUPY, Stub, stub
from tests.matrix_state.cuda.token import host
from tests.nn.table import normal
from tests.nn.test_cuda_pieces import KERNELS, parts

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
cases = pytest.mark.parametrize("case", KERNELS, ids=lambda c: f"{c.name} {c.label}".strip())


def array(shape, dtype, at=None):
    """A new array, poisoned, or one at a place in memory."""
    return stub(np.full(shape, emulation.poison(dtype), dtype)) if at is None else host.array(shape, dtype, at)


@pytest.fixture
def gpu(public, monkeypatch):  # noqa: F811
    """CuPy's arrays, or stubs whose recorded launches are emulated; no plan is known."""
    monkeypatch.setattr(plans, "by_key", {})
    if public.launched is not None:
        loaded = []

        class Kernel(emulation.Kernel):
            def __init__(self, *how):
                super().__init__(*how)
                self.kernel = SimpleNamespace(ptr=len(loaded))
                loaded.append(self)

            def __call__(self, grid, block, arguments, shared_mem):
                self.size = arguments[0].nbytes
                sizes[self.file, self.entry] = self.size
                super().__call__(grid, block, arguments, shared_mem)

        sizes = {}

        def from_driver(kernel, blocks, y, z, threads, v, w, shared, stream, address, extra):
            own = loaded[kernel]
            at = ctypes.c_void_p.from_address(address).value
            own((blocks,), (threads,), (np.void(ctypes.string_at(at, sizes[own.file, own.entry])),), shared)

        cuda = launch.cupy().cuda
        cuda.driver = SimpleNamespace(launchKernel=from_driver)
        monkeypatch.setattr(launch, "cupy", lambda: SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(launch, "kernel", Kernel)
        monkeypatch.setattr(launch, "array_type", lambda: array)
        monkeypatch.setattr(launch, "allocator", lambda: host.allocated)
        monkeypatch.setattr(launch, "device_function", lambda: lambda: 0)
        monkeypatch.setattr(destination, "enter", declaration.enter)
        compat = SimpleNamespace(is_cupy_array=lambda x: isinstance(x, Stub), is_cupy_namespace=lambda xp: xp is CUPY,
                                 is_numpy_namespace=lambda xp: xp is not CUPY)  # fmt: skip
        monkeypatch.setattr(pools, "compat", compat)
        monkeypatch.setitem(plans.makers, Stub, device_plans.signature_maker(Stub))
    return public


def given_of(case, dtype, turn, bring):
    """Arrays of a case, others in each turn."""
    arrays = {n: np.roll(x, turn).astype(dtype) for n, x in case.arrays.items()}
    return {n: bring(np.ascontiguousarray(x)) for n, x in (arrays | dict(case.whole)).items()}


def in_full(monkeypatch):
    """Calls from here on are neither recorded nor replayed."""
    monkeypatch.setattr(plans, "makers", {Stub: None, **dict.fromkeys(plans.makers)})


def is_replayed(case, dtype):
    """Not ragged calls, drawn numbers, sums of 16-bit parameters and views of several losses by array calls."""
    if "ragged" in case.label or case.name in ("dropout", "cross_entropy"):
        return False
    finished = {("token_shift", "mix"), ("rotary", "angles"), ("rotary", "sums")}
    return (case.name, case.label) not in finished and (
        case.name != "log_decay" or case.label == "log_sigmoid" or dtype == np.float32
    )


@pytest.fixture
def entered(monkeypatch):
    """The names of the calls that were checked."""
    found, real = [], Piece.entered
    monkeypatch.setattr(Piece, "entered", lambda own, given: found.append(own.name) or real(own, given))
    return found


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
@cases
def test_a_repeated_call_is_its_launches_and_has_the_same_bits(gpu, monkeypatch, entered, case, dtype):
    def computed(turn):
        result, pullback = case.vjp(given_of(case, dtype, turn, gpu.bring))
        d = [np.roll(np.cos(np.arange(y.size)), turn).reshape(y.shape).astype(y.dtype) for y in parts(result)]
        return [*parts(result), *parts(pullback(*map(gpu.bring, d)))]

    found = [computed(turn) for turn in range(3)]
    assert (len(entered) == 1) == is_replayed(case, dtype)
    in_full(monkeypatch)
    for turn in range(3):
        for one, other in zip(found[turn], computed(turn), strict=True):
            assert gpu.see(one).tobytes() == gpu.see(other).tobytes()


@pytest.mark.parametrize("how", ["pool", "pool in int32", "state", "step", "returned"])
def test_one_token_of_a_convolution_is_replayed_in_place(gpu, monkeypatch, entered, how):
    D, N = 8, 3
    fn, step = la.nn.short_conv, how in ("step", "pool in int32")

    def computed():
        state, found = gpu.bring(normal(5 if "pool" in how else N, 3, D).astype(BFLOAT16)), []
        for turn in range(3):
            x = normal(N + turn, 1, D)[:N].astype(BFLOAT16)
            given = {"x": gpu.bring(np.ascontiguousarray(x[:, 0] if step else x)), "activation": "silu"}
            given |= {"weight": gpu.bring(normal(D, 4).astype(BFLOAT16)), "state": state}
            given |= {"return_state": True} if how == "returned" else {"overwrite_state": True}
            if "pool" in how:
                rows = np.roll([4, 0, 2], turn).astype(np.int32 if "int32" in how else np.int64)
                given["state_rows"] = gpu.bring(rows)
            result = la.step(fn, **given) if step else fn(**given)
            found += [gpu.see(y).copy() for y in (*parts(result), state)]
        return found

    found = computed()
    assert len(entered) == 1
    in_full(monkeypatch)
    for one, other in zip(found, computed(), strict=True):
        assert one.tobytes() == other.tobytes()


def test_another_option_dtype_or_shape_is_another_plan(gpu):
    x = normal(3, 8).astype(np.float32)
    for given, options in ((x, {}), (x, {"eps": 1.0}), (x[:2], {}), (x.astype(BFLOAT16), {})):
        for _ in range(2):
            y = gpu.see(la.nn.rms_norm(gpu.bring(given), **options))
            wide = la.nn.rms_norm(given.astype(np.float64), **options)
            assert y.dtype == given.dtype
            assert np.allclose(y.astype(np.float64), wide, atol=1e-2)
    of_numpy = [key for key in plans.by_key if any(x is np.dtype(np.float64) for x in key)]
    assert plans.count() - len(of_numpy) == 4


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
@cases
def test_a_repeated_call_with_out_is_its_launches(gpu, entered, case, dtype):
    """Also in place."""

    def checks(call):
        """How many of three calls were checked."""
        before = len(entered)
        for turn in range(3):
            call(turn, given_of(case, dtype, turn, gpu.bring))
        return len(entered) - before

    wanted, first = [], next(iter(case.arrays))
    count = checks(lambda turn, given: wanted.append(parts(case(given))[0]))

    def into(turn, given):
        out = gpu.bring(np.full(wanted[turn].shape, np.nan, wanted[turn].dtype))
        assert parts(case(given, out=out))[0] is out
        assert gpu.see(out).tobytes() == gpu.see(wanted[turn]).tobytes()

    def in_place(turn, given):
        case(given, out=given[first])
        assert gpu.see(given[first]).tobytes() == gpu.see(wanted[turn]).tobytes()

    assert checks(into) <= count
    if case.arrays[first].shape == wanted[0].shape and wanted[0].dtype == dtype:
        assert checks(in_place) <= count


def test_a_call_with_out_writes_there_each_time(gpu):
    for turn in range(3):
        x, out = normal(2 + turn, 8)[:2].astype(np.float32), gpu.bring(np.zeros((2, 8), np.float32))
        assert la.nn.silu(gpu.bring(x), out=out) is out
        assert np.allclose(gpu.see(out), la.nn.silu(x), atol=1e-6)


def test_errors_of_a_replayed_pullback_are_those_of_the_first(gpu, entered):
    x = gpu.bring(normal(2, 8).astype(np.float32))
    d = gpu.bring(np.ones((2, 8), np.float32))
    for _ in range(3):
        _, pullback = la.vjp(la.nn.silu, x)
        for wrong, error in (((), TypeError), ((d, d), TypeError), ((d[:1],), ValueError)):
            with pytest.raises(error, match="silu: "):
                pullback(*wrong)
        assert gpu.see(pullback(dout=d).x).tobytes() == gpu.see(pullback(d).x).tobytes()


def test_dtypes_of_cotangents_each_have_a_plan(gpu):
    x = gpu.bring(normal(2, 8).astype(np.float32))
    for _ in range(3):
        for dtype in (np.float32, BFLOAT16):
            _, pullback = la.vjp(la.nn.silu, x)
            dx = gpu.see(pullback(gpu.bring(np.ones((2, 8), dtype))).x)
            assert np.allclose(dx, la.vjp(la.nn.silu, gpu.see(x))[1](np.ones((2, 8), np.float32)).x, atol=1e-6)


def test_names_of_pieces_are_not_those_of_variants():
    assert not {p._named.name for p in PIECES.values()} & set(la.VARIANTS)
