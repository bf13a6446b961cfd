"""Variants on the elementwise core take the CUDA kernels by default, emulated here or on a GPU."""

from __future__ import annotations

import traceback

import numpy as np
import pytest

import linattn_np as la
from linattn_np.elementwise.core import CORE
from linattn_np.testing import relative_error
from tests.cuda.emulation import device, emulated  # noqa: F401
from tests.elementwise.test_core import FUNCTIONS
from tests.elementwise.test_cuda import BOUND as BOUNDS
from tests.elementwise.test_cuda import FLOAT32, compare, computed, drawn, scans, widened  # noqa: F401

# with kernels of their own, and without
OTHERS = (la.selective_scan, la.diagonal_longhorn, la.s4d, la.rwkv4, la.block_scan)
VARIANTS = [fn for fn in la.VARIANTS if fn.spec.core is CORE and fn not in OTHERS]
BOUND = 64 * 2.0**-23  # of sums of a few dozen numbers in float32
every_variant = pytest.mark.parametrize("fn", VARIANTS, ids=lambda fn: fn.__name__)


def sample(fn, T=21):
    """(arrays in float32, options)"""
    rng = np.random.default_rng(0)
    wide = la.testing.sample(fn, rng, B=(2,), T=T, H=2, K=3, V=5)
    narrow = {n: x.astype(np.complex64 if x.dtype.kind == "c" else np.float32) for n, x in wide.items()}
    return narrow, dict(fn.samples.options[0])


def flat(found):
    """The arrays of nested results."""
    if isinstance(found, tuple):
        return [y for x in found for y in flat(x)]
    return [] if found is None else [found]


def gradients(fn, arrays, options, bring=np.asarray, see=np.asarray, **how):
    """(results, gradients) with a state, for cotangents that are the results."""
    arrays = {n: bring(x) for n, x in arrays.items()}
    found, pull = la.vjp(fn, **arrays, **options, **how, return_state=True)
    return [see(x) for x in (*flat(tuple(found)), *flat(tuple(pull(*found))))]


@every_variant
def test_every_variant_takes_the_kernels(scans, fn):  # noqa: F811
    arrays, options = sample(fn)
    found = gradients(fn, arrays, options, scans.bring, scans.see)
    wide = {n: x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for n, x in arrays.items()}
    expected = gradients(fn, wide, options, backend="reference")
    for x, y in zip(found, expected, strict=True):
        assert x.dtype.itemsize * 2 == y.dtype.itemsize
        assert relative_error(x.astype(y.dtype), y) <= BOUND
    explained = la.explain(fn, **{n: scans.bring(x) for n, x in arrays.items()}, **options)
    assert explained.backend == "cuda"
    assert "elementwise/scan.cu, tiles of" in explained.reason
    assert not explained.slow
    if scans.launched is not None:
        assert sum(entry == "scan" for _, entry, *_ in scans.launched) == 2


@pytest.fixture
def array_calls(scans, monkeypatch):  # noqa: F811
    """The lines of the package that compute with an array of the device by other means than kernels."""
    if scans.launched is None:
        pytest.skip("arrays of the emulated device tell of array calls")
    from tests.matrix_state.cuda.step_twin import Stub

    found = list[str]()

    def plain(x):
        return x.view(np.ndarray) if isinstance(x, Stub) else x

    def ufunc(self, function, method, *arrays, **keywords):
        if own := [f for f in traceback.extract_stack(limit=30) if "/linattn_np/" in f.filename]:
            found.append(f"{own[-1].filename.split('/linattn_np/')[1]}:{own[-1].lineno} {function.__name__}")
        y = getattr(function, method)(*map(plain, arrays), **keywords)
        return y.view(Stub) if type(y) is np.ndarray else y

    monkeypatch.setattr(Stub, "__array_ufunc__", ufunc, raising=False)
    return found


@pytest.mark.parametrize(
    "fn",
    [la.scan, la.hgrn, la.min_gru, la.min_lstm, la.rg_lru, la.lru, la.diagonal_longhorn, la.rwkv4],
    ids=lambda fn: fn.__name__,
)
@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_a_call_and_its_pullback_are_kernels_alone(scans, array_calls, fn):  # noqa: F811
    arrays, options = sample(fn)
    gradients(fn, arrays, options, scans.bring, scans.see)
    assert array_calls == []


@pytest.mark.parametrize("log", [False, True], ids=["a", "log a"])
def test_states_at_positions(scans, log):  # noqa: F811
    arrays = drawn("g" if log else "a", FLOAT32, (2, 300, 40))
    x, a, h, dout, dend = arrays
    at = [0, 7, 256, 300]
    found, pull = la.vjp(la.scan, scans.bring(a), scans.bring(x), state=scans.bring(h), log=log, return_states_at=at)
    grads = pull(scans.bring(dout), None, scans.bring(np.stack([dend] * len(at), axis=1)))
    wide = widened(arrays)
    expected, exact = la.vjp(la.scan, wide[1], wide[0], state=wide[2], log=log, return_states_at=at)
    exact = exact(wide[3], None, np.stack([wide[4]] * len(at), axis=1))
    for one, other in zip((found.out, found.states, *grads), (expected.out, expected.states, *exact), strict=True):
        assert relative_error(scans.see(one), other) <= BOUNDS["float32"]


@pytest.mark.parametrize("overwrite", [False, True], ids=["apart", "in place"])
def test_states_are_rows_of_a_pool(scans, overwrite):  # noqa: F811
    x, a, h, *_ = drawn("a", FLOAT32, (3, 70, 40))
    rows, pool = np.array([5, 0, 2]), np.full((7, 40), 3, np.float32)
    pool[rows] = h
    given = scans.bring(pool)
    out, end = la.scan(scans.bring(a), scans.bring(x), state=given, state_rows=scans.bring(rows), return_state=True,
                       overwrite_state=overwrite)  # fmt: skip
    expected, last = la.scan(*map(np.float64, (a, x)), state=h.astype(np.float64), return_state=True)
    assert relative_error(scans.see(out), expected) <= BOUNDS["float32"]
    assert (end.data.ptr == given.data.ptr) == overwrite
    if overwrite:
        assert (np.delete(scans.see(end), rows, axis=0) == 3).all()
        end = scans.see(end)[rows]
    assert relative_error(scans.see(end), last) <= BOUNDS["float32"]


def test_a_sum_that_float16_does_not_hold_is_infinite(scans):  # noqa: F811
    """The gradient of one factor for all tokens is a sum over them: infinite where the exact sum rounds to it."""
    x, a, h, dout, dend = drawn("a", np.dtype(np.float16), (2, 600, 40), constant=True)
    a[:20], x, dout = 0.999, abs(x), abs(dout)
    a[20:] = 0.5
    arrays = [x, a, h, dout, dend]
    with np.errstate(over="ignore"):
        found = computed(scans, FUNCTIONS["a"], arrays, "cuda")[3]
        exact = computed(scans, FUNCTIONS["a"], widened(arrays), "reference")[3].astype(np.float16)
    np.testing.assert_array_equal(np.isinf(found), np.isinf(exact))
    assert np.isinf(found[:20]).all()
    assert np.isfinite(found[20:]).all()
