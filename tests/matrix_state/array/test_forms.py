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
