"""`la.explain(...).replay` says after a call what docs/replay.md promises, and plans are what it says."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.explain import IN_PART
from linattn_np.call.replay import device, plans
from linattn_np.call.replay import plans as replay
from linattn_np.call.replay.vjp import Forward
from linattn_np.fast_weights.core import FastWeights
from linattn_np.runtime.cuda import launch
from linattn_np.runtime.pieces import record
from tests.cases import CASES, cases_of, draw
from tests.matrix_state.cuda.step_twin import Stub, stub

pytest.importorskip("numba")

CACHES = "array calls change a cache"
BLAS = "BLAS computes products"
COUNTED = "the number of tokens so far decides where mini-batches end"
MADE = "NumPy computed an array of the call"
LEARNERS = tuple(fn for fn in la.VARIANTS if isinstance(fn.spec.core, FastWeights))
LARGE = (la.lact, la.atlas)
MAPPED = (la.path_attention, la.householder_positions, la.deltaformer)  # maps and systems between array calls


def part_of(fn, options):
    """What explain says of a call with default options, but for a state."""
    maps_cache = fn is la.path_attention and options
    if maps_cache or (fn is la.stick_breaking_attention and "state" in options):
        return f"{IN_PART} ({CACHES})"
    counted = COUNTED if fn in LEARNERS and "state" in options and fn.spec.counts else ""
    reason = BLAS if fn in LARGE else MADE if fn in MAPPED else counted
    return f"{IN_PART} ({reason})" if reason else "replayed"


@pytest.fixture(autouse=True)
def nothing_recorded():
    replay.clear()
    yield
    replay.clear()


def float32(x):
    """Arrays of float64 in float32, complex ones too."""
    if isinstance(x, tuple):
        return type(x)(*map(float32, x))
    return x.astype({"f": np.float32, "c": np.complex64}.get(x.dtype.kind, x.dtype))


@pytest.mark.parametrize("T", [1, 5, 40])
@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_a_call_with_default_options_is_replayed_whole(fn, T):
    """With and without a state, given or returned; in part some learners, and attention whose cache array calls change.

    Before a first call `explain` promises neither.
    """
    sizes = {"B": (1,), "T": T, "H": 2, "K": 4, "V": 4, "M": 8}
    x = {n: float32(y) for n, y in la.testing.sample(fn, np.random.default_rng(0), optional=False, **sizes).items()}
    state = fn(**x, return_state=True)[1]
    replay.clear()
    for more in ({}, {"return_state": True}, {"state": state}, {"state": state, "return_state": True}):
        assert la.explain(fn, **x, **more).replay == plans.NOT_YET
        fn(**x, **more)
        assert la.explain(fn, **x, **more).replay == part_of(fn, more)


STATES_WHOLE = [fn for fn in la.VARIANTS if not fn.spec.grows and not (fn in LEARNERS and fn.spec.counts)]
VJP_WHOLE = [fn for fn in la.VARIANTS if fn not in LARGE + MAPPED]


def assert_replayed(fn, x, cotangents):
    """The second call and its pullback are recorded kernels, and nothing else."""
    for _ in range(2):
        result, pullback = la.vjp(fn, **x)
        pullback(*cotangents(result))
    (plan,) = [one for key, one in replay.by_key.items() if key[0] == "vjp"]
    assert isinstance(plan, Forward)
    assert plan.replayable
    assert all(plan.pullbacks.values())


def drawn(fn):
    """All arrays of a call, optional ones too."""
    x = la.testing.sample(fn, np.random.default_rng(0), B=(1,), T=5, H=2, K=4, V=4, M=8)
    return {n: float32(y) for n, y in x.items()}


@pytest.mark.parametrize("of", ["ones", "out"])
@pytest.mark.parametrize("fn", VJP_WHOLE, ids=lambda fn: fn.__name__)
def test_a_vjp_is_replayed_whole(fn, of):
    """Cotangents: ones, and the output itself, as of a square loss."""
    assert_replayed(fn, drawn(fn), lambda out: [np.ones_like(out) if of == "ones" else out])


@pytest.mark.parametrize("fn", STATES_WHOLE, ids=lambda f: f.__name__)
def test_a_vjp_of_states_is_replayed_whole(fn):
    """From the state of another call, with a cotangent of the final one."""
    x = drawn(fn)
    state = fn(**x, return_state=True).state
    assert_replayed(fn, x | {"state": state, "return_state": True}, lambda result: map(copied, result))


COMPLEX = [fn for fn in la.VARIANTS if fn.spec.complex_arrays]


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("fn", COMPLEX, ids=lambda fn: fn.__name__)
def test_calls_on_complex_arrays_are_replayed_whole(fn, T):
    """All arrays that may be complex, and one after the other; gradients of real arrays are real."""
    x = la.testing.sample(fn, np.random.default_rng(0), B=(1,), T=T, H=2, K=4, V=4)
    for names in (fn.spec.complex_arrays, *({n} for n in fn.spec.complex_arrays)):
        own = {n: float32(y.astype(complex) if n in names else y.real) for n, y in x.items()}
        state = fn(**own, return_state=True).state
        more = {"state": state, "return_state": True}
        fn(**own, **more)
        assert la.explain(fn, **own, **more).replay == "replayed"
        replay.clear()
        assert_replayed(fn, own | more, lambda result: map(copied, result))
        replay.clear()


def copied(x):
    return type(x)(*map(copied, x)) if isinstance(x, tuple) else x.copy()


RAW = [case for case in CASES if {"qk_l2norm", "beta_sigmoid"} & case.spec.options.keys() and not case.options]


@pytest.mark.parametrize("case", RAW, ids=str)
def test_raw_projections_are_replayed_whole(case):
    """Norms, strengths and gates of projections, with default options otherwise."""
    x, _ = draw(case, (1,), T=5, H=2, K=4, V=4, dtype=np.float32)
    options = {n: True for n in ("qk_l2norm", "beta_sigmoid") if n in case.spec.options}
    case.fn(**x, **options)
    assert la.explain(case.fn, **x, **options).replay == "replayed"
    assert plans.signature_of(case.spec, (), {**x, **options})[0] in replay.by_key.keys() - replay.reasons.keys()


OPTIONS = {la.gdn2: {"qk_l2norm": True}, la.retnet: {"xpos": True}}
MAPS = [(la.linear_attention, {"feature_map": name}) for name in ("elu+1", "hedgehog", "dpfp", "taylor", "fourier")]


@pytest.mark.parametrize(("fn", "options"), [*OPTIONS.items(), *MAPS], ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_vjp_with_options_is_replayed_whole(fn, options):
    """The transposes of norms, decays of channels and feature maps are kernels too."""
    assert_replayed(fn, drawn(fn) | options, lambda out: [np.ones_like(out)])


def test_explain_says_why_a_call_is_replayed_in_part():
    options, reason = {"feature_map": "favor+"}, "NumPy computed an array of the call"
    x = np.random.default_rng(0).standard_normal((3, 1, 5, 5, 4)).astype(np.float32)
    beta = x[0, ..., 0].copy()
    la.delta_rule(*x[:3], beta, **options)
    assert la.explain(la.delta_rule, *x[:3], beta, **options).replay == f"{IN_PART} ({reason})"


@pytest.fixture
def on_device(monkeypatch):
    """Signatures of arrays that look like CuPy's."""
    monkeypatch.setattr(launch, "device_function", lambda: lambda: 0)
    return device.signature_maker(Stub)


