"""The compiled loops of the elementwise core: widths, threads, layouts of memory, dtypes of storage."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import eps_of, relative_error
from tests.elementwise.test_core import FUNCTIONS, drawn, every_gate, every_kind

WIDTHS = (1, 7, 16, 65, 300)


def computed(fn, x, y, h, **options):
    """Every result and gradient of a call."""
    result, pull = la.vjp(fn, x, y, state=h, return_state=True, **options)
    rng = np.random.default_rng(1)
    grads = pull(*(rng.standard_normal(z.shape).astype(z.dtype) for z in result))
    return [*result, *grads]


def narrowed(kind, *arrays):
    """Arrays in single precision."""
    return [x.astype(np.complex64 if kind == "complex" else np.float32) for x in arrays]


@pytest.mark.parametrize("constant", [False, True], ids=["tokens", "constant"])
@pytest.mark.parametrize("D", WIDTHS)
@every_gate
@every_kind
def test_any_width_and_length_is_the_definition(kind, gate, D, constant):
    x, y, h = drawn(gate, kind, constant, T=150, D=D)
    y = np.tanh(y) if gate == "a" and kind == "real" else y / (1 + abs(y)) if gate == "a" else y
    for arrays, bound in (((x, y, h), 1e-12), (narrowed(kind, x, y, h), 300 * 2.0**-23)):
        found, expected = (computed(FUNCTIONS[gate], *arrays, backend=n) for n in ("numba", "reference"))
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            assert relative_error(a, b) <= bound


@every_gate
@every_kind
def test_threads_do_not_change_bits(kind, gate):
    x, y, h = drawn(gate, kind, T=70, D=300, B=(3,))
    one, two = (computed(FUNCTIONS[gate], x, y, h, backend="numba", num_threads=n) for n in (1, 5))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


@every_gate
@every_kind
def test_arrays_of_any_layout(kind, gate):
    """Channels apart, tokens reversed, one batch row for all, read-only."""
    x, y, h = drawn(gate, kind, T=70, D=5, B=(3,))
    expected = computed(FUNCTIONS[gate], x, y, h, backend="numba")
    apart = np.ascontiguousarray(np.moveaxis(x, -1, 0))
    apart.flags.writeable = False
    found = computed(FUNCTIONS[gate], np.moveaxis(apart, 0, -1), y[:, ::-1].copy()[:, ::-1], h, backend="numba")
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    shared = FUNCTIONS[gate](x, np.broadcast_to(y[:1], x.shape), state=h)
    np.testing.assert_array_equal(shared, FUNCTIONS[gate](x, np.repeat(y[:1], 3, axis=0), state=h))


@every_gate
def test_sixteen_bits_are_storage(gate):
    x, y, h = (z.astype(np.float16) for z in drawn(gate, T=70, D=33))
    out = FUNCTIONS[gate](x, y, state=h)
    assert out.dtype == np.float16
    wide = FUNCTIONS[gate](x.astype(np.float32), y.astype(np.float32), state=h.astype(np.float32))
    assert relative_error(out, wide) <= eps_of(out)


@every_kind
def test_a_pullback_may_be_called_again(kind):
    x, y, h = drawn("a", kind, T=150, D=9)
    out, pull = la.vjp(FUNCTIONS["a"], x, y, state=h)
    first, again = pull(out), pull(out)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


@every_gate
@every_kind
def test_a_repeated_call_has_the_same_bits(kind, gate):
    x, y, h = drawn(gate, kind, T=9, D=33)
    first = [FUNCTIONS[gate](x + n, y, state=h, return_state=True) for n in range(3)]
    la.clear_cache()
    for n in reversed(range(3)):
        for a, b in zip(first[n], FUNCTIONS[gate](x + n, y, state=h, return_state=True), strict=True):
            np.testing.assert_array_equal(a, b)


@every_gate
@every_kind
def test_gradients_of_constant_gates_are_replayed(kind, gate):
    """Their sums over sequences, and the slope of an exponential, are loops too."""
    from linattn_np.call.replay import plans
    from linattn_np.call.replay.vjp import Forward

    x, y, h = drawn(gate, kind, constant=True, T=9, D=5, B=(3,))
    plans.clear()
    calls = [computed(FUNCTIONS[gate], x, y, h) for _ in range(3)]
    (plan,) = plans.by_key.values()
    assert isinstance(plan, Forward)
    assert plan.replayable
    for found in calls[1:]:
        for a, b in zip(found, calls[0], strict=True):
            np.testing.assert_array_equal(a, b)
