"""The host side of the CUDA step, against a twin of its kernel that works on the bytes it is given: no GPU."""

from __future__ import annotations

import ctypes
import functools
import struct
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import binding, device_replay, dispatch, replay, results
from linattn_np.call import vjp as call_vjp
from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda import calls as cuda_calls
from linattn_np.matrix_state.cuda import solve
from linattn_np.matrix_state.cuda import step as cuda_step
from linattn_np.matrix_state.cuda.arguments import SOLVE
from linattn_np.matrix_state.types import Decay, Erase, EraseKey, Inputs
from linattn_np.ops.cuda import complement
from linattn_np.ops.cuda.arguments import COMPLEMENT
from linattn_np.runtime import pools as rows
from linattn_np.runtime.arrays import Library, enter
from linattn_np.runtime.cuda import constants, launch, record
from tests.cases import has_plain_state, passes_through
from tests.core_cases import CELLS, case
from tests.matrix_state.cuda import step_twin
from tests.matrix_state.cuda.deferred import host as array_calls_host
from tests.matrix_state.cuda.step_twin import CUPY, Stub, device_plans, stub


class allocated:
    """Memory for what only kernels read, full of NaN."""

    def __init__(self, size):
        self.memory = stub(np.full(size, 0xFF, np.uint8))
        self.ptr = self.memory.data.ptr


@pytest.fixture
def launched(monkeypatch):
    """Launches go to the twin, those of CuPy's RawKernel and those of the driver; what was launched."""
    found, kernels = [], []

    class Kernel:
        def __init__(self, file, entry, constants):
            self.constants, self.kernel = constants, SimpleNamespace(ptr=len(kernels))
            self.keys = entry if file == complement.SOURCE else None
            self.file = file if file.startswith(array_calls_host.PREFIX) else None
            self.size = COMPLEMENT.size if self.keys else step_twin.SIZE
            if self.file:
                self.size = array_calls_host.size_of(file)
            self.solves = file == solve.FILE
            if self.solves:
                self.size = SOLVE.size
            self.around = file if file.startswith(array_calls_host.STEP_PREFIX) else None
            if self.around:
                self.size += array_calls_host.size_of(file)
            kernels.append(self)

        def __call__(self, grid, block, arguments, shared_mem):
            if self.file:
                array_calls_host.run(self.file, grid[0], arguments[0].tobytes())
                return
            if self.keys:
                step_twin.run_complement(self.keys, self.constants, arguments[0].tobytes())
                return
            if self.solves:
                step_twin.run_solve(grid[0], self.constants, arguments[0].tobytes())
                return
            found.append((self.constants, grid, block))
            step_twin.run.blocks = grid[0]
            told = arguments[0].tobytes()
            if self.around:
                array_calls_host.run_step(self.around, grid[0], told, functools.partial(step_twin.run, self.constants))
                return
            step_twin.run(self.constants, told)

    def from_driver(kernel, blocks, y, z, threads, v, w, shared, stream, address, extra):
        at = ctypes.c_void_p.from_address(address).value
        kernels[kernel]((blocks,), (threads,), (np.void(ctypes.string_at(at, kernels[kernel].size)),), shared)

    stream = SimpleNamespace(ptr=0, synchronize=lambda: None)
    runtime = SimpleNamespace(streamIsCapturing=lambda ptr: False, setDevice=lambda device: None)
    cuda = SimpleNamespace(driver=SimpleNamespace(launchKernel=from_driver), runtime=runtime,
                           get_current_stream=lambda device=-1: stream)
    monkeypatch.setattr(launch, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(launch, "kernel", lambda file, entry, constants, shared: Kernel(file, entry, constants))
    monkeypatch.setattr(launch, "array_type", lambda: lambda shape, dtype: stub(np.full(shape, np.nan, dtype)))
    monkeypatch.setattr(launch, "allocator", lambda: allocated)
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "device_function", lambda: lambda: 0)
    monkeypatch.setattr(launch, "unusable", lambda: None)
    monkeypatch.setattr(launch, "shared_limit", lambda: 227 << 10)
    return found


