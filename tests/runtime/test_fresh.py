"""fresh, and row -1 of a pool: sequences that begin without a state, of every variant, in every backend."""

from __future__ import annotations

import functools

import array_api_compat.numpy
import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.binding import axes_of
from linattn_np.call.layouts import LAYOUTS, ONE_TOKEN
from linattn_np.call.replay import plans as replay
from linattn_np.runtime.pools import put_on_device
from linattn_np.runtime.shapes import flatten, unflatten
from tests.cases import GROWING, RECURRENCES, Case, covered, in_dtype

SIZES = {"H": 2, "K": 4, "V": 3}
ROWS, FRESH, P = [4, 0, -1, 5, -1], [False, True, False, False, True], 6
BEGINS = [1, 2, 4]  # sequences that begin without a state
BACKENDS = ("reference", "chunks", "numba", None)
HOWS = ("ragged", "batch", "step", "heads_first", "reverse")
TABLE = [
    (fn, backend, how)
    for fn in la.VARIANTS
    for backend in BACKENDS
    if {"backend": backend} in covered(Case(fn, {}, {}, {}), [{"backend": backend}])
    for how in HOWS
    if how == "ragged" or backend is None or (fn in RECURRENCES and how == "batch")
]


def of(f, state):
    """f of every part of a state."""
    return unflatten(state, [f(name, S) for name, S in flatten("state", state).items()])


def parts(state):
    return list(flatten("state", state).values())


def drawn(fn, T, B, dtype=np.float64):
    """(arrays, a pool in which all but rows 4 and 5 are NaN)."""
    rng = np.random.default_rng(0)
    arrays = {n: in_dtype(x, dtype) for n, x in la.testing.sample(fn, rng, B=B, T=T, **SIZES).items()}
    pool = la.testing.sample_state(fn, rng, (P,), {}, **SIZES)

    def marked(name, S):
        S = S.astype(np.int64) if name in fn.spec.counts else in_dtype(S, dtype)
        S[:4] = 10**9 if name in fn.spec.counts else np.nan
        return S

    return arrays, of(marked, pool)


def beginning(fn, pool):
    """The states of the sequences: zeros, or the identity, for those that begin without one."""

    def taken(name, S):
        S = S[[max(n, 0) for n in ROWS]]
        S[BEGINS] = np.eye(S.shape[-1]) if name.removeprefix("state.") in fn.spec.state.unit else 0
        return S

    return of(taken, pool)


def copied(state):
    return of(lambda name, S: S.copy(), state)


def assert_same(found, expected):
    for x, y in zip(parts(found), parts(expected), strict=True):
        assert np.array_equal(x, y, equal_nan=True)


def assert_pool(pool, before, expected):
    """Rows 4, 0 and 5 are the final states of their sequences; the others are as before."""
    for x, y, end in zip(parts(pool), parts(before), parts(expected), strict=True):
        assert np.array_equal(x[[4, 0, 5]], end[[0, 1, 3]])
        assert np.array_equal(x[1:4], y[1:4], equal_nan=True)


@pytest.mark.parametrize(("fn", "backend", "how"), TABLE, ids=lambda x: getattr(x, "__name__", str(x)))
def test_sequences_begin_without_a_state(fn, backend, how):
    ragged = how in ("ragged", "reverse")
    arrays, pool = drawn(fn, *((7, (1,)) if ragged else (1, (5,))))
    options = {"backend": backend, "return_state": True}
    if ragged:
        options |= {"cu_seqlens": [0, 2, 5, 5, 6, 7], "reverse": how == "reverse"}
    run = fn
    if how in ("heads_first", "step"):
        layout, axes = LAYOUTS[ONE_TOKEN if how == "step" else how], axes_of(fn.spec, {"state": pool})
        arrays = {n: layout.leave(np, x, axes[n], (5,)) for n, x in arrays.items()}
        options |= {} if how == "step" else {"layout": how}
        run = functools.partial(la.step, fn) if how == "step" else fn
    plain = beginning(fn, pool)
    expected = run(**arrays, **options, state=copied(plain), overwrite_state=True)
    before = copied(pool)
    apart = run(**arrays, **options, state=pool, state_rows=ROWS, fresh=FRESH)
    assert_same(pool, before)
    assert np.array_equal(apart.out, expected.out)
    if not fn.spec.grows:  # a cache that is not overwritten has more slots
        assert_same(apart.state, expected.state)
    found = run(**arrays, **options, state=pool, state_rows=np.array(ROWS), fresh=np.array(FRESH), overwrite_state=True)
    assert all(x is y for x, y in zip(parts(found.state), parts(pool), strict=True))
    assert np.array_equal(found.out, expected.out)
    assert_pool(pool, before, expected.state)
    own = copied(plain)
    for S in parts(own):
        S[BEGINS] = np.nan if S.dtype == np.float64 else 10**9
    again = run(**arrays, **options, state=own, fresh=tuple(n in BEGINS for n in range(5)), overwrite_state=True)
    assert np.array_equal(again.out, expected.out)
    assert_same(own, expected.state)
    alone = run(**arrays, **options)
    axis = 1 if ragged else 0
    begun = np.r_[2:5, 6:7] if ragged else BEGINS
    error = la.testing.relative_error(np.take(found.out, begun, axis), np.take(alone.out, begun, axis))
    assert error < 1e-12


