"""Array calls around the core are a part of the recorded plan, with the bits of a first call."""

import weakref

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import dispatch, replay
from linattn_np.call.explain import IN_PART
from linattn_np.runtime.agreement import agrees
from linattn_np.runtime.tracing import Trace, Untraceable, plain

pytest.importorskip("numba")

from linattn_np.matrix_state.cpu.l2norm import unit_rows
from linattn_np.matrix_state.types import Plan
from linattn_np.ops.cpu.programs import Ahead, Places, Views, record
from linattn_np.runtime.pieces.memory import handles

CASES = [
    (la.hgrn2, {}),
    (la.longhorn, {}),
    (la.efla, {}),
    (la.gdn2, {}),
    (la.retention, {}),
    (la.gsa, {}),
    (la.mlstm, {}),
    (la.mamba2, {"dt_softplus": True, "dt_limit": (0.3, 1.0)}),
    (la.linear_attention, {"feature_map": "elu+1"}),
    (la.linear_attention, {"feature_map": "elu+1", "normalize": True, "eps": 0.5}),
    (la.rfa, {}),
    (la.based, {}),
    (la.abc, {}),
    (la.retnet, {}),
    (la.retnet, {"xpos": True}),
    (la.transxssm, {"dt_softplus": True}),
    (la.rebased, {}),
    (la.mesa_net, {}),
    (la.mesa_net, {"solver": "conjugate_gradients", "iterations": 3}),
    (la.performer, {}),
    (la.linear_attention, {"feature_map": "dpfp"}),
    (la.linear_attention, {"feature_map": "hedgehog", "normalize": True}),
    (la.delta_product, {}),
    (la.delta_product, {"qk_l2norm": True, "beta_sigmoid": True}),
    (la.gated_delta_rule, {"qk_l2norm": True, "beta_sigmoid": True}),
    (la.kda, {"qk_l2norm": True, "l2norm_eps": 1e-6}),
]


def numbers(fn, seed, T):
    given = la.testing.sample(fn, np.random.default_rng(seed), B=(2,), T=T, H=2, K=4, V=6)
    return {n: x.astype(np.float32) for n, x in given.items()}


