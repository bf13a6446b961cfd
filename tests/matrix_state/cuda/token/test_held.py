"""Recorded plans of GPU calls hold none of the arrays of the call that they were recorded from."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.runtime.cuda import constants
from tests.cases import PLAIN, draw, parts, parts_like
from tests.matrix_state.cuda.step_twin import CUPY, Stub, stub
from tests.matrix_state.cuda.token import host as step_calls

launched, public = step_calls.launched, step_calls.public
WAYS = [(1, None), (3, "reference"), (37, "chunks")]  # tokens, backend


def called(case, T, backend):
    """A call with a state, and its gradients: recorded, then replayed if they can be."""
    arrays, state = draw(case, T=T, H=2, K=8, V=8, dtype=np.float32)
    given = {n: stub(x) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
    given |= {"state": parts_like(state, [stub(S) for S in parts(state)]), "backend": backend, "return_state": True}
    for _ in range(2):
        case.fn(**given, **case.options)
        result, pull = la.vjp(case.fn, **given, **case.options)
        pull(stub(result[0]), parts_like(result[1], [stub(S) for S in parts(result[1])]))


@pytest.mark.parametrize(
    ("case", "way"),
    [
        (case, way)
        for case in PLAIN
        for way in WAYS
        if way != (1, None) or not case.spec.micro_steps  # of several steps: chunks
    ],
    ids=str,
)
def test_a_plan_holds_no_array_of_its_call(public, monkeypatch, case, way):
    gc.freeze()  # collect() looks at what this test makes, and not at all that was imported
    made = []
    if way[0] == 1:
        step_calls.backward_by_array_calls(monkeypatch)
    monkeypatch.setattr(Stub, "__array_finalize__", lambda x, _: made.append(weakref.ref(x)), raising=False)
    called(case, *way)
    gc.collect()
    assert replay.count()
    assert len(made) > 10
    held = [x() for x in made]
    assert not [x.shape for x in held if x is not None and not any(x is y for y in constants._cached.values())]


def test_constants_hold_little_memory(public, monkeypatch):
    """One that does not fit is made by every call."""
    monkeypatch.setattr(constants, "MOST_BYTES", 100)
    made = []

    def once(key, size):
        return constants.once(CUPY, key, 0, lambda: made.append(key) or stub(np.ones(size, np.float32)))

    for _ in range(2):
        assert once("fits", 20).sum() == 20
        assert once("does not", 6).sum() == 6
        assert once("fits too", 5).sum() == 5
    assert made == ["fits", "does not", "fits too", "does not"]
