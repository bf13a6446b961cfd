"""Stick-breaking attention: its matrix, remainders, caches that forgot tokens, keys without weight."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from tests.cases import call, cases_of, cotangents, draw, tokens

T = 12
CASES = cases_of(la.stick_breaking_attention)
BACKENDS = ("reference", "chunks", "numba")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def assert_close(found, expected, bound=1e-12):
    assert la.testing.relative_error(found, expected) <= bound


@every_backend
@pytest.mark.parametrize("own", [False, True])
def test_matrix(own, backend):
    """Products of the remainders of nearer keys; values of 1 give the sum of weights."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, T, 1, 4))
    s = 1 / (1 + np.exp(-0.7 * q[:, 0] @ k[:, 0].T))
    A = np.zeros((T, T))
    for i in range(T):
        stop = i + own
        A[i, :stop] = [s[i, j] * np.prod(1 - s[i, j + 1 : stop]) for j in range(stop)]
    options = {"scale": 0.7, "attend_current": own, "backend": backend}
    assert_close(la.influence_matrix(la.stick_breaking_attention, q, k, v, **options)[0], A)
    taken = la.stick_breaking_attention(q, k, np.ones_like(v), **options)[:, 0, 0]
    left = [np.prod(1 - s[i, : i + own]) for i in range(T)]
    assert_close(taken, 1 - np.array(left))


@every_backend
def test_the_newest_match_takes_all(backend):
    """Sharp keys: the last token with the key of the query, not an average of all."""
    rng = np.random.default_rng(1)
    names = rng.integers(0, 4, 40)
    k = np.eye(4)[names][:, None]
    v = rng.standard_normal((40, 1, 3))
    out = la.stick_breaking_attention(2000 * k - 1000, k, v, scale=1, backend=backend)
    for t in range(40):
        before = [j for j in range(t) if names[j] == names[t]]
        assert_close(out[t, 0], v[before[-1], 0] if before else 0 * v[0, 0], 1e-14)


@every_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_ring_is_read_in_the_order_of_its_tokens(case, backend):
    """Caches of two streams that forgot different numbers of tokens, as if those had never been."""
    arrays, _ = draw(case, T=30)
    for start in ((3, 14), (9, 16)):  # of rings of 6 slots
        rows = []
        for b, n in enumerate(start):
            slots = {name: np.zeros_like(arrays[name][b, :6]) for name in ("k", "v")}
            for p in range(max(n - 6, 0), n):
                for name, y in slots.items():
                    y[p % 6] = arrays[name][b, p]
            rows.append((slots["k"], slots["v"], np.float64(n)))
        state = la.KeyValueCache(*map(np.stack, zip(*rows, strict=True)))
        more = {name: np.stack([y[b, n : n + 9] for b, n in enumerate(start)]) for name, y in arrays.items()}
        out, pullback = la.vjp(case.fn, **more, **case.options, state=state, backend=backend)
        grads = pullback(cotangents((out, state))[0])
        for b, n in enumerate(start):
            known = {name: y[b : b + 1, max(n - 6, 0) : n + 9] for name, y in arrays.items()}
            whole, back = la.vjp(case.fn, **known, **case.options, backend=backend)
            assert_close(out[b : b + 1], whole[:, -9:])
            dout = np.zeros_like(whole)
            dout[:, -9:] = cotangents((out, state))[0][b : b + 1]
            d = back(dout)
            for i in range(known["k"].shape[1] - 9):
                slot = (max(n - 6, 0) + i) % 6
                assert_close(grads.state.k[b, slot], d.k[0, i], 1e-11)
                assert_close(grads.state.v[b, slot], d.v[0, i], 1e-11)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_keys_that_nothing_is_left_for(dtype):
    """Long sequences: compiled kernels end where weights are 0, with the values and gradients of all keys."""
    arrays, state = draw(CASES[0], T=1500 if dtype is np.float32 else 2500, B=(1,), H=1, K=2, V=2)
    wide = CASES[0].fn(**arrays, state=state, backend="chunks")
    narrow = {n: y.astype(dtype) for n, y in arrays.items()}
    state = type(state)(*(y.astype(dtype) for y in state))
    out, pullback = la.vjp(CASES[0].fn, **narrow, state=state, backend="numba")
    eps = np.finfo(dtype).eps
    assert_close(out, wide, 40 * eps)
    expected = la.vjp(CASES[0].fn, **narrow, state=state, backend="chunks")[1](out)
    found = pullback(out)
    for name in ("q", "k", "v"):
        assert_close(getattr(found, name), getattr(expected, name), 200 * eps)
    unread = {n: y.copy() for n, y in narrow.items()}
    unread["v"][:, :64] = np.nan
    assert np.isfinite(CASES[0].fn(**unread, state=state, backend="numba")[:, -64:]).all()


@every_backend
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_logits_of_any_size(size, backend):
    """Nothing overflows, gradients neither."""
    arrays, state = draw(CASES[0], T=20, dtype=np.float32)
    arrays["q"] = np.full_like(arrays["q"], size)
    arrays["k"] = abs(arrays["k"])
    out, pullback = la.vjp(CASES[0].fn, **arrays, state=state, backend=backend)
    assert np.isfinite(out).all()
    assert all(np.isfinite(d).all() for d in pullback(out)[:3])


@every_backend
def test_in_a_ring_it_is_the_whole_as_long_as_nothing_is_forgotten(backend):
    case = CASES[0]
    arrays, _ = draw(case, T=12)
    whole, state = case.fn(**arrays), call(case, tokens(case, arrays, 0, 5))[1]
    slots = la.KeyValueCache(*(np.concatenate([y, np.zeros_like(y), np.zeros_like(y)], 1)[:, :12] for y in state[:2]),
                             state.length)  # fmt: skip
    for t in range(5, 12):
        one = case.fn(**tokens(case, arrays, t, t + 1), state=slots, overwrite_state=True, backend=backend)
        assert_close(one, whole[:, t : t + 1])


def test_explain_counts_earlier_keys():
    q, k, v = np.ones((3, 1, 10, 2, 64))
    assert la.explain(la.stick_breaking_attention, q, k, v).operations == 2 * 2 * (64 + 64) * 45
    assert la.explain(la.stick_breaking_attention, q, k, v, attend_current=True).operations == 2 * 2 * (64 + 64) * 55


@every_backend
def test_gradients_where_one_key_takes_nearly_all(backend):
    """1 - s is no difference, so that logits around 9 leave the gradients their digits in float32."""
    rng = np.random.default_rng(0)
    q, k, v, d = rng.standard_normal((4, 1, 300, 2, 64))
    arrays = {n: x.astype(np.float32) for n, x in (("q", q + 9 / 8), ("k", 0.1 * k + 1), ("v", v))}
    narrow, wide = (la.vjp(la.stick_breaking_attention, **{n: x.astype(of) for n, x in arrays.items()}, backend=backend)
                    [1](d.astype(np.float32).astype(of)) for of in (np.float32, np.float64))  # fmt: skip
    for name in "qkv":
        assert_close(getattr(narrow, name), getattr(wide, name), 3e-6)
