"""Sizes come from the axes of the spec: a variant without heads, whose state has other axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.dispatch import public
from linattn_np.spec import ArgSpec, ChangeOfVariables, StateFormat, VariantSpec
from tests.cores.gated_mean import CORE, MeanInputs, MeanState, gated_mean


def _one_head(c: Any) -> MeanInputs:
    return MeanInputs(c.x[..., None, :], c.g[..., None])


def _one_head_vjp(c: Any, d: MeanInputs) -> dict[str, Any]:
    return {"x": d.x[..., 0, :], "g": d.g[..., 0]}


def _pack(c: Any, state: Any) -> Any:
    return None if state is None else MeanState(state.S[..., None, :], state.n[..., None])


CHANGE = ChangeOfVariables(
    _one_head,
    _one_head_vjp,
    lambda c, out: out[..., 0, :],
    lambda c, out, dout: (dout[..., None, :], {}),
    query=None,
    key=None,
    value="x",
)
SPEC = VariantSpec(
    name="channels", sentence="A gated mean without heads.", equation="that of gated_mean", paper="none", core=CORE,
    arrays={"x": ArgSpec("T D", "values"), "g": ArgSpec("T", "log decay")}, change=CHANGE, scaled=False,
    state=StateFormat(MeanState, axes={"S": "D", "n": ""}, pack=_pack,
                      unpack=lambda c, end: MeanState(end.S[..., 0, :], end.n[..., 0])),
)  # fmt: skip


@public(SPEC)
def channels(x: Any, g: Any, **options: Any) -> Any:
    """A gated mean of x (..., T, D) with g (..., T)."""


def drawn(B=(2,), T=9, D=16, N=None):
    rng, lead = np.random.default_rng(0), B if N is None else (N,)
    x, g = rng.standard_normal((*B, T, D)), -rng.uniform(0, 1, (*B, T))
    return x, g, MeanState(rng.standard_normal((*lead, D)), rng.uniform(0.5, 2, lead))


def of_one_head(x, g, state):
    return x[..., None, :], g[..., None], MeanState(state.S[..., None, :], state.n[..., None])


@pytest.mark.parametrize("layout", ["time_first", "heads_first"])
@pytest.mark.parametrize("B", [(), (2,), (2, 3)], ids=str)
def test_without_heads(B, layout):
    """That of one head; layouts are the same, and no shape is doubtful."""
    x, g, state = drawn(B, T=1 if layout == "time_first" else 9)
    out, end = channels(x, g, state=state, return_state=True, layout=layout)
    wide = of_one_head(x, g, state)
    expected, last = gated_mean(*wide[:2], state=wide[2], return_state=True)
    np.testing.assert_array_equal(out, expected[..., 0, :])
    np.testing.assert_array_equal(end.S, last.S[..., 0, :])
    la.testing.check_vjp(channels, x, g, state=state, layout=layout)


def test_packed_sequences_without_heads():
    x, g, states = drawn((1,), N=3)
    offsets = [0, 4, 4, 9]
    out, end = channels(x, g, state=states, cu_seqlens=offsets, return_state=True)
    one, last = channels(x[:, 4:], g[:, 4:], state=MeanState(states.S[2:], states.n[2:]), return_state=True)
    np.testing.assert_array_equal(out[:, 4:], one)
    np.testing.assert_array_equal(end.S[2:], last.S)
    la.testing.check_vjp(channels, x, g, state=states, cu_seqlens=offsets)


def test_influence_and_explain_without_heads():
    x, g, _ = drawn()
    A = la.influence_matrix(channels, x, g)
    assert la.testing.relative_error(A @ x, channels(x, g)) <= 1e-14
    assert la.explain(channels, x, g).bytes == 8 * (2 * x.size + g.size)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("g has shape (2, 9, 16), expected (B, T) = (2, 9)", lambda x, g, S: {"g": x}),
        ("state_rows without a state, expected state to be the pool (P, D)", lambda x, g, S: {"state_rows": [0, 1]}),
        (
            "state.n has shape (2, 1), expected a pool (P,)",
            lambda x, g, S: {"state": (S.S, S.n[:, None]), "state_rows": [0, 1]},
        ),
        ("state is a tuple of 1, expected two arrays (S, n) as a MeanState", lambda x, g, S: {"state": (S.S,)}),
    ],
)
def test_errors_name_the_axes(message, change):
    x, g, state = drawn()
    with pytest.raises((TypeError, ValueError)) as error:
        channels(**{"x": x, "g": g, **change(x, g, state)})
    assert str(error.value) == f"channels: {message}"
