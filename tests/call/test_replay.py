"""A NumPy call after a remembered one that differs from it in one thing: what comes out is what a first call gives.

Every test makes a call that the library remembers, then another, and compares that one with the same call where nothing
is remembered, to the bit: outputs, states and errors.
"""

from __future__ import annotations

from types import MethodType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.call.replay import plans as replay
from tests.call.replays import (
    B,
    H,
    K,
    apart,
    backwards,
    check,
    copied,
    every_form,
    frozen,
    given,
    numbers,
    of,
    result,
    shared_row,
    transposed,
)
from tests.cases import CASES, draw


@pytest.fixture(autouse=True)
def nothing_remembered():
    replay.clear()
    yield
    replay.clear()


# options


OPTIONS = [  # of a remembered call, and of one that differs
    ({"scale": 2.0}, {"scale": 3.0}),
    ({"scale": 2.0}, {}),
    ({"scale": 1}, {"scale": True}),  # an error
    ({"scale": 2}, {"chunk_size": 2}),
    ({"num_threads": 2}, {"scale": 2}),
    ({"chunk_size": 1}, {"chunk_size": True}),
    ({"chunk_size": 1}, {}),
    ({}, {"chunk_size": 1}),
    ({}, {"chunk_size": 16}),
    ({}, {"chunk_size": "parallel"}),
    ({"chunk_size": 16}, {"chunk_size": 24}),
    ({}, {"chunk_size": 0}),
    ({"return_state": True}, {}),
    ({}, {"return_state": True}),
    ({"return_state": True}, {"return_state": 1}),
    ({"num_threads": 1}, {"num_threads": 3}),
    ({"num_threads": 1}, {"num_threads": True}),
    ({}, {"num_threads": 0}),
    ({}, {"precision": "tf32"}),
    ({}, {"precision": "float16"}),
    ({}, {"backend": "chunks"}),
    ({"backend": "numba"}, {"backend": "reference"}),
    ({}, {"backend": "cuda"}),
    ({"backend": "numba"}, {"backend": "nowhere"}),
    ({}, {"qk_l2norm": True}),
    ({"qk_l2norm": False}, {"qk_l2norm": 0}),
    ({"layout": "time_first"}, {"layout": "sideways"}),
    ({}, {"overwrite_state": True}),  # of no state
    ({}, {"nonsense": None}),
]


@every_form
@pytest.mark.parametrize(("first", "then"), OPTIONS, ids=str)
def test_another_option(first, then, T):
    (x, _), (y, _) = given(T), given(T, 1)
    check(la.gated_delta_rule, of(x, **first), of(y, **then))


@every_form
def test_the_other_layout(T):
    """As many tokens as heads: shapes and strides tell nothing."""
    x, state = given(T, H=T)
    moved = {n: y.swapaxes(1, 2).copy() for n, y in x.items()}
    expected = check(la.gated_delta_rule, of(x, state=state), of(moved, state=state, layout="heads_first"))
    assert expected != result(la.gated_delta_rule, *of(moved, state=state))


@every_form
def test_another_number_of_threads_in_the_environment(T, monkeypatch):
    x, state = given(T)
    found = []
    for count in ("1", "3", "2"):
        monkeypatch.setenv("LINATTN_NUM_THREADS", count)
        found.append(result(la.gated_delta_rule, *of(x, state=state)))
    assert found[0] == found[1] == found[2]
    assert replay.count() == 1


@every_form
def test_another_function(T):
    """Four arrays of the same shapes."""
    x, _ = given(T)
    q, k, v, beta = x["q"], x["k"], x["v"], x["beta"]
    expected = result(la.simple_gla, [q, k, v, -beta], {})
    replay.clear()
    result(la.delta_rule, [q, k, v, beta], {})
    assert replay.count() == 1
    assert result(la.simple_gla, [q, k, v, -beta], {}) == expected


@every_form
def test_names_of_arrays_in_another_order(T):
    x, _ = given(T)
    g, gv = numbers((B, T, H, K), 7, -1, 0), numbers((B, T, H, K), 8, -1, 0)
    first = of(None, x["q"], x["k"], x["v"], g=g, gv=gv)
    check(la.gla, first, of(None, x["q"], x["k"], x["v"], gv=g, g=gv))
    check(la.gla, first, of(None, x["q"], x["k"], x["v"], g=g))
    check(la.gla, first, of(None, x["q"], x["k"], x["v"], gv=g))
    check(la.gla, first, of(None, x["q"], x["k"], x["v"], g=g, v=gv))  # v twice


@every_form
def test_queries_left_out(T):
    x, state = given(T)
    check(la.gated_delta_rule, of(x, state=state), of(x | {"q": None}, state=state))
    check(la.gated_delta_rule, of(x | {"q": None}, state=state), of(x, state=state))


