"""Repeated calls on CuPy arrays are launches alone: here kernels do nothing, and arrays are stubs.

What an array call computes has a pointer that no launch has allocated, so a call that makes one is not recorded.
"""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.catalog import variants
from linattn_np.ops.cuda import moves
from linattn_np.runtime.cuda import launch, tensor_map
from linattn_np.runtime.cuda.record import LaunchSequence
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.token import host as step_calls

launched, public = step_calls.launched, step_calls.public
BF16 = np.dtype(ml_dtypes.bfloat16)
BY_CUBLAS = ("atlas", "lact", "titans", "ttt_mlp")
BY_ARRAY_CALLS = {**dict.fromkeys(BY_CUBLAS, "BLAS computes products"), "block_scan": "no kernels"}
GRADIENTS = {"titans_linear": "array calls compute gradients of mini-batches, of float64 and of wide keys"}
SHARED = {"ttt_linear": "BLAS computes products"}  # where heads share keys


class Idle:
    """A kernel that does nothing."""

    kernel = SimpleNamespace(ptr=0)

    def __call__(self, *how, **more):
        pass


@pytest.fixture
def idle(public, monkeypatch):
    """Kernels of a device of compute capability 90 do nothing."""
    monkeypatch.setattr(launch, "kernel", lambda *how: Idle())
    monkeypatch.setattr(launch, "_capability", lambda device: 90)
    monkeypatch.setattr(launch.cupy().cuda.driver, "launchKernel", lambda *how: None)
    monkeypatch.setattr(tensor_map, "_encode", lambda at, *how: int(at).to_bytes(8, "little") + bytes(120))
    few = moves.Namespace._is_few  # arrays of NumPy say that they lie on a CPU
    monkeypatch.setattr(moves.Namespace, "_is_few", lambda self, shape, dtype, device: few(self, shape, dtype, None))


def given_of(fn, optional=False, **sizes):
    """Rows in bfloat16, other arrays in float32 or complex64."""
    rng = np.random.default_rng(0)
    x = la.testing.sample(fn, rng, B=(2,), T=100, H=8, K=64, V=64, M=64, optional=optional, **sizes)
    kind = lambda y: np.complex64 if y.dtype.kind == "c" else BF16 if y.ndim == 4 else np.float32  # noqa: E731
    return {n: stub(y.astype(kind(y))) for n, y in x.items()}


def plans_of(call):
    """The plans of a call that was computed twice."""
    replay.clear()
    with np.errstate(all="ignore"):  # numbers are arbitrary
        call()
        call()
    return [*replay.by_key.values()]


GIVEN = {"heads": {}, "groups": {"Hq": 2, "Hk": 2}, "optional arrays": {"optional": True}}


def reason_of(fn, drawn):
    """Why the forward is more than launches; "" if it is not."""
    return (BY_ARRAY_CALLS | (SHARED if "Hk" in drawn else {})).get(fn.__name__, "")


@pytest.mark.parametrize("drawn", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("fn", variants(), ids=lambda f: f.__name__)
def test_forward(idle, fn, drawn):
    given = given_of(fn, **drawn)
    found = plans_of(lambda: fn(**given))
    assert any(isinstance(plan, LaunchSequence) for plan in found) == (not reason_of(fn, drawn))


@pytest.mark.parametrize("drawn", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("fn", variants(), ids=lambda f: f.__name__)
def test_vjp(idle, fn, drawn):
    has_launches = not reason_of(fn, drawn) and fn.__name__ not in GRADIENTS
    assert is_replayed_vjp(fn, given_of(fn, **drawn)) == has_launches


def test_a_step_of_every_token(idle):
    """Of titans_linear with mini-batches of one token."""
    assert is_replayed_vjp(la.titans_linear, given_of(la.titans_linear), mini_batch=1)


def is_replayed_vjp(fn, given, **options):
    """Whether forward and pullback are launches alone."""

    def call():
        out, pull = la.vjp(fn, **given, **options)
        pull(stub(np.zeros(out.shape, out.dtype)))

    return any(getattr(plan, "replayable", False) for plan in plans_of(call))


def test_a_polynomial_of_few_channels(idle):
    """Features of 16 channels are kernels."""
    given = {n: stub(np.ones((2, 100, 8, 16 if n != "v" else 64), BF16)) for n in "qkv"}

    def call():
        out, pull = la.vjp(la.based, **given)
        pull(stub(np.zeros(out.shape, out.dtype)))

    assert any(isinstance(plan, LaunchSequence) for plan in plans_of(lambda: la.based(**given)))
    assert any(getattr(plan, "replayable", False) for plan in plans_of(call))


MOST = {"softmax_attention": 4, "stick_breaking_attention": 3, "path_attention": 12, "householder_positions": 26,
        "deltaformer": 12, "rfa": 6, "performer": 8, "mlstm": 18, "gsa": 32, "abc": 33, "mesa_net": 30,
        "log_linear_gla": 27, "log_linear_gated_delta_rule": 38, "mamba3": 15, "preconditioned_gated_delta_rule": 18,
        "s4d": 3, "selective_scan": 3, "rwkv4": 5}  # fmt: skip


@pytest.mark.parametrize("name", MOST)
def test_launches_of_a_call_and_its_pullback(idle, name):
    """No more than these: the time of a small call is that of its launches."""
    fn = getattr(la, name)
    given = given_of(fn)

    def call():
        out, pull = la.vjp(fn, **given, **fn.samples.options[0])
        pull(stub(np.zeros(out.shape, out.dtype)))

    (plan,) = (one for one in plans_of(call) if getattr(one, "replayable", False))
    each = [plan.sequence, *plan.pullbacks.values()]
    assert sum(len(one._launches) for one in each) <= MOST[name]
