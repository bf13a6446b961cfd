"""Bits in float32 and bfloat16, on every CPU backend: nothing from later tokens, nothing from what stands beside."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from tests.cases import PLAIN, call, cotangents, draw, in_dtype, pairwise, parts, parts_like, tokens, with_gradients

T = 75  # more than a chunk of 64
CUT = 35  # neither a whole tile nor a whole block
NARROW = (np.float32, ml_dtypes.bfloat16)
BACKENDS = ("reference", "chunks", "numba", None)
ERASING = [c for c in PLAIN if "beta" in c.given and c.erases]

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", NARROW, ids=lambda d: np.dtype(d).name)
every_variant = pytest.mark.parametrize("case", PLAIN, ids=str)


def drawn(case, dtype, seed=0, T=T, B=(2,), N=None):
    """Arrays of a dtype with every beta <= 1, and a float32 state."""
    arrays, state = draw(case, T=T, B=B, K=16, V=8, N=N, seed=seed)
    if "beta" in arrays:
        arrays["beta"] = arrays["beta"] / 2
    arrays = {n: in_dtype(x, dtype) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
    return arrays, parts_like(state, [in_dtype(S, np.float32) for S in parts(state)])


def changed(case, arrays, part, how):
    """The arrays with other numbers in the tokens `part`."""
    rng, found = np.random.default_rng(5), dict(arrays)
    for name in case.given:
        if not case.on_tokens(name):
            continue
        x, kind = arrays[name].astype(np.float64), case.fn.samples.distribution(name)
        new = x[:, part]
        if how == "beta above 1" and name == "beta":
            new = rng.uniform(1, 2, new.shape)
        if how == "resets" and kind == "log decay":
            new = np.where(rng.random(new.shape) < 0.5, -np.inf, new)
        if how == "large" and kind in ("normal", "unit", "spread", "half unit"):
            squares = case.squares  # of keys
            new[:, :1] *= 1e2 if squares else 1e6  # of one token: short of overflow
        x[:, part] = new
        found[name] = x.astype(arrays[name].dtype)
    return found


def same(x, y, what=""):
    np.testing.assert_array_equal(la.testing.to_numpy(x), la.testing.to_numpy(y), what)


@every_dtype
@pytest.mark.parametrize("how", ["beta above 1", "resets", "large"])
@every_backend
@every_variant
def test_no_later_token_changes_an_earlier_output(case, backend, how, dtype):
    arrays, state = drawn(case, dtype)
    moved = changed(case, arrays, slice(CUT, None), how)
    if all(x is moved[n] or (x == moved[n]).all() for n, x in arrays.items()):
        return  # it has nothing of the kind
    out, later = (call(case, x, state=state, backend=backend)[0] for x in (arrays, moved))
    same(out[:, :CUT], later[:, :CUT])
    assert not np.array_equal(out[:, CUT:], later[:, CUT:])


@pytest.mark.parametrize("form", [{"chunk_size": 16}, {"chunk_size": 64}, {}], ids=str)
@pytest.mark.parametrize("backend", ["chunks", "numba"])
@pytest.mark.parametrize("case", ERASING, ids=str)
def test_no_earlier_strength_changes_a_later_gradient_of_v(case, backend, form):
    """dv_t sums over the readers i >= t: the adjoint's own causality."""
    arrays, state = drawn(case, np.float32)
    d = cotangents(call(case, arrays, state=state))
    moved = changed(case, arrays, slice(0, CUT), "beta above 1")
    dv, other = (with_gradients(case, x, d, state=state, backend=backend, **form)["dv"] for x in (arrays, moved))
    same(dv[:, CUT:], other[:, CUT:])
    assert not np.array_equal(dv[:, :CUT], other[:, :CUT])


@pytest.mark.parametrize(
    ("case", "backend", "dtype"), pairwise(PLAIN, BACKENDS, NARROW), ids=lambda x: getattr(x, "__name__", str(x))
)
def test_alone_in_a_batch_and_packed_are_the_same_bits(case, backend, dtype):
    offsets = [0, 0, 41, 42, T, T]
    arrays, states = drawn(case, dtype, B=(1,), N=len(offsets) - 1)
    if "beta" in arrays:
        arrays = changed(case, arrays, slice(20, 60), "beta above 1")
    found = with_gradients(case, arrays, state=states, backend=backend, cu_seqlens=np.array(offsets))
    dout, dstate = cotangents(call(case, arrays, state=states, backend=backend, cu_seqlens=np.array(offsets)))
    pick = lambda x, n: parts_like(x, [S[n : n + 1] for S in parts(x)])  # noqa: E731
    twice = lambda x: parts_like(x, [np.concatenate([S, S]) for S in parts(x)])  # noqa: E731
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        alone, S, dS = tokens(case, arrays, a, b), pick(states, n), pick(dstate, n)
        one = with_gradients(case, alone, (dout[:, a:b], dS), state=S, backend=backend)
        batch = {x: np.concatenate([y, y]) if x in case.given and case.on_tokens(x) else y for x, y in alone.items()}
        d = np.concatenate([dout[:, a:b]] * 2), twice(dS)
        two = with_gradients(case, batch, d, state=twice(S), backend=backend)
        for name, x in one.items():
            bare = name.removeprefix("d")
            if name == "out" or (bare in case.given and case.on_tokens(bare)):
                same(found[name][:, a:b], x, name)
            elif "state" in name:
                same(found[name][n : n + 1], x, name)
            else:
                continue
            same(two[name][:1], x, name)
            same(two[name][1:], x, name)
