"""Long calls that no chunk kernel covers, by the kernel of the recurrence, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.types import Decay
from tests.cases import one_per, required
from tests.matrix_state.cuda.device_arrays import error, typed
from tests.matrix_state.cuda.vector.test_kernels import gates

pytestmark = pytest.mark.gpu
DRAWN = {"q", "k", "v", "g", "gv", "u", "beta", "b", "w"}
BOUND = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 6e-3}  # of the norm: outputs are rounded once


@pytest.fixture(autouse=True)
def token_by_token(monkeypatch):
    monkeypatch.setattr(policy, "PORTABLE_CHUNKS", False)
    monkeypatch.setattr(replay, "by_key", {})


def draw(fn, dtype, T=150, K=64, V=64, kind="mixed"):
    rng, (B, H) = np.random.default_rng(0), (2, 3)
    k = rng.standard_normal((B, T, H, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    found = {"q": rng.standard_normal(k.shape), "k": k, "v": rng.standard_normal((B, T, H, V)),
             "b": rng.uniform(0, 1, k.shape), "w": rng.uniform(0, 1, (B, T, H, V))}  # fmt: skip
    found = {n: x.astype(typed(dtype)) for n, x in found.items()}
    float32 = {"g": gates(rng, k.shape, kind), "u": rng.standard_normal((H, K)), "beta": rng.uniform(0, 1, (B, T, H))}
    if fn is la.dfw:
        float32["gv"] = gates(rng, (B, T, H, V), kind)
    found |= {n: x.astype(np.float32) for n, x in float32.items()}
    state = rng.standard_normal((B, H, K, V)).astype(np.float32)
    return {n: found[n] for n in fn.spec.arrays if n in found}, state


@pytest.mark.parametrize(
    ("fn", "dtype", "K", "V"),
    [
        (la.gla, "float32", 128, 128),
        (la.gla, "float16", 128, 128),
        (la.rwkv6, "float32", 64, 64),
        (la.kda, "float32", 128, 128),
        (la.kda, "float16", 64, 64),
        (la.kda, "bfloat16", 256, 256),
        (la.gdn2, "float16", 128, 128),
        (la.gdn2, "float32", 64, 64),
        (la.dfw, "bfloat16", 128, 64),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_forward(cp, fn, dtype, K, V):
    arrays, state = draw(fn, dtype, K=K, V=V)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    said = la.explain(fn, **there)
    assert (said.backend, said.form) == ("cuda", "recurrent form")
    out, end = fn(**there, state=cp.asarray(state), return_state=True)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected, last = fn(**wide, state=state.astype(np.float64), return_state=True)
    assert error(out, expected) < BOUND[dtype]
    assert error(end, last) < BOUND["float32"] if dtype == "float32" else BOUND[dtype]


@pytest.mark.parametrize(
    "fn",
    one_per(
        lambda spec: spec.change.erase_key,
        [fn for fn in la.VARIANTS if fn.spec.decay is Decay.VECTOR and DRAWN.issuperset(required(fn))],
    ),
    ids=lambda fn: fn.__name__,
)
def test_gradients_are_those_of_array_calls(cp, fn):
    arrays, state = draw(fn, "float32", T=70, kind="mild")
    dout = np.random.default_rng(1).standard_normal(arrays["v"].shape).astype(np.float32)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    pull = la.vjp(fn, **there, state=cp.asarray(state))[1]
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected = la.vjp(fn, **wide, state=state.astype(np.float64))[1](dout.astype(np.float64))
    for name, found in pull(cp.asarray(dout))._asdict().items():
        if found is not None:
            assert error(found, getattr(expected, name)) < 1e-5, name