@pytest.mark.parametrize("fn", GROWING, ids=lambda fn: fn.__name__)
def test_other_rows_may_hold_any_number_of_tokens(fn):
    """NaN and more tokens than float32 counts, in rows that are fresh or of no sequence of the call."""
    rng = np.random.default_rng(0)
    arrays = la.testing.sample(fn, rng, B=(2,), T=3, **SIZES, optional=False)
    pool = la.testing.sample_state(fn, rng, (4,), {}, **SIZES)
    pool = pool._replace(length=pool.length.astype(np.float32))
    at = np.array([2, 3])
    state = type(pool)(*(S[at] for S in pool))
    expected = fn(**arrays, state=state, return_state=True, overwrite_state=True)
    pool.length[:2] = np.nan, 2**25
    out = fn(**arrays, state=pool, state_rows=at, overwrite_state=True)
    assert np.array_equal(out, expected.out)
    assert np.array_equal(pool.length[at], expected.state.length)
    pool.length[2:] = np.nan
    fn(**arrays, state=pool, state_rows=at, fresh=[True, True], overwrite_state=True)
    assert np.array_equal(pool.length[at], [3, 3])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("T", [1, 40])
def test_repeated_calls_follow_the_values(T, dtype):
    """A recorded plan takes other arrays, not other rows; 16-bit pools are rounded once."""
    replay.clear()
    kind, rng = np.dtype(getattr(ml_dtypes, dtype, dtype)), np.random.default_rng(0)
    hows = [([4, 0, 2], None), ([4, -1, 2], [False, False, True]), (np.array([4, 0, 2]), np.array([True, True, False])),
            ((-1, -1, -1), (False, True, False)), ([4, 0, 2], [False, False, False])]  # fmt: skip
    for n in range(15):
        rows, fresh = hows[n % 5]
        sample = la.testing.sample(la.gated_delta_rule, rng, B=(3,), T=T, **SIZES)
        arrays = {n: x.astype(np.float32) for n, x in sample.items()}
        pool = rng.standard_normal((6, 2, 4, 3)).astype(kind)
        state = pool[list(rows)]
        state[[m for m in range(3) if rows[m] < 0 or (fresh is not None and fresh[m])]] = 0
        expected = la.gated_delta_rule(**arrays, state=state, return_state=True)
        out, end = la.gated_delta_rule(**arrays, state=pool, state_rows=rows, fresh=fresh, return_state=True)
        assert np.array_equal(out, expected.out)
        assert np.array_equal(end, expected.state)
        before, has_row = pool.copy(), [m for m in range(3) if rows[m] >= 0]
        out = la.gated_delta_rule(**arrays, state=pool, state_rows=rows, fresh=fresh, overwrite_state=True)
        owned = [rows[m] for m in has_row]
        assert np.array_equal(out, expected.out)
        assert np.array_equal(pool[owned], expected.state.astype(kind)[has_row])
        others = [m for m in range(6) if m not in owned]
        assert np.array_equal(pool[others], before[others])


