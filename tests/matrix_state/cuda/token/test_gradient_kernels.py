"""Gradients token by token on a GPU, against NumPy in float64 on the same rounded inputs."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.types import Decay, Erase, ReadState
from tests.cases import has_plain_state, one_per, required
from tests.matrix_state.cuda.device_arrays import error, same
from tests.matrix_state.cuda.vector.test_kernels import gates

pytestmark = [pytest.mark.gpu]
BOUND = {"float32": 3e-5, "float16": 3e-3}  # of the norm of the result


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    monkeypatch.setattr(policy, "RECURRENCE_BACKWARD", True)
    monkeypatch.setattr(policy, "PORTABLE_CHUNKS", False)
    monkeypatch.setattr(replay, "by_key", {})


def draw(fn, T=100, heads=(2, 2, 2), K=64, V=64, kind="mild", dtype="float32", N=1):
    """(arrays by name, initial state, dout, dstate), rounded."""
    rng, (Hq, Hk, H) = np.random.default_rng(0), heads
    n = lambda h, D: rng.standard_normal((1, T, h, D))  # noqa: E731
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    a = unit(n(Hk, K))
    drawn = {"q": n(Hq, K), "k": unit(n(Hk, K)), "v": n(H, V), "g": gates(rng, (1, T, H, K), kind), "a": a,
             "b": -a * rng.uniform(0, 1, a.shape), "u": rng.standard_normal((H, K)),
             "beta": rng.uniform(0, 1, (1, T, H)), "w": rng.uniform(0, 1, (1, T, H, V))}  # fmt: skip
    if fn is la.gdn2:
        drawn["b"] = rng.uniform(0, 1, (1, T, H, K))
    wide = ("g", "u", "beta")
    arrays = {m: drawn[m].astype(np.float32 if m in wide else dtype) for m in fn.spec.arrays if m in drawn}
    dout = rng.standard_normal((1, T, max(Hq, H), V)).astype(dtype)
    return arrays, rng.standard_normal((N, H, K, V)).astype(np.float32), dout, rng.standard_normal((N, H, K, V))


def pulled(cp, fn, drawn, **options):
    """Gradients by name."""
    arrays, state, dout, dstate = drawn
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    _, pull = la.vjp(fn, **there, state=cp.asarray(state), return_state=True, backend="cuda", **options)
    found = pull(cp.asarray(dout), cp.asarray(dstate.astype(np.float32)))
    return {n: x for n, x in found._asdict().items() if x is not None}


def compare(cp, fn, options=None, **how):
    drawn, options = draw(fn, **how), options or {}
    arrays, state, dout, dstate = drawn
    found = pulled(cp, fn, drawn, **options)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    _, pull = la.vjp(fn, **wide, state=state.astype(np.float64), return_state=True, **options)
    right = pull(dout.astype(np.float64), dstate.astype(np.float32).astype(np.float64))._asdict()
    for name, want in right.items():
        if want is not None:
            assert error(found[name], want) < BOUND[how.get("dtype", "float32")], name


DRAWN = {"q", "k", "v", "g", "u", "beta", "a", "b", "w"}
FUNCTIONS = one_per(lambda spec: (spec.erase, spec.query_reads, spec.change.erase_key), [
    fn for fn in la.VARIANTS if has_plain_state(fn.spec) and fn.spec.decay is Decay.VECTOR
    and DRAWN.issuperset(required(fn))])  # fmt: skip
BY_TERM = [fn for fn in FUNCTIONS if fn.spec.erase is not Erase.DELTA and fn.spec.query_reads is ReadState.UPDATED]


@pytest.mark.parametrize("kind", ["zero", "mild", "five", "twenty", "resets", "mixed"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_gates(cp, fn, kind):
    compare(cp, fn, kind=kind, T=200)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_float16(cp, fn):
    compare(cp, fn, dtype="float16", K=128, V=128)


@pytest.mark.parametrize("widths", [(7, 5), (40, 100), (128, 128), (60, 256), (256, 256)])
@pytest.mark.parametrize("fn", BY_TERM, ids=lambda fn: fn.__name__)
def test_widths(cp, fn, widths):
    compare(cp, fn, K=widths[0], V=widths[1], T=150)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_ragged_and_grouped(cp, fn):
    compare(cp, fn, {"cu_seqlens": [0, 5, 5, 70, 300, 301]}, T=301, N=5)
    compare(cp, fn, heads=(1, 1, 4), T=33)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_same_bits(cp, fn):
    drawn = draw(fn, T=150)
    one, two = pulled(cp, fn, drawn), pulled(cp, fn, drawn)
    assert all(same(one[n], two[n]) for n in one)
