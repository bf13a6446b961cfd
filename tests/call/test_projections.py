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
