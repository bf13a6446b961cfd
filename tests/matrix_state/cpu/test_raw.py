"""Norms, strengths, gates and rotations as the kernels load them, against array calls."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state import preprocess
from linattn_np.matrix_state.cpu import loops
from linattn_np.ops.cpu.formulas import compiled
from linattn_np.testing import relative_error
from tests.cases import parts

RAW = [fn for fn in la.VARIANTS if "qk_l2norm" in fn.spec.options]
GATED = [fn for fn in RAW if "A_log" in fn.spec.arrays]
BOUNDS = {"float64": 1e-11, "float32": 2e-5}
every_length = pytest.mark.parametrize("T", [1, 5, 70])
named = {"ids": lambda fn: fn.__name__}


def drawn(fn, T, dtype, **options):
    """Arrays of a call with grouped heads, q and k of any length; a gate before its formula if `options` ask for it."""
    rng = np.random.default_rng(0)
    arrays = la.testing.sample(fn, rng, B=(2,), T=T, H=4, Hk=2, Hq=4, K=20, V=12, optional=fn in GATED)
    arrays = {n: x for n, x in arrays.items() if n not in ("A_log", "dt_bias")}
    arrays |= {n: 3 * arrays[n] for n in "qk"}
    if options.pop("gate", False):
        arrays["g"] = 3 * rng.standard_normal(arrays["g"].shape)
        arrays["A_log"] = rng.uniform(-1, 1, 4)
        arrays["dt_bias"] = rng.standard_normal((4, 20) if arrays["g"].ndim == 4 else 4)
    state = la.testing.sample_state(fn, rng, (2,), options, H=4, K=20, V=12)
    return {n: x.astype(dtype) for n, x in arrays.items()}, state.astype(dtype)


def check(fn, arrays, state, options, dtype):
    """Outputs, states and gradients equal array calls in float64; a plain call has the bits of vjp."""
    result, pullback = la.vjp(fn, **arrays, **options, state=state, return_state=True)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()} | {"state": state.astype(np.float64)}
    expected, other = la.vjp(fn, **wide, **options, return_state=True, backend="chunks")
    for _ in range(3):
        plain = fn(**arrays, **options, state=state, return_state=True)
        assert all(np.array_equal(a, b) for a, b in zip(plain, result, strict=True))
    grads, right = pullback(*result), other(*expected)
    found = [(result.out, expected.out), (result.state, expected.state)]
    found += [(d, getattr(right, n)) for n, d in grads._asdict().items() if d is not None]
    assert max(relative_error(a, b) for a, b in found) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("doubled", [False, True])
@every_length
@pytest.mark.parametrize("fn", RAW, **named)
def test_norms_and_strengths(fn, T, doubled, dtype):
    arrays, state = drawn(fn, T, dtype)
    options = {"qk_l2norm": True, "l2norm_eps": 1e-3}
    if "beta_sigmoid" in fn.spec.options:
        options |= {"beta_sigmoid": True, "allow_neg_eigval": doubled}
    check(fn, arrays, state, options, dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("given", "bound"), [(("A_log", "dt_bias"), None), (("A_log",), None), ((), -5.0),
                                              (("A_log", "dt_bias"), -5.0), (("dt_bias",), -2.0)])  # fmt: skip
@every_length
@pytest.mark.parametrize("fn", GATED, **named)
def test_gates(fn, T, given, bound, dtype):
    arrays, state = drawn(fn, T, dtype, gate=True)
    arrays = {n: x for n, x in arrays.items() if n not in ("A_log", "dt_bias") or n in given}
    check(fn, arrays, state, {"qk_l2norm": True} | ({} if bound is None else {"lower_bound": bound}), dtype)


@every_length
@pytest.mark.parametrize("fn", GATED, **named)
def test_every_layout_of_a_raw_gate(fn, T):
    """Reversed, strided and 16-bit gates, packed sequences: the numbers that dense ones give."""
    arrays, _ = drawn(fn, T, "float32", gate=True)
    out = fn(**arrays, qk_l2norm=True)
    apart = {n: np.repeat(x, 2, axis=-1)[..., ::2] for n, x in arrays.items()}
    apart["g"] = np.ascontiguousarray(arrays["g"][::-1, ::-1])[::-1, ::-1]
    assert np.array_equal(fn(**apart, qk_l2norm=True), out)
    narrow = arrays | {"g": arrays["g"].astype(ml_dtypes.bfloat16)}
    rounded = arrays | {"g": narrow["g"].astype(np.float32)}
    assert np.array_equal(fn(**narrow, qk_l2norm=True), fn(**rounded, qk_l2norm=True))
    flat = {n: x.reshape(1, 2 * T, *x.shape[2:]) if n not in ("A_log", "dt_bias") else x for n, x in arrays.items()}
    packed = fn(**flat, qk_l2norm=True, cu_seqlens=[0, T, 2 * T])
    assert np.array_equal(packed.reshape(out.shape), out)


@pytest.mark.parametrize("dtype", BOUNDS)
@every_length
@pytest.mark.parametrize(("fn", "options", "heads"), [
    (la.retnet, {}, (4, 4, 4)), (la.retnet, {}, (2, 4, 2)), (la.retnet, {"xpos": True}, (2, 2, 4)),
    (la.transxssm, {}, (4, 4, 4)), (la.transxssm, {}, (2, 4, 4))])  # fmt: skip
def test_rotations_by_positions(monkeypatch, fn, options, heads, T, dtype):
    """With the angle's gradient and channels that do not rotate; plain calls rotate in the kernels alone."""
    rng, (Hk, Hq, H) = np.random.default_rng(0), heads
    arrays = la.testing.sample(fn, rng, B=(2,), T=T, H=H, Hk=Hk, Hq=Hq, K=21, V=12, optional=True)
    arrays = {n: x.astype(dtype) for n, x in arrays.items()}
    state = la.testing.sample_state(fn, rng, (2,), options, H=H, K=21, V=12).astype(dtype)
    check(fn, arrays, state, options, dtype)
    expected = fn(**arrays, **options, state=state)
    monkeypatch.setattr(preprocess, "rotate", None)
    assert np.array_equal(fn(**arrays, **options, state=state), expected)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("offsets", [None, (0, 0, 2, 70)], ids=["batch", "ragged"])