@pytest.mark.parametrize("more", [{"return_states_at": [0, 2, 3]}, {"return_states_at": 3}, {"T": 9}], ids=str)
@pytest.mark.parametrize(
    "fn", [la.kda, la.mlstm, la.forgetting_attention, la.householder_positions], ids=lambda fn: fn.__name__
)
def test_calls_in_pieces_begin_without_a_state(fn, more):
    """States at positions, and fewer queries than tokens (where the state has one shape)."""
    if fn.spec.grows and "T" in more:
        more = {"return_states_at": [1]}
    arrays, pool = drawn(fn, T := more.get("T", 3), (5,))
    options = {n: x for n, x in more.items() if n != "T"} | {"return_state": True}
    if T == 9:
        arrays["q"] = arrays["q"][:, -2:]
    expected = fn(**arrays, **options, state=beginning(fn, pool), overwrite_state=True)
    before = copied(pool)
    found = fn(**arrays, **options, state=pool, state_rows=ROWS, fresh=FRESH, overwrite_state=True)
    assert np.array_equal(found.out, expected.out)
    assert_pool(pool, before, expected.state)
    if more.get("return_states_at"):
        assert_same(found.states, expected.states)


def test_other_libraries_begin_without_a_state(library):
    arrays, pool = drawn(la.gated_delta_rule, 2, (5,), np.float32)
    expected = la.gated_delta_rule(**arrays, state=beginning(la.gated_delta_rule, pool), return_state=True)
    arrays = {n: library.bring(x) for n, x in arrays.items()}
    for bring in (list, lambda x: library.bring(np.array(x))):
        buffer = library.bring(pool.copy())
        out, end = la.gated_delta_rule(
            **arrays, state=buffer, state_rows=bring(ROWS), fresh=bring(FRESH), return_state=True
        )
        assert np.abs(library.see(out) - expected.out).max() < 1e-5
        assert np.abs(library.see(end) - expected.state).max() < 1e-5
        if library.name in ("numpy, read-only", "dask"):
            continue
        _, end = la.gated_delta_rule(
            **arrays, state=buffer, state_rows=bring(ROWS), fresh=bring(FRESH), return_state=True, overwrite_state=True
        )
        if library.name == "jax":  # the states of the sequences
            assert np.abs(library.see(end) - expected.state).max() < 1e-5
            continue
        assert np.abs(library.see(buffer)[[4, 0, 5]] - expected.state[[0, 1, 3]]).max() < 1e-5
        assert np.array_equal(library.see(buffer)[1:4], pool[1:4], equal_nan=True)


@pytest.mark.parametrize("at", [[4, 0, 2], [4, -1, 6], [-1, -1, -1], [-7, 2, 99]])
def test_rows_of_a_device_are_written_without_being_read_by_the_host(at):
    pool, values = np.arange(12.0).reshape(6, 2), 100 + np.arange(6.0).reshape(3, 2)
    expected = pool.copy()
    for row, x in zip(at, values, strict=True):
        if 0 <= row < 6:
            expected[row] = x
    put_on_device(array_api_compat.numpy, pool, np.array(at), values)
    assert np.array_equal(pool, expected)


def test_a_pool_without_rows():
    arrays, _ = drawn(la.gated_delta_rule, 2, (5,))
    out = la.gated_delta_rule(**arrays, state=np.zeros((0, 2, 4, 3)), state_rows=[-1] * 5, overwrite_state=True)
    assert np.array_equal(out, la.gated_delta_rule(**arrays))


@pytest.mark.parametrize(("options", "kind", "words"), [
    ({"fresh": [True, False]}, ValueError, r"fresh has shape \(2,\), expected one boolean per sequence: \(5,\)"),
    ({"fresh": [0, 1, 0, 1, 0]}, TypeError, "fresh is .*, expected booleans"),
    ({"fresh": np.zeros(5)}, TypeError, "fresh has dtype float64, expected booleans"),
    ({"fresh": True}, ValueError, "expected one boolean per sequence"),
    ({"fresh": FRESH, "state": None, "state_rows": None}, ValueError, "fresh without a state, expected state to be"),
    ({"fresh": FRESH, "state_rows": None}, ValueError, r"state has shape .*, expected a state for each sequence: \(5,"),
    ({"state_rows": [4, 0, -2, 5, -1]}, ValueError, "from 0 to 5, or -1 for a sequence without a row"),
    ({"state_rows": [4, 0, 4, -1, -1]}, ValueError, "expected no row twice"),
])  # fmt: skip
def test_wrong_rows_are_refused(options, kind, words):
    arrays, pool = drawn(la.kda, 2, (5,))
    with pytest.raises(kind, match=f"kda: .*{words}"):
        la.kda(**arrays, **{"state": pool, "state_rows": ROWS, **options})


def test_not_with_gradients():
    arrays, pool = drawn(la.kda, 2, (5,))
    with pytest.raises(ValueError, match="kda: fresh was given to vjp, expected None"):
        la.vjp(la.kda, **arrays, state=pool[:5], fresh=FRESH)