def arrays_of(found):
    out, state = found
    return [y.tobytes() for y in (out, *(state if isinstance(state, tuple) else (state,)))]


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize(("fn", "options"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_repeated_call_is_one_plan_with_the_same_bits(fn, options, T, overwrite, monkeypatch):
    """With states as they are returned; other numbers at other places."""
    sets = [numbers(fn, seed, T) for seed in range(3)]

    def calls(more):
        states = [fn(**x, **options, return_state=True)[1] for x in sets]
        return [(more(fn, x, S), S) for x, S in zip(sets, states, strict=True)]

    def call(fn, x, S):
        keywords = {**x, **options, "state": S, "return_state": True, "overwrite_state": overwrite}
        found = fn(**keywords)
        return arrays_of(found), replay.plans.get(replay.signature(fn.spec, (), keywords)[0])

    with monkeypatch.context() as patch:
        patch.setattr(replay, "ENABLED", False)
        replay.clear()
        expected = [found for (found, _), _ in calls(call)]
    found = calls(call)
    assert [one for (one, _), _ in found] == expected
    recorded = found[-1][0][1]
    assert recorded.plan is not replay.computed_in_full
    assert not dispatch.is_in_part(recorded)


X = np.random.default_rng(0).standard_normal((3, 2, 4, 5)).astype(np.float32)
VOCABULARY = {
    "sum of the last axes": lambda x: np.sum(x, axis=(-2, -1)),
    "sum of the first axis": lambda x: np.sum(x, axis=0),
    "sum of two axes": lambda x: np.sum(x, axis=(0, 1), keepdims=True),
    "least": np.min,
    "maxima of an axis": lambda x: np.max(x, axis=1),
    "stack": lambda x: np.stack([x, -x], axis=1),
    "roll": lambda x: np.roll(x, 2, axis=1),
    "running": lambda x: np.logaddexp.accumulate(x, axis=-3),
    "maxima in float64": lambda x: np.max(np.stack([x.astype(np.float64) * 0.1, x * 0.1 - 1.0], axis=-1), axis=-1),
    "mixed dtypes": lambda x: x * x.astype(np.float64)[..., :1],
    "chosen": lambda x: np.where(x > 0, x, np.zeros_like(x)),
    "copies apart": lambda x: np.stack([x, x[..., ::-1]], -1),
    "copies of float64": lambda x: np.roll(np.concatenate([x.astype(np.float64)] * 2, axis=-2), 1, axis=-1),
}


@pytest.mark.parametrize("name", VOCABULARY)
def test_traced_array_calls_are_those_of_numpy(name):
    f = VOCABULARY[name]
    expected, trace = f(X), Trace([X])
    traced = f(trace.arrays[0])
    assert plain(traced).tobytes() == expected.tobytes()
    assert (traced.shape, traced.dtype) == (expected.shape, expected.dtype)
    other = 2 * X
    found = Views(record(trace), Places(trace), trace, [traced]).run([other, np.empty(trace.bytes // 8)])[0]
    assert found.tobytes() == f(other).tobytes()


def test_numbers_are_not_written_to_an_array_of_zeros():
    trace = Trace([X])
    with pytest.raises(ValueError, match="read-only"):
        np.zeros_like(trace.arrays[0])[0] = trace.arrays[0][0]


def test_a_long_accumulation_is_not_traced():
    trace = Trace([np.ones((100, 2), np.float32)])
    (x,) = trace.arrays
    for use in (lambda y: np.maximum.accumulate(y) + y, lambda y: np.sum(y, axis=0), lambda y: y.sum(axis=0) + y):
        with pytest.raises(Untraceable, match=r"unknown origin|a long"):
            use(x)


def test_the_memory_of_a_trace_is_freed_with_it():
    """Also where a reduction was not traced."""
    trace = Trace([np.ones((100, 2), np.float32)])
    found, memory = trace.arrays[0] * np.float32(2), weakref.ref(trace.memory.base)
    with pytest.raises(Untraceable):
        np.maximum.accumulate(found) + found
    del trace, found
    assert memory() is None


def test_a_number_that_leaves_a_traced_array():
    trace = Trace([np.ones(3, np.float32)])
    (x,) = trace.arrays
    for use in (float, bool, lambda y: y[:1].item(), lambda y: y.tolist(), np.linalg.norm, lambda y: y @ y):
        with pytest.raises(Untraceable):
            use(x.sum() if use in (float, bool) else x)


def test_a_plan_with_a_number_of_the_first_call_is_refused():
    x = np.arange(1.0, 5.0, dtype=np.float32)
    held = float(x[0])
    full = lambda arrays, state, pointers: (arrays[0] * float(arrays[0][0]), None)  # noqa: E731
    assert agrees(full, full, [x], None)
    assert not agrees(lambda arrays, state, pointers: (arrays[0] * np.float32(held), None), full, [x], None)


def test_explain_says_that_array_calls_are_made():
    given, map = numbers(la.delta_rule, 0, 1), {"feature_map": "favor+"}  # a product with a matrix
    replay.clear()
    assert la.explain(la.delta_rule, **given, **map).replay == "replayed"
    la.delta_rule(**given, **map)
    found = la.explain(la.delta_rule, **given, **map)
    assert found.replay == f"{IN_PART} (a result that is no view)"
    assert str(found).endswith(found.replay)


def test_a_kernel_among_calls_that_others_continue_stays_in_its_memory():
    """Of a program whose first calls have computed for another: their memory is not that of its own results."""
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    trace = Trace([x])
    y = trace.arrays[0]
    for _ in range(200):  # what lies before the kernel's memory
        y = y + np.float32(1)
    ahead = Ahead(unit_rows(Plan(np, np.float32, 1.0), (y,))[0].trace)
    following = ahead.following
    z = following.arrays[0] * np.float32(2)
    program, memory = record(following), np.zeros(following.bytes + trace.bytes + 4096, np.uint8)
    program.call(handles([x, np.empty(ahead.words()), memory]))
    assert plain(z).tobytes() in memory[: following.bytes].tobytes()
    assert not memory[following.bytes :].any()