def there(x):
    return Inputs(*(None if y is None else stub(y) if y.strides and 0 not in y.strides else y.view(Stub) for y in x))


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
@pytest.mark.parametrize("sizes", [{"K": 8, "V": 4}, {"K": 5, "V": 3, "heads": (1, 1, 4)}, {"K": 130, "V": 1},
                                   {"heads": (4, 2, 2)}, {"offsets": [0, 2, 2, 5], "B": 1}])
def test_every_cell(launched, cell, sizes):
    x, plan, state, *_ = case(*cell, T=5, dtype=np.float32, C=None, **sizes)
    if cell[2] == "bonus" and sizes.get("heads") == (4, 2, 2):
        pytest.skip("a bonus has the heads of the values")
    expected, end, _ = recurrence.forward(x, plan, state)
    x2 = there(x)
    if cell[1] == "delta":
        x2 = x2._replace(r=x2.k) if np.array_equal(x.r, x.k) else x2
    out2, end2, _ = cuda_step.forward(x2, plan._replace(xp=CUPY), stub(state))
    assert np.abs(out2 - expected).max() < 1e-5
    assert np.abs(end2 - end).max() < 1e-5
    assert not np.isnan(out2).any()
    assert cuda_step.unsupported_reason(matrix_state.Call(x2, plan._replace(xp=CUPY))) is None
    assert policy.is_short_cuda(plan)


def test_one_token_has_a_kernel_of_its_own(launched):
    """Where its strides are short, rows of the state lie behind one another and a query reads a state of its own."""
    def launch_of(T=1, K=8, V=4, heads=(2, 1, 2), turn=lambda x, state: (x, state), **more):
        x, plan, state, *_ = case("scalar", "delta", "after", T, None, heads, K, V, dtype=np.float32, **more)
        expected, end, _ = recurrence.forward(x, plan, state)
        mine, start = turn(there(x), stub(state))
        out, last, _ = cuda_step.forward(mine, plan._replace(xp=CUPY), start)
        assert np.abs(out - expected).max() < 1e-5
        assert np.abs(last - end).max() < 1e-5
        return dict(launched[-1][0])["LA_ONE"]

    def apart(x, state):  # rows of a state that others lie between
        buffer = stub(np.zeros((*state.shape[:-1], 8), np.float32))
        buffer[..., :4] = state
        return x, buffer[..., :4]

    def far(x, state):  # a batch of one in a long way from the next
        far = np.lib.stride_tricks.as_strided(x.v, strides=(1 << 31, *x.v.strides[1:]), subok=True)
        return x._replace(v=far), state

    assert launch_of() == 1
    assert launch_of(K=200, V=64) == launch_of(K=4, V=132) == 1
    assert launch_of(T=2) == launch_of(K=7) == launch_of(heads=(4, 2, 2)) == launch_of(B=1, offsets=[0, 1]) == 0
    assert launch_of(turn=apart) == launch_of(B=1, turn=far) == 0


@pytest.mark.parametrize("erase", [Erase.DELTA, Erase.FREE])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("dtype", "state"), [("bfloat16", "float32"), ("float32", "float32"), ("float16", "bfloat16")])
@pytest.mark.parametrize("K", [4, 16, 36, 64, 100, 128, 132, 256])
@pytest.mark.parametrize("V", [4, 20, 32, 64, 72, 128, 256])
def test_the_warps_of_one_token_hold_a_state(K, V, dtype, state, many, erase):
    """All rows once, no lane without rows but for the last power of two, as many sums as there are leaves."""
    kind = cuda_step.StepKind(K, V, Decay.VECTOR, False, erase, False, False, 1, False)
    d = dict(cuda_step.step_constants(kind, cuda_step.Stored(dtype, True, True, state, state, many)))
    rows = many and state != "float32" and erase is not Erase.FREE
    assert (d["LA_LANES"] == 32) == (rows and V >= 128 and K in (100, 128))
    groups = 32 * d["LA_SPLIT"] // d["LA_LANES"]
    assert groups <= policy.SUM_CHAINS
    assert policy.SUM_CHAINS % groups == d["LA_WARPS"] % d["LA_SPLIT"] == 0
    assert groups == 1 or groups == 32 // d["LA_LANES"] or 4 * groups < 2 * K
    assert d["LA_WARPS"] * d["LA_BLOCKS"] <= 48
    assert d["LA_WARPS"] // d["LA_SPLIT"] <= -(-V // (d["LA_LANES"] * d["LA_PER"]))


