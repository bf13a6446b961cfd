"""States stored in 16 bits: widened when they are read, rounded once a call when they are overwritten."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.runtime.shapes import MEMORIES
from linattn_np.testing import relative_error
from tests.cases import CASES, PLAIN, call, cell, draw, naive, one_per, parts, parts_like

KINDS = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
SIZES = {"H": 2, "K": 4, "V": 3}
MATRICES = ("S", "W")  # parts that may be stored so


def names(state):
    return state._fields if isinstance(state, tuple) else ("S",)


def stored(state, kind):
    """(the state with its matrices in 16 bits, the same widened)."""
    narrow = [S.astype(kind) if n in MATRICES else S for n, S in zip(names(state), parts(state), strict=True)]
    wide = [S.astype(old.dtype) for S, old in zip(narrow, parts(state), strict=True)]
    return parts_like(state, narrow), parts_like(state, wide)


def fresh(state):
    return parts_like(state, [S.copy() for S in parts(state)])


def same(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def check(case, arrays, narrow, wide, **options):
    """Widened on the way in, float32 on the way out; overwritten: the same, rounded once, in the caller's arrays."""
    for _ in range(2):  # the second is like one before it
        out, end = call(case, arrays, state=wide, **options)
        out2, end2 = call(case, arrays, state=narrow, **options)
        mine = fresh(narrow)
        out3, end3 = call(case, arrays, state=mine, overwrite_state=True, **options)
        assert same(out2, out)
        assert same(out3, out)
        for S, S2, S3, own, given in zip(*map(parts, (end, end2, end3, mine, narrow)), strict=True):
            assert same(S2, S)
            assert S3 is own
            assert same(S3, S.astype(given.dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [c for c in CASES if "state" not in c.fn.samples.complex], ids=str)
def test_every_case(case, kind):
    for T in (1, 5, 0):
        arrays, state = draw(case, T=T, dtype=np.dtype(np.float32), **SIZES)
        check(case, arrays, *stored(state, KINDS[kind]))


@pytest.mark.parametrize("backend", ["reference", "chunks", "numba"])
@pytest.mark.parametrize("case", [c for c in PLAIN if "state" not in c.fn.samples.complex], ids=str)
def test_every_backend(case, backend):
    for T, kind in ((5, "bfloat16"), (40, "float16")):
        arrays, state = draw(case, T=T, dtype=np.dtype(np.float32), **SIZES)
        check(case, arrays, *stored(state, KINDS[kind]), backend=backend)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [c for c in PLAIN if "state" not in c.fn.samples.complex], ids=str)
def test_against_the_definition_and_gradients(case, kind):
    """float64 inputs widen it to float64; its gradient has its dtype, as that of any other input."""
    arrays, state = draw(case, T=7, **SIZES)
    narrow, wide = stored(state, KINDS[kind])
    expected = naive(case, arrays, wide)
    result, pullback = la.vjp(case.fn, **arrays, **case.options, state=narrow, return_state=True)
    for x, y in zip(parts(result), parts(expected), strict=True):
        assert x.dtype == np.float64 or y.dtype.kind == "i"  # a number of tokens
        assert relative_error(x, y) <= 1e-11
    other, pull = la.vjp(case.fn, **arrays, **case.options, state=wide, return_state=True)
    grads, exact = pullback(*result), pull(*other)
    for n in arrays:
        if getattr(exact, n) is not None:
            assert same(getattr(grads, n), getattr(exact, n))
    for d, y, S in zip(parts(grads.state), parts(exact.state), parts(narrow), strict=True):
        assert same(d, y.astype(S.dtype))


def drawn(fn, T=3, B=(3,), H=2, seed=0, **heads):
    rng = np.random.default_rng(seed)
    arrays = {
        n: x.astype(np.float32)
        for n, x in la.testing.sample(fn, rng, B=B, T=T, H=H, K=5, V=4, optional=False, **heads).items()
    }
    return arrays, rng.standard_normal((6, H, 5, 4)).astype(ml_dtypes.bfloat16)


ROWS, OTHERS = [4, 0, 2], [1, 3, 5]