def has_functions(x):
    """Whether an option is or has a function."""
    return callable(x) or (isinstance(x, tuple) and any(map(has_functions, x)))


@pytest.mark.parametrize("case", [case for fn in la.VARIANTS for case in cases_of(fn)], ids=str)
def test_options_without_functions_have_a_key(case, on_device):
    """Of NumPy and of CuPy arrays: a call that explain calls recorded can be."""
    x, _ = draw(case, (1,), T=5, H=2, K=4, V=4, dtype=np.float32)
    there = {n: stub(y) for n, y in x.items()}
    has_key = not any(map(has_functions, case.options.values()))
    for own, maker in ((x, plans.signature_of), (there, on_device)):
        assert (maker(case.spec, (), own | case.options) is not None) == has_key


def test_values_in_tuples_have_their_types_in_the_key(on_device):
    """1, 1.0 and True are equal, but not the same option."""
    x = {"q": np.zeros((1, 5, 2, 4), np.float32)}
    for own, maker in ((x, plans.signature_of), ({"q": stub(x["q"])}, on_device)):
        keys = {maker(la.lact.spec, (), own | {"muon": ((one, 2.0, 3.0),)})[0] for one in (1, 1.0, True)}
        assert len(keys) == 3


def test_a_fault_of_the_recorder_is_not_hidden(monkeypatch):
    """Only what cannot be recorded, and no other error, makes a plan in part."""
    x = {n: float32(y) for n, y in la.testing.sample(la.gla, np.random.default_rng(0), B=(1,), T=5).items()}

    def fault(*arguments):
        raise AttributeError("a fault")

    monkeypatch.setattr(record, "finder", fault)
    with pytest.raises(AttributeError, match="a fault"):
        la.gla(**x)