@pytest.mark.parametrize("heads", [(4, 4), (2, 2), (1, 4)], ids=["each", "grouped", "one key"])
@pytest.mark.parametrize("P", [0, 3, 8, 10])
def test_rotated_and_weighted_rows(P, heads, offsets, dtype):
    """mamba3 against array calls in float64, x and B in any order of memory, channels that do not rotate."""
    rng, (Hk, Hq) = np.random.default_rng(0), heads
    count = 2 if offsets is None else 1
    arrays = la.testing.sample(la.mamba3, rng, B=(count,), T=70, H=4, Hk=Hk, Hq=Hq, K=20, V=12, optional=True)
    arrays["angle"] = rng.standard_normal((count, 70, 4, P))
    arrays |= {n: np.ascontiguousarray(np.flip(arrays[n]))[::-1, ::-1, ::-1, ::-1] for n in ("x", "B")}
    states = la.testing.sample_state(la.mamba3, rng, (2 if offsets is None else 3,), {}, H=4, K=20, V=12)
    options = {"return_state": True} | ({} if offsets is None else {"cu_seqlens": offsets})
    narrow = {n: x.astype(dtype, order="K") for n, x in arrays.items()}
    given = type(states)(*(y.astype(dtype) for y in states))
    result, pullback = la.vjp(la.mamba3, **narrow, state=given, **options)
    wide = {n: x.astype(np.float64) for n, x in narrow.items()}
    widened = type(states)(*(y.astype(np.float64) for y in given))
    expected, other = la.vjp(la.mamba3, **wide, state=widened, **options, backend="chunks")
    grads, right = pullback(*result), other(*expected)
    found = [(result.out, expected.out), *zip(result.state, expected.state, strict=True)]
    found += [(d, getattr(right, n)) for n, d in grads._asdict().items() if n != "state"]
    found += list(zip(grads.state, right.state, strict=True))
    bound = 5 * BOUNDS[dtype]  # gradients of angles are sums over all later tokens
    assert max(relative_error(a, b) for a, b in found if b.size) <= bound


