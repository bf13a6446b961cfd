"""Which calls the CUDA kernels take, and how they are cut up: decided without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda.scan import calls as cuda_scan
from linattn_np.matrix_state.cuda.scan import plan as cuda_plan
from linattn_np.matrix_state.types import Inputs, Plan
from linattn_np.runtime.cuda import launch
from tests.matrix_state.cuda.step_twin import CUPY, stub


class Array:
    """What the choice looks at of a CuPy array."""

    def __init__(self, *shape, dtype="float32", device=0):
        self.shape, self.dtype, self.device = shape, np.dtype(dtype), SimpleNamespace(id=device)


XP = SimpleNamespace(__name__="array_api_compat.cupy", float64=np.float64)


@pytest.fixture
def a_card(monkeypatch):
    """A device 0 with the shared memory of the smallest that is covered."""
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "unusable", lambda: None)
    monkeypatch.setattr(launch, "shared_limit", lambda: policy.LEAST_SHARED)


def refusal(K=64, V=64, dtype="float32", Hk=2, T=100, xp=XP, device=0, compute=np.float32, chunk_size=None, **more):
    x = Inputs(
        Array(1, T, 2, K, dtype=dtype, device=device),
        Array(1, T, Hk, K, dtype=dtype, device=device),
        Array(1, T, 2, V, dtype=dtype, device=device),
        **more,
    )
    return cuda_scan.unsupported_reason(x, Plan(xp, compute, 1.0, chunk_size=chunk_size))


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("not CuPy", {"xp": SimpleNamespace(__name__="array_api_compat.numpy", float64=np.float64)}),
        ("decay NONE or SCALAR", {"g": Array(1, 100, 2, 64)}),
        ("erase NONE", {"beta": Array(1, 100, 2, 1)}),
        ("float64", {"compute": np.float64}),
        ("chunk_size=1", {"chunk_size": 1}),
        ("up to 256", {"K": 257}),
        ("nothing to compute", {"T": 0}),
        ("more key heads", {"Hk": 4}),
        ("device 1, the current one is 0", {"device": 1}),
    ],
)
def test_what_is_not_says_why(a_card, words, call):
    assert words in refusal(**call)


def test_a_device_that_cannot_run_kernels_says_why(a_card, monkeypatch):
    monkeypatch.setattr(launch, "unusable", lambda: "no compiler")
    assert refusal() == "no compiler"


def test_segments_fill_the_card_and_are_long_enough():
    assert cuda_plan.segments(blocks=256, tokens=4096, resident=2, multiprocessors=132) == 1
    assert cuda_plan.segments(blocks=32, tokens=32768, resident=2, multiprocessors=132) == 8
    assert cuda_plan.segments(blocks=32, tokens=32768, resident=2, multiprocessors=80) == 5
    assert cuda_plan.segments(blocks=1, tokens=1023, resident=2, multiprocessors=132) == 1
    assert cuda_plan.segments(blocks=8, tokens=131072, resident=2, multiprocessors=132) == 33


TWO, WHOLE = "in 2 panels", "portable passes"
WIDE_KEYS = [("none", 144, TWO), ("none", 192, TWO), ("none", 256, TWO), ("none", 152, WHOLE), ("none", 128, "wgmma"),
             ("scalar", 144, WHOLE), ("scalar", 256, WHOLE), ("scalar", 128, "wgmma"), ("scalar", 384, "in 3 panels"),
             ("none", 384, "in 3 panels")]  # fmt: skip


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("decay", "K", "words"), WIDE_KEYS)
def test_wide_keys_are_panels_where_nothing_decays(a_card, monkeypatch, decay, K, words, gradients):
    """With a decay the passes of up to 256 channels are those of whole keys, whether or not gradients follow."""
    monkeypatch.setattr(launch, "capability", lambda: 90)
    monkeypatch.setattr(policy, "PORTABLE", False)
    q, v = (stub(np.ones((1, 40, 2, width), ml_dtypes.bfloat16)) for width in (K, 64))
    g = stub(np.full((1, 40, 2, 1), -0.1, np.float32)) if decay == "scalar" else None
    x = Inputs(q, q, v, g=g)
    plan = Plan(CUPY, np.float32, 1.0, gradients=gradients)
    assert cuda_scan.unsupported_reason(x, plan) is None
    assert words in cuda_scan.how(x, plan)