@pytest.fixture
def public(launched, monkeypatch):
    """Public functions take stubs for CuPy arrays."""
    def is_stubs(xp):
        return xp is CUPY or xp is record.namespace(CUPY)

    def entering(fn, arrays, beside=None):
        if any(isinstance(x, Stub) for x in arrays.values()):
            return Library(CUPY, 0, lambda x: x, "cupy", "q"), dict(arrays)
        return enter(fn, arrays, beside)

    monkeypatch.setattr(binding, "enter", entering)
    monkeypatch.setattr(results, "enter", entering)
    monkeypatch.setattr(rows, "compat", SimpleNamespace(
        is_cupy_array=lambda x: isinstance(x, Stub), is_cupy_namespace=is_stubs,
        is_numpy_namespace=lambda xp: not is_stubs(xp),
    ))
    monkeypatch.setitem(replay.makers, Stub, device_replay.signature_maker(Stub))
    monkeypatch.setattr(replay, "plans", {})
    monkeypatch.setattr(constants, "_kept", {})
    return launched


def arrays_of(fn, T=1, H=4, Hk=2, K=8, V=4, seed=0):
    drawn = la.testing.sample(fn, np.random.default_rng(seed), T=T, H=H, Hk=Hk, Hq=Hk, K=K, V=V, optional=False)
    return {n: x.astype(np.float32) for n, x in drawn.items()}


AGAIN = [fn for fn in la.VARIANTS if passes_through(fn) and not fn.spec.micro_steps]


