"""feature_map= in front of a gate or an erase: the same call on mapped queries and keys, and its gradients."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.ops.feature_maps import feature_map_pair
from linattn_np.testing import check_vjp, relative_error, sample

FUNCTIONS = [fn for fn in la.VARIANTS if "feature_map" in fn.spec.options and fn is not la.linear_attention]
MAPS = ["elu+1", "hedgehog", "favor+", ("silu", "relu"), (lambda x: x * x, lambda x, d: 2 * x * d)]
every_function = pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
every_map = pytest.mark.parametrize("feature_map", MAPS, ids=lambda m: str(m)[:18])


def test_which_functions_have_maps():
    """Those of the documentation."""
    assert len(FUNCTIONS) == 5


def drawn(fn, T=21, **sizes):
    rng = np.random.default_rng(0)
    x = sample(fn, rng, **{"B": (2,), "T": T, "H": 4, "Hq": 2, "Hk": 2, "K": 6, "V": 3} | sizes, optional=False)
    return {n: y / 2 if n in "qk" else y for n, y in x.items()}


def mapped(fn, x, feature_map):
    maps = feature_map_pair(fn.__name__, feature_map)
    return x | {n: m[0](x[n]) for n, m in zip("qk", maps, strict=True)}


def scale_of(fn):
    return 6**-0.5 if fn.spec.scaled else 1.0


@every_function
@every_map
def test_the_call_on_mapped_rows(fn, feature_map):
    x = drawn(fn)
    y = mapped(fn, x, feature_map)
    options = {"return_state": True, "scale": scale_of(fn)}
    first, mid = fn(**y, **options)
    expected, end = fn(**y, **options, state=mid)
    out, state = fn(**x, feature_map=feature_map, return_state=True)
    assert state.shape == (2, 4, y["k"].shape[-1], 3)
    assert relative_error(out, first) < 1e-13
    for _ in range(2):
        out, after = fn(**x, feature_map=feature_map, return_state=True, state=state)
        assert relative_error(out, expected) < 1e-12
        assert relative_error(after, end) < 1e-12
    assert np.array_equal(fn(**x, feature_map="identity"), fn(**x))
    one = {n: y[:, 0] if y.ndim > 2 else y for n, y in x.items()}
    assert relative_error(la.step(fn, **one, feature_map=feature_map), first[:, 0]) < 1e-12


@every_function
@every_map
def test_gradients_against_differences(fn, feature_map):
    x = drawn(fn, T=7)
    rng = np.random.default_rng(1)
    state = rng.standard_normal((2, 4, mapped(fn, x, feature_map)["k"].shape[-1], 3))
    check_vjp(fn, **x, state=state, feature_map=feature_map)


@pytest.mark.parametrize("fn", [fn for fn in FUNCTIONS if "qk_l2norm" in fn.spec.options], ids=lambda fn: fn.__name__)
def test_mapped_rows_are_divided_by_their_length(fn):
    x = drawn(fn)
    y = mapped(fn, x, "elu+1")
    found = fn(**x, feature_map="elu+1", qk_l2norm=True)
    assert relative_error(found, fn(**y, qk_l2norm=True, scale=6**-0.5)) < 1e-13
    check_vjp(fn, **drawn(fn, T=5), feature_map="elu+1", qk_l2norm=True)


@every_function
def test_errors(fn):
    x = drawn(fn)
    with pytest.raises(ValueError, match=f"{fn.__name__}: feature_map is 'cosh', expected one of"):
        fn(**x, feature_map="cosh")
    with pytest.raises(ValueError, match=r"state has shape .*, expected .B, H, M, V. = .2, 4, 12, 3."):
        fn(**x, feature_map="hedgehog", state=np.zeros((2, 4, 6, 3)))
    with pytest.raises(ValueError, match="expected one width"):
        fn(**x, feature_map=("hedgehog", "elu+1"))
