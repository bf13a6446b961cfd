"""Log-linear attention on a GPU: levels as heads, against the definition in float64 on the same rounded inputs."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.runtime.cuda import launch

from .device_arrays import error, poisoned, same, typed

pytestmark = pytest.mark.gpu
BOUND = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 5e-5}  # of the norm, of each gradient too
VARIANTS = (la.log_linear_gla, la.log_linear_gated_delta_rule)
CASES = {  # T, tokens before, offsets, whether the state after it is returned
    "no state": (300, 0, None, False),
    "whole chunks": (512, 0, None, False),
    "few tokens": (7, 0, None, False),
    "the state after": (1024, 0, None, True),  # all in the last level, which has no weight
    "from a state": (300, 100, None, True),
    "ragged": (300, 0, [0, 3, 3, 67, 300], False),
    "ragged, from states": (300, 70, [0, 3, 3, 67, 300], True),
}
every_variant = pytest.mark.parametrize("fn", VARIANTS, ids=lambda fn: fn.__name__)


def drawn(fn, T, dtype, B=2, H=2, K=64, V=64, seed=0, levels=11):
    """Inputs rounded to `dtype`; gates, strengths and weights in float32."""
    rng = np.random.default_rng(seed)
    x = la.testing.sample(fn, rng, B=(B,), T=T, H=H, K=K, V=V)
    x["lam"] = rng.uniform(0, 1, (B, T, H, levels))
    return {n: y.astype(typed(dtype) if n in "qkv" else np.float32) for n, y in x.items()}


def gradients(fn, x, dout, dS, **options):
    """(out, final S or None, gradients by name)."""
    result, pull = la.vjp(fn, **x, return_state=dS is not None, **options)
    out, state = (result, None) if dS is None else result
    grads = pull(dout) if state is None else pull(dout, state._replace(S=dS))
    found = {n: y.S if hasattr(y, "S") else y for n, y in grads._asdict().items() if y is not None}
    return {"out": out} | ({} if state is None else {"S": state.S}) | found


def check(cp, monkeypatch, fn, name, dtype, K, V):
    T, before, offsets, with_state = CASES[name]
    monkeypatch.setattr(launch, "array_type", lambda: poisoned)
    x, options, there = drawn(fn, T, dtype, 1 if offsets else 2, K=K, V=V), {}, {}
    if offsets:
        options["cu_seqlens"] = there["cu_seqlens"] = offsets
    if before:
        first = drawn(fn, before, "float64", len(offsets) - 1 if offsets else 2, K=K, V=V, seed=1)
        state = fn(**first, return_state=True).state
        state = state._replace(S=state.S.astype(np.float32))
        options["state"] = state._replace(S=state.S.astype(np.float64))
        there["state"] = type(state)(*map(cp.asarray, state))
    wide = {n: y.astype(np.float64) for n, y in x.items()}
    rng = np.random.default_rng(2)
    dout = rng.standard_normal(x["v"].shape).astype(typed(dtype))
    shape = (len(offsets) - 1 if offsets else 2, 2, 11, K, V)
    dS = rng.standard_normal(shape).astype(np.float32) if with_state else None
    expected = gradients(fn, wide, dout.astype(np.float64), None if dS is None else dS.astype(np.float64), **options)
    arrays = {n: cp.asarray(y) for n, y in x.items()}
    found = gradients(fn, arrays, cp.asarray(dout), None if dS is None else cp.asarray(dS), **there)
    errors = {n: error(found[n], y) for n, y in expected.items()}
    assert max(errors.values()) < BOUND[dtype], errors
    assert la.explain(fn, **arrays).backend == "cuda"


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", CASES)
@every_variant
def test_it_is_the_definition(cp, monkeypatch, fn, name, dtype):
    check(cp, monkeypatch, fn, name, dtype, 64, 64)


@pytest.mark.parametrize(("K", "V"), [(128, 128), (40, 72), (60, 33)])
@every_variant
def test_widths(cp, monkeypatch, fn, K, V):
    check(cp, monkeypatch, fn, "no state", "bfloat16", K, V)


@every_variant
def test_a_graph_of_a_call_and_its_pullback(cp, fn):
    """Captured once, replayed on other numbers."""
    sets = [[cp.asarray(y) for y in drawn(fn, 256, "bfloat16", seed=seed).values()] for seed in range(3)]
    names, dout = drawn(fn, 1, "bfloat16").keys(), cp.ones((2, 256, 2, 64), typed("bfloat16"))

    def call(one):
        out, pull = la.vjp(fn, **dict(zip(names, one, strict=True)))
        return [out, *(y for y in pull(dout) if y is not None)]

    buffer, expected = sets[0], [call(one) for one in sets[1:]]
    for _ in range(2):
        call(buffer)
    stream, pool, held = cp.cuda.Stream(non_blocking=True), cp.get_default_memory_pool(), []

    def hold(size):
        held.append(pool.malloc(size))
        return held[-1]

    cp.cuda.Device().synchronize()
    with stream:
        with cp.cuda.using_allocator(hold):
            stream.begin_capture()
            found = call(buffer)
            graph = stream.end_capture()
        for one, right in zip(sets[1:], expected, strict=True):
            for mine, theirs in zip(buffer, one, strict=True):
                mine[...] = theirs
            graph.launch(stream)
            stream.synchronize()
            for a, b in zip(found, right, strict=True):
                assert same(a, b)