@pytest.mark.parametrize("fn", AGAIN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("how", ["out", "pair", "in place", "turned", "step", "pool"])
def test_the_second_call_is_made_again(public, fn, how):
    """Other numbers at other places, the same result as NumPy's; and the checks were not gone through again."""
    rng = np.random.default_rng(5)
    for seed in range(4):
        arrays, state = arrays_of(fn, seed=seed), rng.standard_normal((2, 4, 8, 4)).astype(np.float32)
        options = {"state": state, "return_state": how != "out"}
        expected = fn(**arrays, **options)
        mine = {n: stub(np.moveaxis(x, 1, 2) if how == "turned" and x.ndim > 2 else x) for n, x in arrays.items()}
        options["state"] = S = stub(state)
        if how == "pool":
            options["state"] = S = stub(np.concatenate([state, state + 1, state[::-1]])[[3, 0, 2, 1, 4, 5]])
            options |= {"state_rows": stub(np.array([1, 3])), "overwrite_state": True}
            expected = fn(**arrays, state=np.asarray(S)[[1, 3]], return_state=True)
        if how == "in place":
            options["overwrite_state"] = True
        if how == "turned":
            options["layout"] = "heads_first"
        if how == "step":
            mine = {n: stub(x[:, 0]) if x.ndim > 2 else x for n, x in mine.items()}
        before = np.asarray(S).copy()
        result = la.step(fn, **mine, **options) if how == "step" else fn(**mine, **options)
        assert len(device_plans()) == 1
        out, end = (result, None) if how == "out" else result
        expected, expected_end = (expected, None) if how == "out" else expected
        assert out.shape == ((2, 4, 4) if how == "step" else out.shape)
        out = np.moveaxis(out, 1, 2) if how == "turned" else out[:, None] if how == "step" else out
        assert np.abs(out - expected).max() < 1e-5
        if how in ("in place", "pool"):
            assert end is S
        else:
            assert np.array_equal(S, before)
        if how == "pool":
            assert np.abs(S[[1, 3]] - expected_end).max() < 1e-5
            assert np.array_equal(np.asarray(S)[[0, 2, 4, 5]], before[[0, 2, 4, 5]])
        elif end is not None:
            assert np.abs(end - expected_end).max() < 1e-5


def test_another_shape_dtype_stride_or_option_is_another_call(public):
    arrays = {n: stub(x) for n, x in arrays_of(la.simple_gla).items()}
    for _ in range(2):
        la.simple_gla(**arrays)
    assert len(device_plans()) == 1
    la.simple_gla(**arrays, scale=2.0)
    la.simple_gla(**arrays, chunk_size=1)
    with pytest.raises(ValueError, match="chunk_size is True"):
        la.simple_gla(**arrays, chunk_size=True)
    assert len(device_plans()) == 3
    wide = stub(np.zeros((2, 1, 4, 8), np.float32))
    la.simple_gla(**{**arrays, "v": wide[..., ::2]})  # copied by a kernel
    assert len(device_plans()) == 4
    two = {n: stub(x) for n, x in arrays_of(la.simple_gla, T=2).items()}
    la.simple_gla(**{**two, "v": stub(np.zeros((2, 2, 4, 8), np.float32))[..., ::2]})  # copied: never kept
    assert len(device_plans()) == 4
    bad = {**arrays, "g": stub(np.zeros((2, 1, 3), np.float32))}
    with pytest.raises(ValueError, match="g has shape"):
        la.simple_gla(**bad)


def test_what_is_computed_on_the_way_is_not_made_again(public):
    x = arrays_of(la.longhorn, T=2)
    arrays = {n: stub(y) for n, y in x.items()}
    for _ in range(3):
        out = la.longhorn(**arrays)
    assert np.abs(out - la.longhorn(**x)).max() < 1e-5
    assert not device_plans()


def test_one_array_for_two_names_is_not_made_again(public):
    arrays = {n: stub(x) for n, x in arrays_of(la.comba).items()}
    for _ in range(3):
        la.comba(**{**arrays, "p": arrays["k"]})
    assert not device_plans()  # p could be k here and another array next time


def doubling(monkeypatch):
    """A backward of launches: twice every input, twice dout for the values; the values where there is no dout."""
    real, made = launch.kernel, []

    class Doubled:
        def __init__(self):
            self.kernel = SimpleNamespace(ptr=self)

        def __call__(self, grid, block, arguments, shared_mem):
            x, y, size, kind = struct.unpack_from("<4q", arguments[0].tobytes())
            at = [np.frombuffer((ctypes.c_uint8 * size).from_address(p), step_twin.KINDS[kind]) for p in (x, y)]
            at[1][:] = 2 * at[0]

    def kernel(file, *how):
        return made[0] if file == "double" else real(file, *how)

    def backward(saved, dout, dstate):
        def twice(x):
            y = saved.plan.xp.empty(x.shape, dtype=x.dtype)
            kind = step_twin.KINDS.index(x.dtype)
            packed = struct.pack("<4q", x.data.ptr, y.data.ptr, x.nbytes, kind).ljust(step_twin.SIZE, b"\0")
            launch.launch("double", "double", (), 1, 32, 0, packed, (x, y))
            return y

        x, dv, dS = saved.x, saved.x.v if dout is None else dout, saved.state if dstate is None else dstate
        return Inputs(twice(x.q), twice(x.k), twice(dv), twice(x.g), beta=twice(x.beta)), twice(dS)

    made.append(Doubled())
    cuda, other = launch.cupy().cuda, launch.cupy().cuda.driver.launchKernel

    def from_driver(kernel, *rest):
        if isinstance(kernel, int):
            return other(kernel, *rest)
        at = ctypes.c_void_p.from_address(rest[-2]).value
        return kernel(None, None, (np.void(ctypes.string_at(at, step_twin.SIZE)),), 0)

    cuda.driver.launchKernel = from_driver
    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(cuda_calls, "backward", backward)


@pytest.mark.parametrize("layout", ["time_first", "heads_first"])
def test_vjp_is_made_again(public, monkeypatch, layout):
    """Forward and pullback: new numbers at new places, nothing checked or planned again; other cotangents are."""
    doubling(monkeypatch)
    rng, real = np.random.default_rng(5), dispatch.prepare
    for seed in range(3):
        arrays = arrays_of(la.gated_delta_rule, seed=seed)
        expected = la.gated_delta_rule(**arrays)
        state = stub(np.zeros((2, 4, 8, 4), np.float32))
        expected = np.moveaxis(expected, 1, 2) if layout == "heads_first" else expected
        mine = {n: stub(np.moveaxis(x, 1, 2) if layout == "heads_first" else x) for n, x in arrays.items()}
        dout = stub(rng.standard_normal(expected.shape, dtype=np.float32))
        dstate = stub(rng.standard_normal(state.shape, dtype=np.float32))
        if seed == 1:
            monkeypatch.setattr(call_vjp, "prepare", None)
        out, pull = la.vjp(la.gated_delta_rule, **mine, state=state, layout=layout)
        assert np.abs(out - expected).max() < 1e-5
        for _ in range(2):
            grads = pull(dout, dstate)
            for n, x in mine.items():
                assert np.array_equal(getattr(grads, n), 2 * (dout if n == "v" else x)), n
            assert np.array_equal(grads.state, 2 * dstate)
        assert len(device_plans()) == 1
    with pytest.raises(TypeError):  # prepare is not there
        pull(None, dstate)
    monkeypatch.setattr(call_vjp, "prepare", real)
    with pytest.raises(ValueError, match="dout has shape"):
        pull(dout[..., :2], dstate)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_published_decay_is_made_once(public, monkeypatch, capturing):
    """But for one that belongs to a graph; calls of other sizes have their own."""
    monkeypatch.setattr(launch.cupy().cuda.runtime, "streamIsCapturing", lambda ptr: capturing)
    for H in (4, 2, 4, 2):
        arrays = arrays_of(la.retention, T=2, H=H, Hk=H)
        out = la.retention(**{n: stub(x) for n, x in arrays.items()})
        assert np.abs(out - la.retention(**arrays)).max() < 1e-5
    assert len(constants._kept) == len(device_plans()) == (0 if capturing else 2)


def test_a_pullback_that_computes_on_the_way_goes_the_whole_way(public, monkeypatch):
    """And so does the forward before it: it would be gone through twice."""
    monkeypatch.setattr(launch, "capability", lambda: 80)
    monkeypatch.setattr(launch, "shared_limit", lambda: 0)  # no kernel of chunks fits
    for seed in range(3):
        arrays = arrays_of(la.gated_delta_rule, seed=seed)
        out, pull = la.vjp(la.gated_delta_rule, **{n: stub(x) for n, x in arrays.items()})
        right, right_pull = la.vjp(la.gated_delta_rule, **arrays)
        assert np.abs(out - right).max() < 1e-5
        for mine, theirs in zip(pull(stub(np.ones_like(right))), right_pull(np.ones_like(right)), strict=True):
            assert mine is None or np.abs(mine - theirs).max() < 1e-4
        assert [list(x.pullbacks.values()) for x in device_plans()] == [[None]]


@pytest.mark.parametrize("fn", [fn for fn in la.VARIANTS if fn.spec.decay is Decay.VECTOR and has_plain_state(fn.spec)
                                and fn.spec.change.erase_key is not EraseKey.PRODUCT], ids=lambda f: f.__name__)
@pytest.mark.parametrize("state", [False, True])
def test_gradients_that_array_calls_compute_are_computed_every_time(public, fn, state):
    """The forward of a few tokens is a kernel, its adjoint is not: nothing of it may be taken for a launch."""
    for seed in range(3):
        arrays = arrays_of(fn, T=3, seed=seed)
        S = {"state": np.full((2, 4, 8, 4), 0.5, np.float32)} if state else {}
        _, pull = la.vjp(fn, **{n: stub(x) for n, x in (arrays | S).items()})
        out, right_pull = la.vjp(fn, **arrays, **S)
        dout = np.random.default_rng(seed).standard_normal(out.shape, dtype=np.float32)
        for mine, theirs in zip(pull(stub(dout)), right_pull(dout), strict=True):
            assert mine is theirs is None or np.abs(mine - theirs).max() < 1e-4


def test_sixteen_bits_and_other_gates(launched):
    x, plan, state, *_ = case("scalar", "delta", "after", T=3, K=8, V=4, dtype=np.float32, C=None)
    half = Inputs(*(None if y is None else y.astype(ml_dtypes.bfloat16) if n in ("q", "k", "v", "r", "beta") else y
                    for n, y in x._asdict().items()))
    wide = Inputs(*(None if y is None else y.astype(np.float32) for y in half))
    expected, _, _ = recurrence.forward(wide, plan, state)
    out, end, _ = cuda_step.forward(there(half), plan._replace(xp=CUPY), stub(state))
    assert out.dtype == ml_dtypes.bfloat16
    assert end.dtype == np.float32
    assert np.abs(out.astype(np.float32) - expected).max() < 2.0**-7 * np.abs(expected).max()


def test_long_calls_and_gradients(public):
    arrays = arrays_of(la.kda, T=30)
    mine = {n: stub(x) for n, x in arrays.items()}
    assert la.explain(la.kda, **{n: x[:, :16] for n, x in mine.items()}).backend == "cuda"
    assert la.explain(la.kda, **mine).backend == "cuda"  # token by token: no chunk kernel has these widths
    assert la.explain(la.kda, **mine, chunk_size=32).backend == "chunks"
    assert la.explain(la.kda, **mine, chunk_size=1).backend == "cuda"
    few = {n: x[:, :5] for n, x in arrays.items()}
    out, pull = la.vjp(la.kda, **{n: stub(x) for n, x in few.items()})
    expected, pull2 = la.vjp(la.kda, **few)
    assert np.abs(out - expected).max() < 1e-5
    for a, b in zip(pull(stub(expected)), pull2(expected), strict=True):
        assert a is b is None or np.abs(a - b).max() < 1e-5


@pytest.mark.parametrize("how", ["apart", "in place", "pool", "turned rows"])
@pytest.mark.parametrize(("kind", "number"), [(np.dtype(ml_dtypes.bfloat16), 0), (np.dtype(np.float16), 1)], ids=str)
def test_states_in_16_bits(public, kind, number, how):
    """Read and written as they are stored: the numbers of a float32 state, rounded once where it is overwritten."""
    fn, rng = la.gated_delta_rule, np.random.default_rng(5)
    for seed in range(3):
        arrays = {n: stub(x) for n, x in arrays_of(fn, seed=seed).items()}
        state = rng.standard_normal((2, 4, 8, 4)).astype(kind)
        expected, end = fn(**arrays, state=stub(state.astype(np.float32)), return_state=True)
        S, options, kept = stub(state), {"return_state": True}, len(device_plans())
        if how == "pool":
            S = stub(np.concatenate([state, state + 1, state[::-1]])[[3, 0, 2, 1, 4, 5]].astype(kind))
            options |= {"state_rows": stub(np.array([1, 3]))}
        if how == "turned rows":  # copied, and written back
            S = stub(np.ascontiguousarray(np.swapaxes(state, -1, -2))).swapaxes(-1, -2)
        before = np.asarray(S).copy()
        out, last = fn(**arrays, state=S, **options, overwrite_state=how != "apart")
        constants = dict(public[-1][0])
        assert np.array_equal(out, expected)
        assert constants["LA_START"] == number
        if how == "apart":
            assert np.array_equal(last, end)
            assert last.dtype == np.float32
            assert np.array_equal(S, before)
        else:
            assert last is S
            assert np.array_equal(S[[1, 3]] if how == "pool" else S, np.asarray(end).astype(kind))
        if how == "pool":
            assert np.array_equal(np.asarray(S)[[0, 2, 4, 5]], before[[0, 2, 4, 5]])
        assert constants["LA_END"] == (2 if how == "apart" else number)
        if seed == 2:
            assert len(device_plans()) == kept  # replayed
    assert len(device_plans()) == 2


@pytest.mark.parametrize("T", [1, 3])
def test_alignment_of_states_in_16_bits(launched, T):
    """Four elements at a time are eight bytes, one by one where they begin elsewhere or rows are odd."""
    def wide(offset, V=8):
        x, plan, state, *_ = case("scalar", "none", "after", T, None, K=8, V=V, dtype=np.float32)
        buffer = stub(np.zeros((*state.shape[:-1], V + 8), ml_dtypes.bfloat16))
        view = buffer[..., offset : offset + V]
        view[...] = state
        expected, end, _ = recurrence.forward(x, plan, np.asarray(view).astype(np.float32))
        out, last, _ = cuda_step.forward(there(x), plan._replace(xp=CUPY, overwrite=True), view)
        assert np.abs(out - expected).max() < 1e-5
        assert last is view
        assert np.abs(view.astype(np.float32) - end).max() < 2**-7 * np.abs(end).max()
        return dict(launched[-1][0])["LA_WIDE"]

    assert wide(0) == wide(4) == 1
    assert wide(2) == wide(1) == wide(0, V=5) == 0