def test_no_causality_and_feature_maps():
    x, _ = given(40)
    three = [x["q"], x["k"], x["v"]]
    for more in ({"causal": False}, {"feature_map": "relu"}, {"normalize": True}, {"feature_map": "elu+1", "eps": 0.5},
                 {"causal": 0}):  # fmt: skip
        check(la.linear_attention, (three, {}), (three, more))


# arrays: one thing differs


@every_form
@pytest.mark.parametrize("change", [transposed, apart, backwards, shared_row], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_other_strides(name, change, T):
    x, y = given(T)[0], given(T, 1)[0]
    if change is not shared_row:
        check(la.gated_delta_rule, of(x), of(y | {name: change(y[name])}))
        check(la.gated_delta_rule, of(x | {name: change(x[name])}), of(y))
        return
    x, y = ({n: np.lib.stride_tricks.as_strided(z[:1].copy(), z.shape, (0, *z.strides[1:])) if n == name else z
             for n, z in x.items()} for x in (x, y))  # fmt: skip
    full = given(T)[0]
    for fn_first, fn_then in ((full, y), (x, full)):
        replay.clear()
        expected = la.gated_delta_rule(*of(fn_then)[0])
        replay.clear()
        la.gated_delta_rule(*of(fn_first)[0])
        assert (la.gated_delta_rule(*of(fn_then)[0]) == expected).all()


@every_form
@pytest.mark.parametrize("cut", [np.s_[:1], np.s_[:, :3], np.s_[:, :, :1]], ids=["batch", "tokens", "heads"])
def test_another_shape_with_the_same_strides(cut, T):
    x, y = given(T)[0], given(T, 1)[0]
    check(la.gated_delta_rule, of(x), of({n: z[cut] for n, z in y.items()}))
    check(la.gated_delta_rule, of({n: z[cut] for n, z in x.items()}), of(y))
    for name in x:  # of one alone: shared heads, or an error
        check(la.gated_delta_rule, of(x), of(y | {name: y[name][cut]}))


@every_form
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("dtype", [np.float64, np.int64, ">f8"], ids=str)
def test_another_dtype_with_the_same_shape_and_strides(name, dtype, T):
    x, y = given(T)[0], given(T, 1)[0]
    for kind in (apart, lambda z: z.astype(np.float64)):
        a, b = ({n: kind(z) for n, z in w.items()} for w in (x, y))
        for other in (y[name].astype(dtype), apart(y[name])):
            assert (a[name].shape, a[name].strides) == (other.shape, other.strides)
            check(la.gated_delta_rule, of(a), of(b | {name: other}))


@every_form
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_the_other_sixteen_bits(name, T):
    x = given(T)[0]
    halves = [of(x | {name: x[name].astype(kind)}) for kind in (np.float16, ml_dtypes.bfloat16)]
    check(la.gated_delta_rule, *halves)
    check(la.gated_delta_rule, *reversed(halves))


@every_form
def test_batch_axes_that_merge_into_one_and_that_do_not(T):
    """Where two batch axes cannot be read as one, a copy is read: another one each time."""
    sets = []
    for seed in range(3):
        x, state = given(T, seed, B=6)
        sets.append(({n: y.reshape(2, 3, *y.shape[1:]) for n, y in x.items()}, state.reshape(2, 3, H, K, K)))

    def crossed(y):
        return np.ascontiguousarray(y.swapaxes(0, 1)).swapaxes(0, 1)

    expected = [la.gated_delta_rule(*of(x)[0], state=S, return_state=True, backend="numba") for x, S in sets]
    for names in ((), ("q",), ("g",), ("state",), ("q", "k", "v", "g", "beta", "state")):
        replay.clear()
        for (x, S), right in zip(sets, expected, strict=True):
            own = [crossed(y) if n in names else y for n, y in x.items()]
            written = crossed(S) if "state" in names else S.copy()
            found = la.gated_delta_rule(*own, state=written, return_state=True, overwrite_state=True, backend="numba")
            assert (found.out == right.out).all()
            assert (found.state == right.state).all()
            assert found.state is written


@every_form
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state"])
def test_misaligned_arrays(name, T):
    """At an address that is no multiple of their size."""
    x, S = given(T)
    x = x | {"state": S}
    for _ in range(2):
        replay.clear()
        expected = la.gated_delta_rule(**x, return_state=True)
        raw = np.zeros(x[name].nbytes + 1, np.uint8)
        misaligned = raw[1:].view(np.float32).reshape(x[name].shape)
        misaligned[...] = x[name]
        for other in (x | {name: misaligned}, x, x | {name: misaligned}):
            found = la.gated_delta_rule(**other, return_state=True)
            assert (found.out == expected.out).all()
            assert (found.state == expected.state).all()


def test_no_tokens():
    x, state = given(5)
    for cut in (np.s_[:0], np.s_[:, :0], np.s_[:, :, :0]):
        none = {n: y[cut] for n, y in x.items()}
        S = state[:0] if cut == np.s_[:0] else state if cut == np.s_[:, :0] else state[:, :0]
        check(la.gated_delta_rule, of(x, state=state), of(none, state=S, return_state=True))
        for _ in range(2):
            out, end = la.gated_delta_rule(*of(none)[0], state=S, return_state=True)
            assert out.shape == none["v"].shape
            assert (end == S).all()
            assert not np.shares_memory(end, S)


# numbers that settle a call


@every_form
def test_other_offsets_and_other_rows(T):
    x, _ = given(T, B=1)
    pool = numbers((6, H, K, K), 9)
    middles = 2, T - 1
    offsets = [np.array([0, n, T]) for n in middles]
    ragged = [result(la.gated_delta_rule, *of(x, cu_seqlens=y, return_state=True)) for y in offsets]
    assert ragged[0] != ragged[1]
    again = [result(la.gated_delta_rule, *of(x, cu_seqlens=y, return_state=True)) for y in offsets]
    assert again == ragged
    chosen = [np.array([n]) for n in (4, 1, 7)]
    pooled = [result(la.gated_delta_rule, *of(x, state=pool, state_rows=y, overwrite_state=True)) for y in chosen]
    assert pooled[0] != pooled[1]
    assert pooled[2][0] is ValueError
    replay.clear()
    assert pooled[::-1] == [
        result(la.gated_delta_rule, *of(x, state=pool, state_rows=y, overwrite_state=True)) for y in chosen[::-1]
    ]


# every variant


@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_numbers(case, T):
    """Whatever is remembered of a variant holds for other numbers at other places, its state too."""
    sets = [draw(case, T=T, H=2, K=4, V=4, seed=seed, dtype=np.float32) for seed in range(3)]
    for overwrite in (False, True):
        calls = [([], {**x, **case.options, "state": S, "return_state": True, "overwrite_state": overwrite})
                 for x, S in sets]  # fmt: skip
        expected = []
        for one in calls:
            replay.clear()
            expected.append(result(case.fn, *one))
        assert [result(case.fn, *one) for one in calls] == expected
        assert replay.count() <= 1


def test_the_number_of_recorded_plans_is_limited(monkeypatch):
    monkeypatch.setattr(replay, "MOST", 3)
    x, _ = given(5)
    expected = {}
    for scale in (1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 2.0, 4.0):
        found = result(la.gated_delta_rule, *of(x, scale=scale))
        assert found == expected.setdefault(scale, found)
        assert 1 <= replay.count() <= 3


@pytest.mark.parametrize("where", ["nbytes", "device_nbytes"])
def test_the_bytes_of_recorded_plans_are_limited(where):
    """The oldest plans are removed, for a plan that has grown too; one that exceeds the bound alone is not stored."""

    def plan(part):
        return SimpleNamespace(**{"nbytes": 0, where: int(replay.MOST_BYTES / part) - replay.LEAST})

    replay.clear()
    for n in range(5):
        replay.store(n, plan(4))
    assert list(replay.by_key) == [1, 2, 3, 4]
    replay.store(3, plan(2))
    assert list(replay.by_key) == [2, 3, 4]
    replay.store(5, MethodType(len, plan(1e9)))
    assert list(replay.by_key) == [2, 3, 4, 5]
    replay.store(6, plan(0.5))
    assert replay.count() == 0


def test_copies_are_what_they_copy():
    """The helper of this file: strides, sharing and writeability go with the numbers."""
    wide = numbers((4, 6), 0)
    x = copied({"a": wide[:, :4], "b": wide[:, 2:], "c": frozen(wide), "d": (wide[::-1], None)})
    assert np.shares_memory(x["a"], x["b"])
    assert not np.shares_memory(x["a"], wide)
    assert (x["a"] == wide[:, :4]).all()
    assert (x["d"][0] == wide[::-1]).all()
    assert x["b"].strides == wide[:, 2:].strides
    assert not x["c"].flags.writeable


def test_bad_input_is_refused_after_good_input():
    x, _ = given(40)
    la.gated_delta_rule(**x)
    with pytest.raises(ValueError, match="gated_delta_rule: beta has shape"):
        la.gated_delta_rule(**x | {"beta": x["beta"][:, :1]})
    with pytest.raises(TypeError, match="beta"):
        la.gated_delta_rule(**x | {"beta": x["beta"].astype(int)})


def test_a_doubtful_layout_is_warned_of_every_time():
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 40, 4)).astype(np.float32)
    for _ in range(3):
        with pytest.warns(UserWarning, match="heads_first"):
            la.linear_attention(q, k, v)
