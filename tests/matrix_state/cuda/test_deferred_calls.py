"""One token with a change of variables on arrays that look like CuPy's: one kernel before the core's, one after."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import dispatch, replay
from linattn_np.runtime.cuda import launch, record
from tests.cases import parts
from tests.matrix_state.cuda import test_step_calls as step_calls
from tests.matrix_state.cuda.step_twin import device_plans, stub

launched, public = step_calls.launched, step_calls.public
B, H, K, V = 2, 4, 8, 8

# calls, and how many kernels: before the core's, of the core, after it
CALLS = {
    "hgrn2": (la.hgrn2, {}, 2), "longhorn": (la.longhorn, {}, 2), "efla": (la.efla, {}, 2), "gdn2": (la.gdn2, {}, 2),
    "mamba2": (la.mamba2, {"dt_softplus": True}, 3),
    "l2norm": (la.gated_delta_rule, {"qk_l2norm": True, "A_log": True}, 2),
    "kda": (la.kda, {"qk_l2norm": True, "A_log": True}, 2),
    "elu+1": (la.linear_attention, {"feature_map": "elu+1"}, 2),
    "normalize": (la.linear_attention, {"feature_map": "elu+1", "normalize": True}, 3),
    "gsa": (la.gsa, {}, 3), "abc": (la.abc, {}, 4), "mlstm": (la.mlstm, {}, 3),
    "based": (la.based, {}, 3), "rebased": (la.rebased, {}, 3), "performer": (la.performer, {}, 3),
    "rfa": (la.rfa, {}, 3), "retention": (la.retention, {}, 1), "gla": (la.gla, {}, 1),
}  # fmt: skip


def drawn(fn, options, seed):
    """Arrays of one token, and a state, in NumPy."""
    rng = np.random.default_rng(seed)
    optional = fn is la.mamba2
    found = la.testing.sample(fn, rng, B=(B,), T=1, H=H, Hk=H, Hq=H, K=K, V=V, optional=optional)
    arrays = {n: x.astype(np.float32) for n, x in found.items()}
    more = {n: x for n, x in options.items() if n != "A_log"}
    if "A_log" in options:
        bias = (H, K) if fn is la.kda else (H,)
        arrays |= {"A_log": rng.uniform(0, 1, H).astype(np.float32),
                   "dt_bias": rng.uniform(0, 1, bias).astype(np.float32)}
    before = {n: x.astype(np.float32) for n, x in
              la.testing.sample(fn, rng, B=(B,), T=3, H=H, Hk=H, Hq=H, K=K, V=V, optional=optional).items()}
    before |= {n: arrays[n] for n in ("A_log", "dt_bias") if n in arrays}
    return arrays, more, fn(**before, **more, return_state=True)[1]


def moved(x):
    return type(x)(*map(stub, x)) if isinstance(x, tuple) else stub(x)


@pytest.mark.parametrize("how", ["new", "in place", "step"])
@pytest.mark.parametrize("name", CALLS)
def test_repeated_calls_are_their_launches(public, monkeypatch, name, how):
    """NumPy's results, the same bits from a first call and from a replayed one, in so many launches."""
    fn, options, count = CALLS[name]
    fired = []
    real = record.LaunchSequence.run
    monkeypatch.setattr(record.LaunchSequence, "run",
                        lambda self, pointers: fired.append(len(self._launches)) or real(self, pointers))
    for seed in range(3):
        arrays, more, state = drawn(fn, options, seed)
        expected = fn(**arrays, **more, state=state, return_state=True)
        found = []
        for again in (False, True):
            if not again:
                replay.clear()
            mine, own = {n: stub(x) for n, x in arrays.items()}, moved(state)
            given = more | {"state": own, "return_state": True}
            if how == "in place":
                given["overwrite_state"] = True
            if how == "step":
                mine = {n: stub(x[:, 0]) if x.ndim > 2 and x.shape[:2] == (B, 1) else x for n, x in mine.items()}
            with monkeypatch.context() as nothing_planned:
                if again:
                    nothing_planned.setattr(dispatch, "prepare", None)
                result = la.step(fn, **mine, **given) if how == "step" else fn(**mine, **given)
            out = result[0][:, None] if how == "step" else result[0]
            each = [out, *parts(result[1])]
            for x, y in zip(each, [expected[0], *parts(expected[1])], strict=True):
                assert x.shape == y.shape
                assert np.abs(x - y).max() <= 1e-5 * max(1, np.abs(y).max())
            if how == "in place":
                assert all(x is y for x, y in zip(parts(result[1]), parts(own), strict=True))
            found.append([np.asarray(x).tobytes() for x in each])
        assert found[0] == found[1]
        assert len(device_plans()) == 1
    print(name, how, fired)
