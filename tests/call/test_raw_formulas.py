"""Raw projections as published models pass them: an eps in the norm, the sigmoid of beta, a gate with a lower bound."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import check_vjp, relative_error, sample
from tests.cases import one_per
from tests.naive import NAIVE

RULES = [fn for fn in la.VARIANTS if "l2norm_eps" in fn.spec.options]
DECLARED = [fn for fn in la.VARIANTS if "gate_lower_bound" in fn.spec.options]
GATED = [fn for fn in RULES if "lower_bound" in fn.spec.options]
every_rule = pytest.mark.parametrize("fn", RULES, ids=lambda f: f.__name__)
gated = pytest.mark.parametrize("fn", GATED, ids=lambda f: f.__name__)
BACKENDS = pytest.mark.parametrize("backend", ["chunks", "reference", "numba"])
EPS, BOUND = 0.3, -2.0  # large enough to be seen


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def raw(fn, T=37, seed=0, doubled=True, dtype=np.float64):
    """(arrays, options) of a call on raw projections, some rows 0."""
    rng = np.random.default_rng(seed)
    x, options = sample(fn, rng, T=T), {"qk_l2norm": True, "l2norm_eps": EPS}
    x["k"] = 0.7 * x["k"]
    x["k"][:, T // 3] = x["q"][:, T // 2] = 0
    if "beta" in x:
        x["beta"] = 2 * rng.standard_normal(x["beta"].shape)
        options |= {"beta_sigmoid": True, "allow_neg_eigval": doubled}
    if "A_log" in fn.spec.arrays:
        heads = x["g"].shape[2:]
        x["g"] = rng.standard_normal(x["g"].shape)
        x |= {"A_log": 0.3 * rng.standard_normal(heads[0]), "dt_bias": rng.standard_normal(heads)}
        options["lower_bound"] = BOUND
    return {n: y.astype(dtype) for n, y in x.items()}, options


def evaluated(x, options):
    """The arrays by the formulas, in float64."""
    y = {n: a.astype(np.float64) for n, a in x.items() if n not in ("A_log", "dt_bias")}
    for n in ("q", "k"):
        y[n] = y[n] / np.sqrt((y[n] ** 2).sum(-1, keepdims=True) + options["l2norm_eps"])
    if "beta" in y:
        y["beta"] = (2 if options["allow_neg_eigval"] else 1) * sigmoid(y["beta"])
    if "A_log" in x:
        rate = np.exp(x["A_log"].astype(np.float64))
        y["g"] = BOUND * sigmoid((rate[:, None] if y["g"].ndim == 4 else rate) * (y["g"] + x["dt_bias"]))
    return y


@every_rule
@BACKENDS
@pytest.mark.parametrize("doubled", [False, True])
def test_the_formulas_in_float64(fn, backend, doubled):
    x, options = raw(fn, doubled=doubled)
    expected, end = NAIVE[fn.__name__](**evaluated(x, options))
    out, state = fn(**x, **options, backend=backend, return_state=True)
    assert relative_error(out, expected) <= 1e-12
    assert relative_error(state, end) <= 1e-12


@every_rule
@BACKENDS
def test_gradients_against_central_differences(fn, backend):
    x, options = raw(fn, T=20)
    check_vjp(fn, **x, **options, backend=backend)


@every_rule
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_narrow_dtypes_are_computed_in_float32(fn, dtype):
    x, options = raw(fn, T=40, dtype=dtype)
    expected, _ = NAIVE[fn.__name__](**evaluated(x, options))
    assert relative_error(fn(**x, **options), expected) <= (2e-5 if dtype is np.float32 else 2.0**-9)


@every_rule
@pytest.mark.parametrize("T", [1, 7, 40])
def test_repeated_calls_and_steps(fn, T):
    """Replayed calls read their own arrays; one token by la.step is the same call."""
    for seed in range(3):
        x, options = raw(fn, T=T, seed=seed, dtype=np.float32)
        expected, _ = NAIVE[fn.__name__](**evaluated(x, options))
        out, pull = la.vjp(fn, **x, **options)
        assert relative_error(fn(**x, **options), expected) <= 2e-5
        assert (out == fn(**x, **options)).all()
        other = la.vjp(fn, **x, **options, backend="reference")[1](np.ones_like(out))
        for name, d in pull(np.ones_like(out))._asdict().items():
            assert d is None or relative_error(d, getattr(other, name)) <= 1e-4, name
    one = {n: a[:, 0] if fn.spec.arrays[n].axes.startswith("T") else a for n, a in x.items()}
    assert relative_error(la.step(fn, **one, **options), fn(**x, **options)[:, 0]) <= 1e-5


@every_rule
def test_halves_and_ragged_batches(fn):
    x, options = raw(fn, T=30)
    x = {n: a[:1] if fn.spec.arrays[n].axes.startswith("T") else a for n, a in x.items()}
    tokens = lambda a, b: {n: y[:, a:b] if fn.spec.arrays[n].axes.startswith("T") else y for n, y in x.items()}  # noqa: E731
    whole, end = fn(**x, **options, return_state=True)
    first, state = fn(**tokens(0, 13), **options, return_state=True)
    second, last = fn(**tokens(13, 30), **options, state=state, return_state=True)
    assert relative_error(np.concatenate([first, second], axis=1), whole) <= 1e-12
    assert relative_error(last, end) <= 1e-12
    packed = fn(**x, **options, cu_seqlens=[0, 13, 13, 30])
    assert relative_error(packed[:, :13], first) <= 1e-12
    assert relative_error(packed[:, 13:], fn(**tokens(13, 30), **options)) <= 1e-12


@pytest.mark.parametrize("backend", ["chunks", "numba"])
@pytest.mark.parametrize(("dtype", "powers"), [(np.float32, (-120, -60, 60, 120)), (np.float64, (-900, 500))])
def test_an_eps_and_rows_of_any_length(backend, dtype, powers):
    """Where eps is negligible it changes nothing; where |x|^2 is, rows are divided by sqrt(eps)."""
    x, _ = raw(la.delta_rule, T=20, dtype=dtype)
    x["beta"] = np.abs(x["beta"])
    eps = 2.0**-20
    options = {"qk_l2norm": True, "l2norm_eps": eps, "backend": backend}
    for power in powers:
        far = x | {"q": np.where(x["q"] == 0, 0, x["q"]) * dtype(2.0**power)}
        out, pull = la.vjp(la.delta_rule, **far, **options)
        plain = {"k": x["k"] / np.sqrt((x["k"].astype(np.float64) ** 2).sum(-1, keepdims=True) + eps)}
        norm = np.linalg.norm(x["q"].astype(np.float64), axis=-1, keepdims=True)
        small = power < 0
        plain["q"] = x["q"].astype(np.float64) if small else x["q"] / np.where(norm == 0, 1, norm)
        expected = la.delta_rule(**{n: np.asarray(y, np.float64) for n, y in (x | plain).items()})
        scale = 2.0**power / np.sqrt(eps) if small else 1.0
        tiny = float(np.finfo(dtype).tiny) * 2.0**30 / scale if small else 0.0
        assert np.abs(out / scale - expected).max() <= max(tiny, 20 * np.finfo(dtype).eps) * np.abs(expected).max()
        assert all(np.isfinite(d).all() for d in pull(np.ones_like(out)) if d is not None)


@gated
def test_a_lower_bound_without_A_log_and_at_its_ends(fn):
    """The factor of A_log is then 1; infinite projections give 0 and the bound, without a gradient."""
    x, options = raw(fn)
    x["g"][:, 3], x["g"][:, 9] = np.inf, -np.inf
    found = la.vjp(fn, **x, **options)[1](np.ones_like(fn(**x, **options)))
    assert not found.g[:, 3].any()
    assert not found.g[:, 9].any()
    assert all(np.isfinite(d).all() for d in found if d is not None)
    x["A_log"][:] = 0
    expected = la.vjp(fn, **x, **options)[1](np.ones_like(fn(**x, **options)))
    x.pop("A_log")
    found = la.vjp(fn, **x, **options)[1](np.ones_like(fn(**x, **options)))
    assert found.A_log is None
    for name in ("g", "dt_bias", "q", "v"):
        assert relative_error(getattr(found, name), getattr(expected, name)) <= 1e-13


def test_without_the_options_nothing_changes():
    """Also to the bit: an eps of 0, and a norm whose squares leave the range."""
    x = sample(la.gated_delta_rule, np.random.default_rng(0), T=20)
    x["k"][:, 4], x["q"][:, 5] = 0, x["q"][:, 5] * 2.0**-700
    plain, zero = (la.vjp(la.gated_delta_rule, **x, qk_l2norm=True, **more)
                   for more in ({}, {"l2norm_eps": 0.0, "beta_sigmoid": False, "lower_bound": None}))  # fmt: skip
    assert (plain[0] == zero[0]).all()
    for a, b in zip(plain[1](plain[0]), zero[1](plain[0]), strict=True):
        assert a is b is None or (a == b).all()


def test_explain_says_that_beta_is_computed():
    x, options = raw(la.gated_delta_rule)
    assert "beta is the sigmoid" in la.explain(la.gated_delta_rule, **x, **options).reason
    assert "beta is the sigmoid" not in la.explain(la.gated_delta_rule, **x, qk_l2norm=True).reason


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"l2norm_eps": 1e-6}, ValueError, "l2norm_eps is 1e-06 without a norm, expected qk_l2norm=True"),
    ({"qk_l2norm": True, "l2norm_eps": -1.0}, ValueError, r"l2norm_eps is -1.0, expected a finite number from 0"),
    ({"qk_l2norm": True, "l2norm_eps": None}, ValueError, "l2norm_eps is None, expected a finite number from 0"),
    ({"qk_l2norm": True, "l2norm_eps": float("nan")}, ValueError, "l2norm_eps is nan, expected a finite number"),
    ({"beta_sigmoid": 1}, TypeError, "beta_sigmoid is 1, expected True or False"),
    ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval=True without a sigmoid, expected beta_sigmoid=True"),
    ({"lower_bound": 0.5}, ValueError, "lower_bound is 0.5, expected None or a finite number below 0"),
    ({"lower_bound": -np.inf}, ValueError, "lower_bound is -inf, expected None or a finite number below 0"),
])  # fmt: skip
def test_bad_options(options, error, message):
    x = sample(la.kda, np.random.default_rng(0))
    with pytest.raises(error, match=f"kda: {message}"):
        la.kda(**x, **options)


@pytest.mark.parametrize("fn", DECLARED, ids=lambda fn: fn.__name__)
def test_a_declared_bound_changes_nothing_but_kernels(fn):
    x = sample(fn, np.random.default_rng(0))
    out = fn(**x)
    for bound in (-0.01, -1.0, None):
        assert (fn(**x, gate_lower_bound=bound) == out).all()
    with pytest.raises(ValueError, match=f"{fn.__name__}: gate_lower_bound is 0, expected None or a finite number"):
        fn(**x, gate_lower_bound=0)
    with pytest.raises(TypeError, match="kda: unknown option 'gate_lower_bound'"):
        la.kda(**sample(la.kda, np.random.default_rng(0)), gate_lower_bound=-1.0)


def test_a_lower_bound_needs_a_gate():
    x = sample(la.delta_product, np.random.default_rng(0))
    x.pop("g")
    with pytest.raises(ValueError, match="delta_product: lower_bound is given without g"):
        la.delta_product(**x, lower_bound=-1.0)
    with pytest.raises(TypeError, match="delta_rule: unknown option 'lower_bound'"):
        la.delta_rule(**{n: x[n][:, :, 0] if n != "q" else x[n] for n in ("q", "k", "v", "beta")}, lower_bound=-1.0)


@every_rule
def test_the_numbers_of_raw_projections_are_not_strengths_or_decays(fn):
    """la.check looks at the evaluated arrays: beta |k|^2, not the raw projection times |k|^2."""
    x, options = raw(fn)
    options.pop("l2norm_eps")
    options["qk_l2norm"] = False
    x["k"] = x["k"] / np.maximum(np.linalg.norm(x["k"], axis=-1, keepdims=True), 1e-9)
    if "b" in x:
        x["b"] = np.abs(x["b"])
    assert not [f for f in la.check(fn, **x, **options) if f.is_error and f.array in ("g", "beta", "k")]


@pytest.mark.parametrize("fn", one_per(lambda spec: spec.change.erase_key, GATED), ids=lambda f: f.__name__)
def test_every_library(library, fn):
    x, options = raw(fn, T=9, dtype=np.float32)
    out, pull = la.vjp(fn, **x, **options)
    there = {n: library.bring(y) for n, y in x.items()}
    found, pulled = la.vjp(fn, **there, **options)
    assert isinstance(found, library.kind)
    assert relative_error(library.see(found), out) <= 1e-5
    for name, d in pulled(found)._asdict().items():
        assert d is None or relative_error(library.see(d), getattr(pull(out), name)) <= 1e-4, name
