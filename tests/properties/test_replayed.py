"""`la.explain(...).replay` says after a call what docs/replay.md promises, and plans are what it says."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.explain import IN_PART
from linattn_np.call.replay import host, plans
from linattn_np.call.replay import plans as replay
from linattn_np.fast_weights.core import FastWeights
from tests.cases import CASES, draw

pytest.importorskip("numba")

IN_PARTS = {"mesa_net"}  # the call looks at the least entry of ridge
SOFTMAX = "the tasks depend on the numbers of tokens in the caches"


@pytest.fixture(autouse=True)
def nothing_recorded():
    replay.clear()
    yield
    replay.clear()


def float32(x):
    """Arrays of float64 in float32."""
    if isinstance(x, tuple):
        return type(x)(*map(float32, x))
    return x.astype(np.float32) if x.dtype == np.float64 else x


@pytest.mark.parametrize("T", [1, 5, 40])
@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_a_call_with_default_options_is_replayed_whole(fn, T):
    """With and without a state, given or returned, and vjp; functions of the softmax family in part."""
    sizes = {"B": (1,), "T": T, "H": 2, "K": 4, "V": 4, "M": 8}
    x = {n: float32(y) for n, y in la.testing.sample(fn, np.random.default_rng(0), optional=False, **sizes).items()}
    state = fn(**x, return_state=True)[1]
    whole = "replayed" if fn.__name__ not in IN_PARTS and not fn.spec.grows else f"{IN_PART} ("
    for more in ({}, {"return_state": True}, {"state": state}, {"state": state, "return_state": True}):
        fn(**x, **more)
        found = la.explain(fn, **x, **more).replay
        assert found.startswith(whole)
        assert fn.spec.grows == (found == f"{IN_PART} ({SOFTMAX})")


# NumPy computes a part of their transposes, or of their core
VJP_IN_PARTS = {"abc", "diagonal_longhorn", "lightning_attention", "log_linear_gated_delta_rule",
                "log_linear_gla", "lru", "mamba2", "matrix_gate", "mesa_net",
                "min_gru", "min_lstm", "performer", "retention", "retnet", "rfa", "rg_lru", "rwkv4", "s4d",
                "selective_scan", "transxssm"}  # fmt: skip
LEARNERS = {fn.__name__ for fn in la.VARIANTS if isinstance(fn.spec.core, FastWeights)}  # likewise
VJP_WHOLE = [fn for fn in la.VARIANTS if fn.__name__ not in VJP_IN_PARTS | LEARNERS and not fn.spec.grows]


@pytest.mark.parametrize("fn", VJP_WHOLE, ids=lambda fn: fn.__name__)
def test_a_vjp_is_replayed_whole(fn):
    """With all optional arrays: the second call and its pullback are recorded kernels, and nothing else."""
    x = la.testing.sample(fn, np.random.default_rng(0), B=(1,), T=5, H=2, K=4, V=4, M=8)
    x = {n: float32(y) for n, y in x.items()}
    for _ in range(2):
        out, pullback = la.vjp(fn, **x)
        pullback(np.ones_like(out))
    (plan,) = replay.by_key.values()
    assert isinstance(plan, host.Forward)
    assert plan.replayable


RAW = [
    case
    for case in CASES
    if case.fn.__name__ not in IN_PARTS
    and {"qk_l2norm", "beta_sigmoid"} & case.spec.options.defaults.keys()
    and not case.options
]


@pytest.mark.parametrize("case", RAW, ids=str)
def test_raw_projections_are_replayed_whole(case):
    """Norms, strengths and gates of projections, with default options otherwise."""
    x, _ = draw(case, (1,), T=5, H=2, K=4, V=4, dtype=np.float32)
    options = {n: True for n in ("qk_l2norm", "beta_sigmoid") if n in case.spec.options.defaults}
    case.fn(**x, **options)
    assert la.explain(case.fn, **x, **options).replay == "replayed"
    plan = replay.by_key[plans.signature_of(case.spec, (), {**x, **options})[0]]
    assert plan.reason == ""


@pytest.mark.parametrize(
    ("options", "reason"), [({"feature_map": "favor+"}, "NumPy computed an array of the call")], ids=str
)
def test_explain_says_why_a_call_is_replayed_in_part(options, reason):
    x = np.random.default_rng(0).standard_normal((3, 1, 5, 5, 4)).astype(np.float32)
    beta = x[0, ..., 0].copy()
    la.delta_rule(*x[:3], beta, **options)
    assert la.explain(la.delta_rule, *x[:3], beta, **options).replay == f"{IN_PART} ({reason})"


def test_a_fault_of_the_recorder_is_not_hidden(monkeypatch):
    """Only what cannot be recorded, and no other error, makes a plan in part."""
    x = {n: float32(y) for n, y in la.testing.sample(la.gla, np.random.default_rng(0), B=(1,), T=5).items()}

    def fault(*arguments):
        raise AttributeError("a fault")

    monkeypatch.setattr(host, "position", fault)
    with pytest.raises(AttributeError, match="a fault"):
        la.gla(**x)