@pytest.mark.parametrize("fn", one_per(cell), ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("ragged", [False, True])
def test_rows_of_a_pool(fn, ragged):
    arrays, pool = drawn(fn, T=20 if ragged else 3, B=(1,) if ragged else (3,))
    options = {"cu_seqlens": [0, 1, 1, 20]} if ragged else {}
    out, end = fn(**arrays, **options, state=pool[ROWS].astype(np.float32), return_state=True)
    for _ in range(2):
        mine = pool.copy()
        apart = fn(**arrays, **options, state=mine, state_rows=ROWS, return_state=True)
        assert same(apart.out, out)
        assert same(apart.state, end)
        assert same(mine, pool)
        here = fn(**arrays, **options, state=mine, state_rows=ROWS, return_state=True, overwrite_state=True)
        assert here.state is mine
        assert same(here.out, out)
        assert same(mine[ROWS], end.astype(pool.dtype))
        assert same(mine[OTHERS], pool[OTHERS])


@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("heads", [{"Hq": 4}, {"Hq": 1, "Hk": 1}], ids=str)
def test_views_and_shared_heads(heads, T):
    """A strided view is read and written in place."""
    arrays, pool = drawn(la.gated_delta_rule, T=T, **heads)
    buffer = np.full((3, 4, 5, 9), 3, ml_dtypes.bfloat16)
    view = buffer[:, ::2, :, 1:9:2]
    view[...] = pool[:3]
    out, end = la.gated_delta_rule(**arrays, state=pool[:3].astype(np.float32), return_state=True)
    for _ in range(2):
        view[...] = pool[:3]
        out2, end2 = la.gated_delta_rule(**arrays, state=view, return_state=True, overwrite_state=True)
        assert end2 is view
        assert same(out2, out)
        assert same(view, end.astype(buffer.dtype))
    assert (buffer[:, 1::2] == 3).all()
    assert (buffer[..., ::2] == 3).all()


def test_token_by_token_rounds_every_time():
    """A call rounds once, however many tokens it has: two calls round twice."""
    arrays, pool = drawn(la.kda, T=8)
    state = pool[:3]
    once = la.kda(**arrays, state=state, return_state=True).state
    running = state.copy()
    for t in range(8):
        la.kda(**{n: x[:, t : t + 1] for n, x in arrays.items()}, state=running, overwrite_state=True)
    assert not same(running, once.astype(running.dtype))
    assert relative_error(running.astype(np.float64), once) < 8 * 2.0**-8


def test_unsupported_stored_states():
    arrays, pool = drawn(la.kda)
    frozen = pool[:3].copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="kda: state is read-only, expected a writeable array"):
        la.kda(**arrays, state=frozen, overwrite_state=True)
    assert la.kda(**arrays, state=frozen).dtype == np.float32
    named = [(c, part) for c in CASES if c.normalised for part in c.spec.state.parts._fields]
    for case, part in ((c, p) for c, p in named if f"state.{p}" not in {*MEMORIES, *c.spec.counts}):
        fn = case.fn
        arrays, state = draw(case, dtype=np.dtype(np.float32), **SIZES)
        state = state._replace(**{part: getattr(state, part).astype(np.float16)})
        words = f"{fn.__name__}: state.{part} has dtype float16, expected float32 or float64"
        with pytest.raises(TypeError, match=words):
            fn(**arrays, **case.options, state=state)


def test_read_and_explain():
    arrays, pool = drawn(la.simple_gla, T=1)
    narrow, wide = pool[:3], pool[:3].astype(np.float32)
    assert same(la.read(arrays["q"], narrow), la.read(arrays["q"], wide))
    sums = np.ones((3, 2, 5), np.float32)
    out, pull = la.vjp(la.read, arrays["q"], la.NormalisedState(narrow, sums))
    assert same(out, la.read(arrays["q"], la.NormalisedState(wide, sums)))
    assert [d.dtype for d in pull(out).state] == [pool.dtype, sums.dtype]
    few, many = (la.explain(la.simple_gla, **arrays, state=S) for S in (narrow, wide))
    assert many.bytes - few.bytes == narrow.nbytes
    assert "state is stored in bfloat16" in few.reason
    assert "stored" not in many.reason


def test_torch():
    torch = pytest.importorskip("torch")
    arrays, pool = drawn(la.kda)
    there = {n: torch.from_numpy(x) for n, x in arrays.items()}
    mine = torch.from_numpy(pool.astype(np.float32)).to(torch.bfloat16)
    begin = mine.clone()
    out, end = la.kda(**there, state=mine[ROWS].float(), return_state=True)
    got = la.kda(**there, state=mine, state_rows=ROWS, return_state=True)
    assert torch.equal(got.out, out)
    assert torch.equal(got.state, end)
    here = la.kda(**there, state=mine, state_rows=ROWS, return_state=True, overwrite_state=True)
    assert here.state is mine
    assert torch.equal(mine[ROWS], end.to(torch.bfloat16))
    assert torch.equal(mine[OTHERS], begin[OTHERS])
    result, pullback = la.vjp(la.kda, **there, state=begin[ROWS], return_state=True)
    assert pullback(*result).state.dtype is torch.bfloat16


def test_immutable_states_are_returned_rounded():
    jnp = pytest.importorskip("jax.numpy")
    arrays, pool = drawn(la.simple_gla, T=1)
    there, state = {n: jnp.asarray(x) for n, x in arrays.items()}, jnp.asarray(pool[:3])
    end = la.simple_gla(**there, state=state, return_state=True).state
    assert end.dtype == jnp.float32
    rounded = la.simple_gla(**there, state=state, return_state=True, overwrite_state=True).state
    assert same(np.asarray(rounded), np.asarray(end.astype(jnp.bfloat16)))
