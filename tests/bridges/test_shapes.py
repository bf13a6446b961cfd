"""Shapes of results, against the results."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.bridges.programs import Program, Signature
from linattn_np.bridges.shapes import Abstract, abstract, abstract_result
from linattn_np.call.layouts import ONE_TOKEN


def like(x: Any) -> Any:
    """The result with abstract arrays."""
    if x is None:
        return None
    return type(x)(*map(like, x)) if isinstance(x, tuple) else abstract(x)


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("B", [(), (2, 3)])
def test_every_variant(fn, B):
    rng = np.random.default_rng(0)
    for own in fn.samples.options:
        arrays = la.testing.sample(fn, rng, B=B, T=5)
        options = {**own, "return_state": True, "return_states_at": [0, 2, 5]}
        result = fn(**arrays, **options)
        assert abstract_result(fn, arrays, None, options) == like(result)
        assert abstract_result(fn, arrays, result.state, own) == like(fn(**arrays, **own, state=result.state))


CALLS = {
    "heads_first": {"layout": "heads_first"},
    "ragged": {"cu_seqlens": [0, 3, 3, 7]},
    "ragged positions": {"cu_seqlens": np.array([0, 3, 3, 7]), "return_states_at": [0, 2]},
    "positions": {"return_states_at": 2, "return_state": True},
    "chunks": {"chunk_size": 2, "backend": "chunks"},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float64], ids=["bfloat16", "float32", "float64"])
def test_options_and_dtypes(name, dtype):
    rng = np.random.default_rng(0)
    arrays = la.testing.sample(la.gated_delta_rule, rng, B=(1,), T=7, H=4, Hk=2, Hq=2, optional=False)
    if name == "heads_first":
        arrays = {n: x.swapaxes(1, 2) for n, x in arrays.items()}
    arrays = {n: np.ascontiguousarray(x, dtype) for n, x in arrays.items()}
    found = abstract_result(la.gated_delta_rule, arrays, None, CALLS[name])
    assert found == like(la.gated_delta_rule(**arrays, **CALLS[name]))


def test_fewer_queries_no_queries_and_one_token():
    rng = np.random.default_rng(0)
    arrays = la.testing.sample(la.gla, rng, B=(3,), T=6, optional=False)
    few = {**arrays, "q": arrays["q"][:, 4:]}
    assert abstract_result(la.gla, few, None, {}) == like(la.gla(**few))
    none = {**arrays, "q": None}
    assert abstract_result(la.gla, none, None, {}) == like(la.gla(**none))
    one = {n: x[:, 0] for n, x in arrays.items()}
    found = abstract_result(la.gla, one, None, {"layout": ONE_TOKEN, "return_state": True})
    assert found == like(la.step(la.gla, **one, return_state=True))


def test_an_overwritten_state_keeps_its_dtype():
    x = Abstract((2, 4, 1, 8), np.dtype(np.float32))
    state = Abstract((2, 1, 8, 8), np.dtype(np.float16))
    found = abstract_result(la.linear_attention, {"q": x, "k": x, "v": x}, state,
                            {"overwrite_state": True, "return_state": True})  # fmt: skip
    assert found.state == state
    assert found.out == x


def test_a_rule_by_name_and_the_errors_of_the_call():
    x = Abstract((2, 4, 4, 8), np.dtype(np.float32))
    found = abstract_result(la.lightning_attention, {"q": x, "k": x, "v": x}, None, {"slopes": "minimax"})
    assert found == x
    with pytest.raises(ValueError, match=r"gla: g has shape \(2, 4, 4, 7\), expected"):
        abstract_result(la.gla, {"q": x, "k": x, "v": x, "g": Abstract((2, 4, 4, 7), x.dtype)}, None, {})


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_residuals_of_every_variant_are_arrays(fn):
    """Else a framework that traces computes the forward once more before each backward."""
    arrays = la.testing.sample(fn, np.random.default_rng(0), T=5, H=2, K=4, V=3)
    given = {n: Abstract(x.shape, np.dtype(np.float32)) for n, x in arrays.items() if isinstance(x, np.ndarray)}
    assert Program(Signature(fn.spec, tuple(given), None, ()), tuple(given.values())).saved is not None