EDGES = {
    "no raw gate": lambda x: x | {"g": 0 * x["g"]},
    "equal keys": lambda x: x | {"k": x["k"][:, :1] + 0 * x["k"]},
    "beta 2": lambda x: x | {"beta": 0 * x["beta"] + 2} if "beta" in x else x,
    "reversed": lambda x: {n: np.ascontiguousarray(np.flip(y))[(np.s_[::-1],) * y.ndim] for n, y in x.items()},
}


@pytest.mark.parametrize("offsets", [None, True], ids=["batch", "empty sequences"])
@pytest.mark.parametrize("T", [0, 1, 17])
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("fn", GATED, **named)
def test_edges(fn, edge, T, offsets):
    arrays, state = drawn(fn, T, "float64", gate=True)
    arrays, options = EDGES[edge](arrays), {"qk_l2norm": True}
    if offsets:
        arrays = {n: y if n in ("A_log", "dt_bias") else y[:1] for n, y in arrays.items()}
        options["cu_seqlens"], state = [0, 0, T // 2, T // 2, T], np.concatenate([state, 2 * state])
    for y in arrays.values():
        y.flags.writeable = False
    check(fn, arrays, state, options, "float64")


@pytest.mark.parametrize("fn", GATED, **named)
def test_states_at_positions(fn):
    """The final states of the tokens before them, with the same gradients as a call of those."""
    arrays, state = drawn(fn, 70, "float64", gate=True)
    options = {"qk_l2norm": True, "lower_bound": -4.0, "state": state}
    result, pullback = la.vjp(fn, **arrays, **options, return_states_at=[33])
    first = {n: x[:, :33] if n not in ("A_log", "dt_bias") else x for n, x in arrays.items()}
    before, other = la.vjp(fn, **first, **options, return_state=True)
    assert relative_error(result.states[:, 0], before.state) <= BOUNDS["float64"]
    grads, right = pullback(None, None, result.states), other(None, result.states[:, 0])
    for n in ("A_log", "dt_bias", "state"):
        assert relative_error(getattr(grads, n), getattr(right, n)) <= BOUNDS["float64"]
    assert relative_error(grads.g[:, :33], right.g) <= BOUNDS["float64"]


def test_the_kernels_compute_raw_projections_themselves(monkeypatch):
    """No array call divides rows or computes gates of a plain call."""
    arrays, state = drawn(la.gated_delta_rule, 70, "float32", gate=True)
    for name in ("unit_rows", "array_chunks"):
        monkeypatch.setattr(loops, name, None)
    monkeypatch.setattr("linattn_np.ops.gate_formula.log_decay", None)
    found = la.gated_delta_rule(**arrays, qk_l2norm=True, beta_sigmoid=True, state=state)
    assert all(np.isfinite(x).all() for x in parts((found,)))


def test_gates_that_are_infinite_or_no_number():
    """An infinite raw gate closes or opens the state; NaN stays in its head."""
    arrays, state = drawn(la.gated_delta_rule, 3, "float64", gate=True)
    arrays["g"][:], arrays["beta"][:] = -np.inf, 0
    kept = la.gated_delta_rule(**arrays, state=state, return_state=True).state
    assert np.array_equal(kept, state)
    arrays, state = drawn(la.gated_delta_rule, 3, "float64", gate=True)
    arrays["g"][:, 0] = np.inf
    begun = la.gated_delta_rule(**arrays, state=state)
    assert relative_error(begun, la.gated_delta_rule(**arrays, state=0 * state)) == 0
    arrays["g"][:, :, 1] = np.nan
    found = la.gated_delta_rule(**arrays, state=state)
    assert np.isnan(found[:, :, 1]).all()
    assert np.isfinite(found[:, :, [0, 2, 3]]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softplus(dtype):
    x = np.concatenate([np.linspace(-80, 80, 4001), [0.0, -0.0, 1e-30]]).astype(dtype)
    found = -compiled("log_decay", (x, None, np.zeros_like(x)), (x.shape, dtype), dtype)
    exact = np.logaddexp(0, x.astype(np.float64))
    assert np.abs(found / exact - 1).max() <= 8 * np.finfo(dtype).eps
