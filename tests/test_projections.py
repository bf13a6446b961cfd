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


@pytest.mark.parametrize("T", [1, 5, 40])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_rule
def test_calls_alike_take_their_own_numbers(case, T, dtype):
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
    """The formula is computed in float32 whatever the raw gate is kept in."""
    arrays, _ = draw(case, T=40, dtype=np.float16)
    wide = {n: x.astype(np.float32) for n, x in arrays.items()}
    assert relative_error(call(case, arrays)[0], call(case, wide)[0]) <= 2.0**-10


def test_parts_of_the_formula_without_the_rest_are_refused():
    x = la.delta_product.card.sample(np.random.default_rng(0))
    rate, g = np.zeros(2), x.pop("g")
    with pytest.raises(ValueError, match="delta_product: dt_bias is given without A_log"):
        la.delta_product(**x, g=g, dt_bias=rate)
    with pytest.raises(ValueError, match="delta_product: A_log is given without g"):
        la.delta_product(**x, A_log=rate)
    with pytest.raises(ValueError, match=r"delta_product: A_log has shape \(3,\), expected \(H,\) = \(2,\)"):
        la.delta_product(**x, g=g, A_log=np.zeros(3))
    with pytest.raises(TypeError, match="delta_product: qk_l2norm is 1, expected True or False"):
        la.delta_product(**x, qk_l2norm=1)
