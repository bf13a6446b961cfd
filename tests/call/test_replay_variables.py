"""Replay of calls with a change of variables: it is computed by every call, the core's loops are replayed."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite")

import array_api_strict

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.call.replay.template import RecordedFunction
from linattn_np.matrix_state import core
from linattn_np.matrix_state.cpu import loops
from linattn_np.matrix_state.types import Inputs, Plan, Readout
from linattn_np.runtime.shapes import sequences
from tests.cases import CASES, draw, of_matrices, parts, parts_like, passes_through

CHANGED = [  # a change of variables, a preprocessing step, or work after the core
    case
    for case in of_matrices(CASES)
    if case.fn.__name__ not in ("delta_product", "gdn2")  # NumPy computes a part of their preprocessing
    and (
        (case.spec.readout is Readout.LINEAR and (case.spec.change.gate or not passes_through(case.fn)))
        or case.options.get("qk_l2norm")
        or "A_log" in case.given
    )
]
every_case = pytest.mark.parametrize("case", CHANGED, ids=str)
IN_PLACE = [
    (case, in_place) for case in CHANGED for in_place in (False, True) if not (in_place and case.spec.state.parts)
]
FORMS = {"tokens": 3, "chunks": 40}


@pytest.fixture(autouse=True)
def no_plans():
    replay.clear()
    yield
    replay.clear()


@pytest.fixture
def sealed(monkeypatch):
    """A function after which the compiled loops run only from recorded plans."""

    def fails(*arguments):
        raise AssertionError("the tables of the loops were built again")

    return lambda: monkeypatch.setattr(loops, "forward", fails)


def drawn(case, T, seed=0):
    arrays, state = draw(case, T=T, dtype=np.float32, seed=seed)
    return arrays, copied(state)


def copied(state):
    return parts_like(state, [S.copy() for S in parts(state)])


def as_bytes(found):
    return [(y.shape, y.dtype, y.tobytes()) for y in parts(found)]


@pytest.mark.parametrize(("case", "in_place"), IN_PLACE, ids=str)
@pytest.mark.parametrize("T", FORMS.values(), ids=FORMS)
def test_a_repeated_call_builds_no_tables(case, T, in_place, sealed):
    (x, S), (y, R), options = drawn(case, T), drawn(case, T, seed=1), {"overwrite_state": in_place}
    expected = as_bytes(case.fn(**y, **case.options, state=copied(R), return_state=True))
    replay.clear()
    for _ in range(2):
        case.fn(**x, **case.options, state=copied(S), return_state=True, **options)
    sealed()
    out, end = case.fn(**y, **case.options, state=R, return_state=True, **options)
    assert as_bytes((out, end)) == expected
    assert (end is R) == in_place


def test_an_overwritten_state_inside_an_input_is_computed_in_full():
    """The decay of hgrn2 lies in the state: its loops may not write there."""
    rng = np.random.default_rng(0)
    q, v = rng.standard_normal((2, 1, 1, 2, 4)).astype(np.float32)

    def call(shared):
        S = np.random.default_rng(1).uniform(-1, 0, (1, 2, 4, 4)).astype(np.float32)
        g = (S if shared else S.copy()).reshape(1, 1, 4, 8)[:, :, 1:3, :4]
        out = la.hgrn2(q, v, g, state=S, overwrite_state=True)
        return out.tobytes(), S.tobytes()

    expected = call(shared=True)
    replay.clear()
    for _ in range(3):
        call(shared=False)
    assert call(shared=True) == expected


def test_inputs_of_another_layout_are_computed_in_full():
    """The forward of a core, recorded on inputs of one layout."""
    x = np.random.default_rng(0).standard_normal((4, 1, 5, 2, 4)).astype(np.float32)
    q, k, v, other = x
    S, plan = np.zeros((1, 2, 4, 4), np.float32), Plan(np, np.float32, 1.0, sequences=tuple(sequences(5, None)))
    count = 0

    def forward(inputs, state):
        nonlocal count
        count += 1
        return core.forward("f", inputs, plan, state, "numba")

    recorded = RecordedFunction(np, forward)
    for _ in range(4):
        recorded(Inputs(q, k, v, r=k), S)
        assert count == 1
    others = [{"r": other}, {"v": v[..., :2]}, {"q": q[:, ::-1]}, {"g": q}, {"k": k.astype(np.float64), "r": None}]
    for n, change in enumerate(others):
        inputs = Inputs(q, k, v, r=k)._replace(**change)
        out, end, _ = recorded(inputs, S)
        expected = core.forward("f", inputs, plan, S, "numba")
        assert as_bytes((out, end)) == as_bytes(expected[:2])
        assert count == 2 + n
    recorded(Inputs(q, k, v, r=k), S)
    assert count == 1 + len(others)


G = np.ones((1, 1, 2, 4))
REASONS = [
    ((G, G + 1, -G), {}, "replayed"),
    ((G, G + 1, -G), {"state": np.ones((1, 2, 4, 4)), "overwrite_state": True}, "replayed"),
    ((G, G, -G), {}, "two arrays begin at one address"),
    ((G, G + 1, -G), {"cu_seqlens": [0, 1]}, "the batch is ragged"),
    ((G, G + 1, -G), {"state": np.ones((3, 2, 4, 4)), "state_rows": [1]}, "replayed"),
    (tuple(map(array_api_strict.asarray, (G, G + 1, -G))), {}, "the arrays are of array_api_strict"),
    ((G, G + 1, (-G).astype(">f8")), {}, "an option is an array, or the bytes of an array are swapped"),
]


@pytest.mark.parametrize(("arrays", "options", "expected"), REASONS, ids=lambda x: str(x)[:30])
def test_explain_says_whether_a_call_is_replayed(arrays, options, expected, monkeypatch):
    replay.clear()
    before = replay.NOT_YET if expected == "replayed" else expected
    assert la.explain(la.hgrn2, *arrays, **options).replay == before
    la.hgrn2(*arrays, **options)
    found = la.explain(la.hgrn2, *arrays, **options)
    assert found.replay == expected
    line = "repeated calls are " + ("replayed" if expected == "replayed" else f"computed in full: {expected}")
    assert str(found).endswith(line)
    replay.clear()
    for _ in range(2):
        la.hgrn2(*arrays, **options)
    plans = [*replay.by_key.values()]
    assert (expected == "replayed") == (bool(plans) and plans[0] is not replay.computed_in_full)
    monkeypatch.setattr(replay, "ENABLED", False)
    assert la.explain(la.hgrn2, *arrays, **options).replay == "LINATTN_REPLAY is 0"


def test_a_map_given_as_functions_is_not_replayed():
    pair = (lambda x: x * x, lambda x, d: 2 * x * d)
    found = la.explain(la.linear_attention, G, G + 1, G + 2, feature_map=pair, normalize=False)
    assert found.replay.startswith("an option is neither")
