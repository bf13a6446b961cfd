"""The compiled recurrent form against the definition: every cell, size, stride and storage; in place and not."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cpu import loops as numba_loops
from linattn_np.matrix_state.types import ReadState
from linattn_np.runtime.pieces import memory as handles
from linattn_np.runtime.shapes import sequences
from linattn_np.testing import relative_error
from tests.core_cases import CELLS, case
from tests.matrix_state.cpu.test_loops import HEADS, gates, single, wide
from tests.runtime.test_threads import run

GATED, FREE, BONUS = ("scalar", "delta", "after"), ("vector", "free", "after"), ("vector", "none", "bonus")
OUT = 2e-6  # float32 against the float64 definition


def both(x, plan, state, module=numba_loops):
    """(out, final state), token by token."""
    return module.forward(x, plan._replace(chunk_size=1), state)[:2]


def worst(found, expected):
    return max(relative_error(a, b) for a, b in zip(found, expected, strict=True) if b is not None)


def cut(x, plan, start, stop):
    """Tokens start..stop of a call."""
    tokens = [None if y is None else y[..., start:stop, :, :] for y in x.of_tokens]
    return type(x)(*tokens, x.u), plan._replace(sequences=tuple(sequences(stop - start, None)))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_every_cell_is_the_recurrence(cell, heads):
    for T in (1, 2, 33):
        x, plan, state, *_ = case(*cell, heads=HEADS[heads], T=T)
        for start in (state, None):
            expected = both(x, plan, start, recurrence)
            assert worst(both(x, plan, start), expected) < 1e-12, T
            small, narrow, *rest = single(x, plan, *(() if start is None else (start,)))
            exact, *rest64 = wide(small, *rest)
            expected = both(exact, plan, rest64[0] if rest64 else None, recurrence)
            assert worst(both(small, narrow, rest[0] if rest else None), expected) < OUT, T


@pytest.mark.parametrize("erase", ["none", "delta", "delta undecayed", "free"])
@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
@pytest.mark.parametrize("row", [ReadState.UPDATED, ReadState.PREVIOUS])
@pytest.mark.parametrize("bonus", [False, True])
def test_both_read_orders_and_the_bonus_with_every_erase(decay, erase, row, bonus):
    x, plan, state, *_ = case(decay, erase, "after", T=7, heads=(4, 2, 2))
    plan = plan._replace(query_reads=row)
    if bonus:
        x = x._replace(u=np.random.default_rng(5).standard_normal((2, 5)))
    assert worst(both(x, plan, state), both(x, plan, state, recurrence)) < 1e-12


@pytest.mark.parametrize("K", [1, 7, 60, 64, 100, 128, 256])
@pytest.mark.parametrize("V", [1, 7, 60, 64, 100, 128, 256])
@pytest.mark.parametrize("cell", [GATED, FREE, ("outer", "none", "bonus")])
def test_awkward_widths(cell, K, V):
    x, plan, state, *_ = case(*cell, T=3, K=K, V=V, B=1)
    expected = both(x, plan, state, recurrence)
    assert worst(both(x, plan, state), expected) < 1e-12
    small, narrow, start = single(x, plan, state)
    exact, start64 = wide(small, start)
    assert worst(both(small, narrow, start), both(exact, plan, start64, recurrence)) < OUT


@pytest.mark.parametrize("cell", [GATED, FREE, BONUS])
def test_every_short_length(cell):
    for T in range(1, 34):
        x, plan, state, *_ = case(*cell, T=T, K=7, V=20)
        assert worst(both(x, plan, state), both(x, plan, state, recurrence)) < 1e-12, T


@pytest.mark.parametrize("kind", ["0.1", "60", "resets", "huge", "sometimes -80"])
@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("erase", ["none", "delta", "delta undecayed", "free"])
def test_any_gate_in_float32(decay, erase, kind):
    x, plan, state, *_ = case(decay, erase, "after", T=50, K=32, V=16)
    x = x._replace(g=gates(kind, x.g.shape, np.random.default_rng(3)))
    small, narrow, start = single(x, plan, state)
    exact, start64 = wide(small, start)
    expected = both(exact, plan, start64, recurrence)
    assert worst(both(exact, plan, start64), expected) < 1e-12
    assert worst(both(small, narrow, start), expected) < OUT


def test_a_reset_forgets_all_and_no_decay_nothing():
    x, plan, state, *_ = case("scalar", "none", "after", T=1)
    for g, kept in ((-np.inf, 0), (-1e30, 0), (0.0, 1)):
        _, end = both(x._replace(g=np.full_like(x.g, g), k=np.zeros_like(x.k)), plan, state)
        assert (end == kept * state).all()


@pytest.mark.parametrize("cell", [GATED, FREE, BONUS, ("outer", "none", "before"), ("none", "delta", "after")])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_token_by_token_is_the_whole_to_the_bit(cell, dtype):
    x, plan, state, *_ = case(*cell, T=37, K=24, V=70, dtype=dtype)
    out, end = both(x, plan, state)
    for step in (1, 5, 32):
        S, parts = state, []
        for t in range(0, 37, step):
            part, S = both(*cut(x, plan, t, min(t + step, 37)), S)
            parts.append(part)
        assert (np.concatenate(parts, axis=-3) == out).all()
        assert (end == S).all()


def test_short_sequences_of_a_ragged_batch_have_the_bits_they_have_alone():
    lengths = [0, 1, 3, policy.SHORT_CPU, policy.SHORT_CPU + 1, 40, 2, 0]
    offsets = [0, *np.cumsum(lengths).tolist()]
    x, plan, state, *_ = case("scalar", "delta", "after", T=offsets[-1], K=16, V=24, B=1, offsets=offsets)
    plan = plan._replace(chunk_size=None)
    out, end, _ = numba_loops.forward(x, plan, state)
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        alone, alone_end, _ = numba_loops.forward(*cut(x, plan, a, b), state[n : n + 1])
        assert (out[:, a:b] == alone).all()
        assert (end[n] == alone_end[0]).all()
        form = 1 if b - a <= policy.SHORT_CPU else None
        assert (numba_loops.forward(*cut(x, plan._replace(chunk_size=form), a, b), state[n : n + 1])[1] == end[n]).all()


@pytest.mark.parametrize("threads", ["2", "3"])
def test_same_bits_for_any_number_of_threads(threads, monkeypatch):
    monkeypatch.setattr(policy, "FEW_BYTES", 0)
    for heads, V in (((2, 2, 2), 100), ((1, 1, 1), 600)):
        args = case("vector", "delta", "after", T=5, K=48, V=V, B=1, heads=heads)[:3]
        monkeypatch.setenv("LINATTN_NUM_THREADS", "1")
        alone = [both(*args), both(*single(*args))]
        monkeypatch.setenv("LINATTN_NUM_THREADS", threads)
        for a, b in zip(alone, [both(*args), both(*single(*args))], strict=True):
            assert (a[0] == b[0]).all()
            assert (a[1] == b[1]).all()


def test_strides_of_any_sign_and_read_only_inputs():
    x, plan, state, *_ = case("vector", "free", "after", T=4, K=16, V=24)
    expected = both(x, plan, state)

    def odd(y):
        buffer = np.full((*y.shape[:-1], 2 * y.shape[-1] + 1), np.nan)
        view = buffer[..., -2::-2][..., : y.shape[-1]]
        view[...] = y
        view.flags.writeable = False
        return view

    def turned(y):
        return np.asfortranarray(y)[:, ::-1].copy("K")[:, ::-1]

    for change in (odd, turned):
        found = both(type(x)(*(None if y is None else change(y) for y in x)), plan, change(state))
        assert all((a == b).all() for a, b in zip(found, expected, strict=True))


def test_storage_in_16_bits_is_converted_exactly():
    x, plan, state, *_ = case("scalar", "delta", "after", T=3, K=16, V=27)
    plan = plan._replace(dtype=np.float32)
    every = np.arange(2**16, dtype=np.uint16)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        small = type(x)(*(None if y is None else y.astype(dtype) for y in x))
        out, end = both(small, plan, state.astype(np.float32))
        out_wide, end_wide = both(type(x)(*(None if y is None else y.astype(np.float32) for y in small)), plan,
                                  state.astype(np.float32))  # fmt: skip
        assert out.dtype == dtype
        assert (out == out_wide.astype(dtype)).all()
        assert (end == end_wide).all()
        for part in (every, every[::-1]):  # side by side, and not
            v = part.view(dtype).reshape(1, 1, 16, 4096)
            one = np.ones((1, 1, 16, 1), dtype)
            y = type(x)(None, one, v)
            got = both(y, plan._replace(sequences=tuple(sequences(1, None))), None)[1]
            assert np.array_equal(got.ravel(), v.astype(np.float32).ravel(), equal_nan=True)


def test_write_without_reading():
    x, plan, state, *_ = case("scalar", "delta", "after", T=3)
    out, end = both(x._replace(q=None), plan, state)
    assert out is None
    assert (end == both(x, plan, state)[1]).all()


def test_a_bad_head_stays_alone():
    x, plan, state, *_ = case("scalar", "delta", "after", T=6, V=20)
    good = both(x, plan, state)
    v, g = x.v.copy(), x.g.copy()
    v[0, 0, 0, 0], g[0, 2, 0, 0] = np.nan, np.nan
    bad = both(x._replace(v=v, g=g), plan, state)
    assert np.isnan(bad[0][0, 5, 0]).all()
    assert (bad[0][0, :, 1] == good[0][0, :, 1]).all()
    assert (bad[0][1] == good[0][1]).all()
    assert (both(x, plan, state)[0] == good[0]).all()  # nothing is left in the memory


# the state, in place

IN_PLACE = {"return_state": True, "overwrite_state": True, "backend": "numba"}


def arrays(T, dtype=np.float32, B=2, H=2, K=16, V=24, seed=0):
    rng = np.random.default_rng(seed)
    n = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    k = n(B, T, H, K)
    given = {
        "q": n(B, T, H, K),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": n(B, T, H, V),
        "g": -rng.uniform(0, 1, (B, T, H)).astype(dtype),
        "beta": rng.uniform(0, 1, (B, T, H)).astype(dtype),
    }
    return given, n(B, H, K, V)


@pytest.mark.parametrize("T", [1, 5, 40])
def test_the_state_is_overwritten_where_it_lies(T):
    for turn in range(3):  # the same call, for other numbers
        given, state = arrays(T, seed=turn)
        kept = state.copy()
        out, end = la.gated_delta_rule(**given, state=state, return_state=True, backend="numba")
        assert (state == kept).all()
        assert not np.shares_memory(end, state)
        expected, _ = la.gated_delta_rule(**given, state=state, return_state=True, backend="reference")
        assert relative_error(out, expected) < OUT
        mine, same = la.gated_delta_rule(**given, state=state, **IN_PLACE)
        assert same is state
        assert (mine == out).all()
        assert (state == end).all()
        state[...] = kept
        alone = la.gated_delta_rule(**given, state=state, overwrite_state=True, backend="numba")
        assert (alone == out).all()
        assert (state == end).all()


def test_states_of_any_stride_are_overwritten():
    given, state = arrays(1)
    expected = la.gated_delta_rule(**given, state=state, return_state=True, backend="numba")
    buffer, wide = np.zeros((2, 2, 3, 16, 24), np.float32), np.zeros((2, 2, 16, 48), np.float32)
    for view in (buffer[:, :, 1], buffer[:, ::-1, 2], np.zeros((24, 16, 2, 2), np.float32).T, wide[..., ::2]):
        for _ in range(2):
            view[...] = state
            out, end = la.gated_delta_rule(**given, state=view, **IN_PLACE)
            assert end is view
            assert (out == expected[0]).all()
            assert (view == expected[1]).all()


def test_two_batch_axes_that_are_not_one():
    for turn in range(3):
        given, state = arrays(1, B=6, seed=turn)
        expected = la.gated_delta_rule(**given, state=state, return_state=True, backend="reference")
        buffer = np.zeros((2, 5, *state.shape[1:]), np.float32)
        mine, v = buffer[:, :3], np.zeros((2, 5, *given["v"].shape[1:]), np.float32)[:, :3]
        mine[...], v[...] = state.reshape(mine.shape), given["v"].reshape(v.shape)
        split = {name: y.reshape(2, 3, *y.shape[1:]) for name, y in given.items()} | {"v": v}
        out, end = la.gated_delta_rule(**split, state=mine, return_state=True, backend="numba")
        assert worst((out.reshape(expected.out.shape), end.reshape(state.shape)), expected) < OUT
        out, end = la.gated_delta_rule(**split, state=mine, **IN_PLACE)
        assert end is mine
        assert worst((out.reshape(expected.out.shape), mine.reshape(state.shape)), expected) < OUT


def test_a_state_narrower_than_the_computation():
    for turn in range(2):
        given, state = arrays(1, np.float64, seed=turn)
        narrow = state.astype(np.float32)
        expected = la.gated_delta_rule(**given, state=narrow, return_state=True, backend="reference")
        found = la.gated_delta_rule(**given, state=narrow, return_state=True, backend="numba")
        assert found.state.dtype == np.float64
        assert worst(found, expected) < 1e-12


def test_a_state_that_shares_memory_with_an_input():
    given, state = arrays(1, K=16, V=16)
    for _ in range(3):
        mine = state.copy()
        given["v"] = mine[:, None, :, 3]
        apart = {**given, "v": given["v"].copy()}
        expected = la.gated_delta_rule(**apart, state=state, return_state=True, backend="numba")
        out, end = la.gated_delta_rule(**given, state=mine, **IN_PLACE)
        assert end is mine
        assert (out == expected[0]).all()
        assert (mine == expected[1]).all()


def test_one_array_given_twice_is_not_two():
    given, state = arrays(1, V=16)
    call = {"state": state, "return_state": True, "backend": "numba"}
    for name in ("q", "v"):
        for _ in range(2):
            la.gated_delta_rule(**{**given, name: given["k"]}, **call)
    for turn in range(2):
        given, state = arrays(1, V=16, seed=turn)
        expected = la.gated_delta_rule(**given, state=state, return_state=True, backend="reference")
        assert worst(la.gated_delta_rule(**given, **call | {"state": state}), expected) < OUT
    for turn in range(3):  # three arrays interleaved in one
        given, state = arrays(1, V=16, seed=turn)
        q, k, v = np.moveaxis(np.stack([given[name] for name in "qkv"], axis=-1), -1, 0)
        expected = la.gated_delta_rule(**given, state=state, return_state=True, backend="reference")
        assert worst(la.gated_delta_rule(q, k, v, given["g"], given["beta"], **call | {"state": state}), expected) < OUT


def test_calls_alike_are_told_apart_by_all_that_settles_them():
    given, state = arrays(1)
    call = {**given, "state": state, "return_state": True, "backend": "numba"}
    for _ in range(2):
        out, _ = la.gated_delta_rule(**call)
        twice, _ = la.gated_delta_rule(**call, scale=2 * 16**-0.5)
        assert (twice == 2 * out).all()
        q = np.concatenate([given["q"], given["q"]], axis=-1)[..., :16]  # other strides
        assert (la.gated_delta_rule(**{**call, "q": q}).out == out).all()
        half = la.gated_delta_rule(**{**call, "v": given["v"].astype(np.float16)}).out
        assert half.dtype == np.float16
        assert la.gated_delta_rule(**{**call, "q": None}).out is None
        with pytest.raises(TypeError, match="return_state is 1, expected True or False"):
            la.gated_delta_rule(**{**call, "return_state": 1})
        locked = state.copy()
        locked.flags.writeable = False
        la.gated_delta_rule(**{**call, "state": locked})
        with pytest.raises(ValueError, match="state is read-only"):
            la.gated_delta_rule(**{**call, "state": locked}, overwrite_state=True)
        with pytest.raises(ValueError, match="beta has shape"):
            la.gated_delta_rule(**{**call, "beta": given["beta"][..., :1]})
        swapped = given["v"].astype(given["v"].dtype.newbyteorder())
        assert (la.gated_delta_rule(**{**call, "v": swapped}).out == out).all()


@pytest.mark.parametrize(
    "fn",
    [f for f in la.VARIANTS if f.spec.state.type_of(f.spec.options.defaults) is None and not f.spec.state.wide],
    ids=lambda f: f.__name__,
)
def test_variants_decode_as_the_definition_does(fn):
    for turn in range(3):
        given = la.testing.sample(fn, np.random.default_rng(turn), T=1, K=8, V=8)
        state = np.random.default_rng(turn).standard_normal((2, 2, 8, 8))
        expected = fn(**given, state=state, return_state=True, backend="reference")
        found = fn(**given, state=state, **IN_PLACE)
        assert worst(found, expected) < 1e-12
        assert found.state is state


@pytest.mark.parametrize("known", [True, False])
def test_addresses_are_found_or_asked_for(known, monkeypatch):
    monkeypatch.setattr(handles, "is_behind_the_header", lambda: known)
    for turn in range(3):
        given, state = arrays(1, seed=turn)
        given["v"] = given["v"][..., ::-1]
        expected = la.gated_delta_rule(**given, state=state, return_state=True, backend="reference")
        assert worst(la.gated_delta_rule(**given, state=state, **IN_PLACE), expected) < OUT


def test_callers_at_once_get_what_each_gets_alone(monkeypatch):
    monkeypatch.setattr(policy, "FEW_BYTES", 0)
    monkeypatch.setenv("LINATTN_NUM_THREADS", "2")
    cases = [arrays(2, K=30, V=50, seed=n) for n in range(16)]
    call = lambda c: la.gated_delta_rule(**c[0], state=c[1], return_state=True, backend="numba")  # noqa: E731
    alone = [call(c) for c in cases]
    with ThreadPoolExecutor(4) as pool:
        for a, b in zip(alone, pool.map(call, cases), strict=True):
            assert (a.out == b.out).all()
            assert (a.state == b.state).all()


@pytest.mark.slow
@pytest.mark.parametrize("vectors", ["avx2", "neon", "plain"])
def test_every_width_of_a_register_is_right(vectors):
    """On any processor: the compiler cuts vectors that are too wide for it."""
    code = """
        from linattn_np.matrix_state import definition as recurrence
        from linattn_np.matrix_state.cpu import loops as numba_loops
        from linattn_np.testing import relative_error
        from tests.core_cases import CELLS, case
        worst = 0.0
        for cell in CELLS:
            for T, K, V in ((1, 3, 5), (4, 16, 33), (2, 33, 70)):
                x, plan, state, *_ = case(*cell, T=T, K=K, V=V)
                a, b = (module.forward(x, plan._replace(chunk_size=1), state) for module in (numba_loops, recurrence))
                worst = max(worst, relative_error(a[0], b[0]), relative_error(a[1], b[1]))
        print(worst)
    """
    assert float(run(code, LINATTN_VECTORS=vectors)) < 1e-12


def test_gradients_of_one_token():
    given, state = arrays(1, np.float64)
    cotangents = np.random.default_rng(1)
    dout, dstate = cotangents.standard_normal(given["v"].shape), cotangents.standard_normal(state.shape)
    results = []
    for backend in ("numba", "reference"):
        result, pullback = la.vjp(la.gated_delta_rule, **given, state=state, return_state=True, backend=backend)
        results.append((*result, *pullback(dout, dstate)))
    assert worst(*results) < 1e-12
