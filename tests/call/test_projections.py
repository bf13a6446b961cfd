"""Queries and keys of any length, and gates before their formula, in the delta rules that take them."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import relative_error
from tests.cases import CASES, call, cotangents, draw, with_gradients

RAW = [c for c in CASES if c.options.get("qk_l2norm")]
every_rule = pytest.mark.parametrize("case", RAW, ids=lambda c: c.fn.__name__)
BACKENDS = ({"backend": "chunks"}, {"backend": "reference"}, {"backend": "numba"}, {})


def length(x):
    return np.linalg.norm(x, axis=-1, keepdims=True)


@every_rule
@pytest.mark.parametrize("how", BACKENDS, ids=str)
def test_a_length_does_not_matter_and_has_no_gradient(case, how):
    arrays, state = draw(case, T=70)
    rng = np.random.default_rng(3)
    far = arrays | {n: x * rng.uniform(0.1, 9, (*x.shape[:-1], 1)) for n, x in arrays.items() if n in ("q", "k")}
    d = cotangents(call(case, arrays, state=state, **how))
    near, found = (with_gradients(case, x, d, state=state, **how) for x in (arrays, far))
    for name, x in found.items():
        back = length(far[name[1:]]) / length(arrays[name[1:]]) if name in ("dq", "dk") else 1
        assert relative_error(x * back, near[name]) <= 1e-12, name
    for name in ("q", "k"):
        along = (far[name] * found[f"d{name}"]).sum(-1)
        assert np.abs(along).max() <= 1e-12 * np.abs(found[f"d{name}"]).max() * length(far[name]).max()


@every_rule
def test_a_row_of_zeros_stays_zero(case):
    arrays, state = draw(case, T=9)
    arrays["k"][:, 4] = 0
    arrays["q"][:, 5] = 0
    found = with_gradients(case, arrays, state=state)
    assert all(np.isfinite(x).all() for x in found.values())
    assert not found["out"][:, 5].any()


# per dtype: powers of 2 between which 1 / |x| of rows near 1 is a normal number, and those whose squares are too
FAR = {np.float32: ((-120, -76, -51, 51, 64, 120), (-40, 40)), np.float64: ((-1000, -600, 500, 1000), (-300, 300))}


@every_rule
@pytest.mark.parametrize("how", BACKENDS, ids=str)
@pytest.mark.parametrize("dtype", list(FAR))
@pytest.mark.parametrize("T", [3, 70])
def test_any_length_in_the_range_of_the_dtype(case, how, dtype, T):
    """A power of 2 changes out by rounding at most, and divides the gradient, though |x|^2 is 0 or infinite."""
    arrays, state = draw(case, T=T, dtype=dtype)
    arrays["k"][:, 1] = 0
    d = cotangents(call(case, arrays, state=state, **how))
    near = with_gradients(case, arrays, d, state=state, **how)
    for power in FAR[dtype][0] + FAR[dtype][1]:
        size = dtype(2.0**power)
        found = with_gradients(case, arrays | {n: arrays[n] * size for n in ("q", "k")}, d, state=state, **how)
        none = (arrays["k"] == 0).all(-1)
        for name, x in found.items():
            expected = near[name] / size if name in ("dq", "dk") else near[name]
            if name == "dk":
                expected = np.where(none[..., None], near[name], expected)  # a row of 0 has its gradient as it comes
                assert relative_error(x[none], expected[none]) <= 8 * np.finfo(dtype).eps
                x, expected = x[~none], expected[~none]
            assert relative_error(x, expected) <= 8 * np.finfo(dtype).eps, (name, power)


@pytest.mark.parametrize("backend", ["chunks", "numba"])
def test_a_random_feature_takes_any_length_too(backend):
    arrays, _ = draw(next(c for c in CASES if c.fn is la.rfa), T=40, dtype=np.float32)
    out = la.rfa(**arrays, backend=backend)
    for power in (-110, -76, 64, 110):
        far = arrays | {n: arrays[n] * np.float32(2.0**power) for n in ("q", "k")}
        assert relative_error(la.rfa(**far, backend=backend), out) <= 1e-6


@pytest.mark.parametrize("T", [1, 5, 40])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_rule
def test_replayed_calls_read_their_own_arrays(case, T, dtype):
    for seed in range(4):
        arrays, state = draw(case, T=T, seed=seed, dtype=dtype)
        out, end = call(case, arrays, state=state)
        expected, wanted = call(case, arrays, state=state, backend="reference")
        assert relative_error(out, expected) <= 1e-5
        assert relative_error(end, wanted) <= 1e-5


@pytest.mark.parametrize("case", [c for c in RAW if "A_log" in c.given], ids=lambda c: c.fn.__name__)
def test_a_raw_gate_without_end_is_a_hard_reset(case):
    """e^{-inf} has no gradient, and a raw gate of -inf keeps all."""
    arrays, state = draw(case, T=40)
    arrays["g"][:, 7] = np.inf
    arrays["g"][:, 9] = -np.inf
    found = with_gradients(case, arrays, state=state)
    assert all(np.isfinite(x).all() for x in found.values())
    assert not found["dg"][:, 7].any()
    assert not found["dg"][:, 9].any()


@pytest.mark.parametrize("case", [c for c in RAW if "A_log" in c.given], ids=lambda c: c.fn.__name__)
def test_16_bit_projections(case):
    """The formula is computed in float32, whatever the dtype of the raw gate."""
    arrays, _ = draw(case, T=40, dtype=np.float16)
    wide = {n: x.astype(np.float32) for n, x in arrays.items()}
    assert relative_error(call(case, arrays)[0], call(case, wide)[0]) <= 2.0**-10


def test_parts_of_the_formula_without_the_rest_are_refused():
    x = la.testing.sample(la.delta_product, np.random.default_rng(0))
    rate, g = np.zeros(2), x.pop("g")
    with pytest.raises(ValueError, match="delta_product: dt_bias is given without A_log"):
        la.delta_product(**x, g=g, dt_bias=rate)
    with pytest.raises(ValueError, match="delta_product: A_log is given without g"):
        la.delta_product(**x, A_log=rate)
    with pytest.raises(ValueError, match=r"delta_product: A_log has shape \(3,\), expected \(H,\) = \(2,\)"):
        la.delta_product(**x, g=g, A_log=np.zeros(3))
    with pytest.raises(TypeError, match="delta_product: qk_l2norm is 1, expected True or False"):
        la.delta_product(**x, qk_l2norm=1)
