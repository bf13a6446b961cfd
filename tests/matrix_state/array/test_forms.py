"""Every cell of the core: recurrent, chunk (loop and scan) and parallel form are one function, and one adjoint."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.array import chunks
from linattn_np.testing import relative_error
from tests.core_cases import CELLS, case

FORMS = [(1, "loop"), (8, "loop"), (16, "loop"), (64, "loop"), (8, "scan"), (3, "scan"), ("parallel", "loop")]
HEADS = {"equal": (2, 2, 2), "shared keys": (1, 1, 2), "shared values": (4, 2, 2), "shared k": (2, 1, 2)}


def errors(x, plan, state, dout, dstate, reference, states):
    out, end, saved = chunks.forward(x, plan, state, states)
    grads, begin = chunks.backward(saved, dout, dstate)
    out0, end0, grads0, begin0 = reference
    found = {"out": relative_error(out, out0), "state": relative_error(end, end0)}
    found["dstate"] = relative_error(begin, begin0)
    for name, y in x._asdict().items():
        if y is not None:
            found["d" + name] = relative_error(getattr(grads, name), getattr(grads0, name))
    return found


def definition(x, plan, state, dout, dstate):
    out, end, saved = recurrence.forward(x, plan, state)
    return out, end, *recurrence.backward(saved, dout, dstate)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_all_forms_are_the_recurrence(cell, heads, monkeypatch):
    args = case(*cell, heads=HEADS[heads])
    x, plan, *rest = args
    reference = definition(*args)
    for C, states in FORMS:
        monkeypatch.setattr(policy, "ARRAY_CHUNK", 4 if C == "parallel" else 64)
        found = errors(x, plan._replace(chunk_size=C), *rest, reference, states)
        assert max(found.values()) < 1e-11, (C, states, found)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 97])
@pytest.mark.parametrize(
    "cell", [("vector", "delta", "after"), ("scalar", "free", "after"), ("outer", "none", "bonus")], ids="-".join
)
def test_awkward_lengths(cell, T):
    args = case(*cell, T=T, K=7, V=4)
    x, plan, *rest = args
    reference = definition(*args)
    for C, states in [(16, "loop"), (64, "loop"), (48, "loop"), (16, "scan")]:
        found = errors(x, plan._replace(chunk_size=C), *rest, reference, states)
        assert max(found.values()) < 1e-11, (C, states, found)


@pytest.mark.parametrize("cell", [c for c in CELLS if c[2] == "after"], ids="-".join)
def test_scan_and_loop_agree(cell):
    x, plan, state, dout, dstate = case(*cell, T=130)
    plan = plan._replace(chunk_size=16)
    results = []
    for states in ("loop", "scan"):
        out, end, saved = chunks.forward(x, plan, state, states)
        grads, begin = chunks.backward(saved, dout, dstate)
        results.append([out, end, begin, *(d for d in grads if d is not None)])
    assert max(relative_error(a, b) for a, b in zip(*results, strict=True)) < 1e-12


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_adjoint_of_the_definition_by_central_differences(cell):
    x, plan, state, dout, dstate = case(*cell, T=9)
    _, _, grads, begin = definition(x, plan, state, dout, dstate)
    rng = np.random.default_rng(1)

    def loss(x, state):
        out, end, _ = recurrence.forward(x, plan, state)
        return (out * dout).sum() + (end * dstate).sum()

    h = 1e-5
    for name in [*x._fields, "state"]:
        y = state if name == "state" else getattr(x, name)
        if y is None:
            continue
        z = rng.standard_normal(y.shape)
        if name == "state":
            numeric = (loss(x, y + h * z) - loss(x, y - h * z)) / (2 * h)
            exact = (begin * z).sum()
        else:
            up, down = (loss(x._replace(**{name: y + sign * h * z}), state) for sign in (1, -1))
            numeric, exact = (up - down) / (2 * h), (getattr(grads, name) * z).sum()
        assert abs(numeric - exact) <= 1e-7 * max(1, abs(exact)), name


def test_complex_step_of_the_definition():
    """The recurrence is analytic: a step of 1e-30 in the imaginary direction gives derivatives to the last digit."""
    x, plan, state, dout, dstate = case("vector", "delta", "after", T=13)
    _, _, grads, begin = definition(x, plan, state, dout, dstate)
    rng = np.random.default_rng(2)
    h, plan = 1e-30, plan._replace(dtype=np.complex128)
    for name in ("q", "k", "v", "g", "r", "beta"):
        y = getattr(x, name)
        z = rng.standard_normal(y.shape)
        moved = x._replace(v=x.v + 0j)._replace(**{name: y + 1j * h * z})
        out, end, _ = recurrence.forward(moved, plan, state)
        exact = ((out * dout).sum() + (end * dstate).sum()).imag / h
        assert abs(exact - (getattr(grads, name) * z).sum()) < 1e-12 * max(1, abs(exact)), name
    assert begin.shape == state.shape


@pytest.mark.parametrize("states", ["loop", "scan"])
def test_two_halves_with_the_state_handed_over_are_the_whole(states):
    x, plan, state, dout, dstate = case("vector", "delta", "after", T=40, C=8)
    cut = lambda y, s: None if y is None else y[:, s]  # noqa: E731
    out, end, saved = chunks.forward(x, plan, state, states)
    grads, begin = chunks.backward(saved, dout, dstate)
    first, second = slice(0, 24), slice(24, 40)
    half = lambda s: type(x)(*(cut(y, s) for y in x))  # noqa: E731
    part = lambda n: plan._replace(sequences=(plan.sequences[0]._replace(stop=n),))  # noqa: E731
    out1, mid, saved1 = chunks.forward(half(first), part(24), state, states)
    out2, end2, saved2 = chunks.forward(half(second), part(16), mid, states)
    grads2, dmid = chunks.backward(saved2, dout[:, second], dstate)
    grads1, begin1 = chunks.backward(saved1, dout[:, first], dmid)
    assert relative_error(np.concatenate([out1, out2], 1), out) < 1e-12
    assert relative_error(end2, end) < 1e-12
    assert relative_error(begin1, begin) < 1e-12
    for a, b, c in zip(grads1, grads2, grads, strict=True):
        if c is not None:
            assert relative_error(np.concatenate([a, b], 1), c) < 1e-12


def test_a_chunk_that_holds_all_tokens_is_the_parallel_form():
    """From the length of a tile on; below, it is one chunk."""
    plan = case("none", "none", "after")[1]
    of = lambda C, T: policy.is_parallel(plan._replace(chunk_size=C), T)  # noqa: E731
    assert of(70, 70)
    assert of(71, 70)
    assert not of(69, 70)
    assert not of(64, 64)
    assert not of(None, 70)
    assert of("parallel", 1)
