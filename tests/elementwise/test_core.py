"""The elementwise core: definition and scans of array calls, real and complex, gates as they are and as logarithms."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.dispatch import public
from linattn_np.elementwise.core import CORE
from linattn_np.elementwise.types import Inputs
from linattn_np.spec import ArgSpec, ChangeOfVariables, StateFormat, VariantSpec
from linattn_np.testing import check_vjp, relative_error

FORMS = [{"backend": n} for n in CORE.BACKENDS if n != "cuda"] + [
    {"chunk_size": 1},
    {"chunk_size": 5},
    {"chunk_size": "parallel"},
    {},
]


def variant(gate):
    """h_t = a_t h_{t-1} + x_t with the gate `a` or `g` of a core that is called directly."""
    spec = VariantSpec(
        name=f"scan_by_{gate}", sentence="The core.", equation="h_t = a_t h_{t-1} + x_t", paper="", core=CORE,
        scaled=False,
        arrays={"x": ArgSpec("T D", "inputs", is_complex=True), gate: ArgSpec("T D|D", "gate", is_complex=True)},
        change=ChangeOfVariables(lambda c: Inputs(c.x, **{gate: getattr(c, gate)}),
                                 lambda c, d: {"x": d.x, gate: d.gate}, query=None, key=None, value="x"),
        state=StateFormat(is_complex=True),
    )  # fmt: skip
    return public(spec)(lambda x, g, **options: None)


FUNCTIONS = {gate: variant(gate) for gate in "ag"}


def drawn(gate, kind="real", constant=False, T=23, B=(2,), D=3, N=None):
    """(inputs, gate, state)"""
    rng = np.random.default_rng(0)
    each = [(*B, T, D), (D,) if constant else (*B, T, D), (*(B if N is None else (N,)), D)]
    x, y, h = (rng.standard_normal(s) + (1j * rng.standard_normal(s) if kind == "complex" else 0) for s in each)
    if gate == "g":
        y = -abs(y.real) + 1j * y.imag if kind == "complex" else -abs(y)
    return x, y, h


def loop(x, a, h):
    """Token by token."""
    out = np.zeros(x.shape, np.result_type(x, a, h))
    for t in range(x.shape[-2]):
        h = (a if a.ndim == 1 else a[..., t, :]) * h + x[..., t, :]
        out[..., t, :] = h
    return out, h


every_kind = pytest.mark.parametrize("kind", ["real", "complex"])
every_gate = pytest.mark.parametrize("gate", "ag")
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


@pytest.mark.parametrize("T", [0, 1, 2, 3, 23, 64])
@pytest.mark.parametrize("constant", [False, True], ids=["tokens", "constant"])
@every_form
@every_gate
@every_kind
def test_it_is_the_loop(kind, gate, form, constant, T):
    x, y, h = drawn(gate, kind, constant, T)
    out, end = FUNCTIONS[gate](x, y, state=h, return_state=True, **form)
    expected, last = loop(x, np.exp(y) if gate == "g" else y, h)
    assert out.dtype == expected.dtype
    assert relative_error(out, expected) <= 1e-12
    assert relative_error(end, last) <= 1e-12
    check_vjp(FUNCTIONS[gate], x, y, state=h, **form)


@every_form
@every_gate
def test_the_gradient_by_a_complex_step(gate, form):
    """dL of a real function is Im L(x + ih) / h, exact to rounding."""
    x, y, h = drawn(gate)
    (_, end), pull = la.vjp(FUNCTIONS[gate], x, y, state=h, return_state=True, **form)
    rng = np.random.default_rng(1)
    dout, dend = rng.standard_normal(x.shape), rng.standard_normal(end.shape)
    grads = pull(dout, dend)
    for n, name in enumerate(("x", gate, "state")):
        given = [x, y, h]
        direction = rng.standard_normal(given[n].shape)
        given[n] = given[n] + 1e-30j * direction
        out, last = FUNCTIONS[gate](*given[:2], state=given[2], return_state=True, **form)
        slope = ((out.imag * dout).sum() + (last.imag * dend).sum()) / 1e-30
        exact = (getattr(grads, name) * direction).sum()
        assert abs(slope - exact) <= 1e-12 * max(1.0, abs(exact))


@every_kind
@every_form
def test_packed_sequences_are_one_by_one_to_the_bit(form, kind):
    x, a, h = drawn("a", kind, T=23, B=(1,), N=4)
    offsets = [0, 0, 1, 18, 23]
    out, end = FUNCTIONS["a"](x, a, state=h, cu_seqlens=offsets, return_state=True, **form)
    for n, (start, stop) in enumerate(pairwise(offsets)):
        one, last = FUNCTIONS["a"](x[:, start:stop], a[:, start:stop], state=h[n : n + 1], return_state=True, **form)
        np.testing.assert_array_equal(out[:, start:stop], one)
        np.testing.assert_array_equal(end[n : n + 1], last)
    check_vjp(FUNCTIONS["a"], x, a, state=h, cu_seqlens=offsets, **form)


@every_form
def test_no_later_token_changes_an_earlier_output(form):
    x, a, _ = drawn("a", T=37)
    out = FUNCTIONS["a"](x, a, **form)
    for t in (1, 2, 15, 16, 31, 36):
        y, b = x.copy(), a.copy()
        y[:, t:] *= 1e30
        b[:, t:] = 0
        np.testing.assert_array_equal(FUNCTIONS["a"](y, b, **form)[:, :t], out[:, :t])


@every_form
@pytest.mark.parametrize("gate", [0.0, -1.0, 1.0, 2.0, -np.inf])
def test_any_gate_is_exact(form, gate):
    """Resets, alternating signs, sums, growth."""
    x, y, h = drawn("a", T=11)
    a = np.where(np.arange(11)[:, None] % 3 == 0, gate, y) if np.isfinite(gate) else np.exp(np.full_like(y, gate))
    assert relative_error(FUNCTIONS["a"](x, a, state=h, **form), loop(x, a, h)[0]) <= 1e-13


@every_form
@every_kind
def test_reverse_step_positions_and_layouts(kind, form):
    x, a, h = drawn("a", kind)
    one = FUNCTIONS["a"]
    out, end = one(x[:, ::-1], a[:, ::-1], state=h, return_state=True, **form)
    back, first = one(x, a, state=h, return_state=True, reverse=True, layout="heads_first", **form)
    np.testing.assert_array_equal(back[:, ::-1], out)
    np.testing.assert_array_equal(first, end)
    *_, states = one(x, a, state=h, return_states_at=[0, 7, 23], **form)
    assert relative_error(states, np.stack([h, loop(x, a, h)[0][:, 6], loop(x, a, h)[1]], axis=1)) <= 1e-13
    stepped, last = la.step(one, x[:, 0], a[:, 0], state=h, return_state=True)
    np.testing.assert_array_equal(stepped, last)
    assert relative_error(stepped, loop(x[:, :1], a[:, :1], h)[1]) <= 1e-15


def test_real_inputs_of_a_complex_recurrence_have_real_gradients():
    """The output is complex as soon as anything is; a gradient has the dtype of its array."""
    x, a, h = drawn("a", "complex")
    (out, end), pull = la.vjp(FUNCTIONS["a"], x.real, a, state=h, return_state=True)
    assert out.dtype == end.dtype == np.complex128
    grads = pull(out, end)
    assert (grads.x.dtype, grads.a.dtype, grads.state.dtype) == (np.float64, np.complex128, np.complex128)
    check_vjp(FUNCTIONS["a"], x.real, a, state=h)
    assert FUNCTIONS["a"](x.real.astype(np.float32), a.astype(np.complex64)).dtype == np.complex64


@every_form
def test_no_tokens_of_a_complex_recurrence_are_complex(form):
    x, a, h = drawn("a", "complex", T=0)
    (out, end), pull = la.vjp(FUNCTIONS["a"], x.real, a, state=h, return_state=True, **form)
    assert out.dtype == end.dtype == np.complex128
    assert pull(out, end).x.dtype == np.float64


def test_what_is_not_complex():
    """Arrays that have no use for complex numbers do not take them."""
    x, *_ = drawn("a", "complex", T=4, D=2)
    with pytest.raises(TypeError, match="linear_attention: v has dtype complex128, expected one of float16"):
        la.linear_attention(x.real[..., None, :], x.real[..., None, :], x[..., None, :])
