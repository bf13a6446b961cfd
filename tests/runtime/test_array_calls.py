"""Array calls around the core are a part of the recorded plan, with the bits of a first call."""

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import dispatch, replay
from linattn_np.call.explain import IN_PART
from linattn_np.runtime.agreement import agrees
from linattn_np.runtime.tracing import Trace, Untraceable

pytest.importorskip("numba")

CASES = [
    (la.hgrn2, {}), (la.longhorn, {}), (la.efla, {}), (la.gdn2, {}), (la.retention, {}), (la.gsa, {}), (la.mlstm, {}),
    (la.mamba2, {"dt_softplus": True, "dt_limit": (0.3, 1.0)}), (la.linear_attention, {"feature_map": "elu+1"}),
    (la.linear_attention, {"feature_map": "elu+1", "normalize": True, "eps": 0.5}), (la.rfa, {}), (la.based, {}),
    (la.gated_delta_rule, {"qk_l2norm": True, "beta_sigmoid": True}), (la.kda, {"qk_l2norm": True, "l2norm_eps": 1e-6}),
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
    plan = found[-1][0][1].plan
    assert plan is not replay.computed_in_full
    assert not dispatch.is_in_part(plan)


def test_a_number_that_leaves_a_traced_array():
    (x,) = Trace([np.ones(3, np.float32)]).arrays
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
    given = numbers(la.mesa_net, 0, 1)
    replay.clear()
    assert la.explain(la.mesa_net, **given).replay == "replayed"
    la.mesa_net(**given)
    found = la.explain(la.mesa_net, **given)
    assert found.replay == IN_PART
    assert str(found).endswith(IN_PART)
