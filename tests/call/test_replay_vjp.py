"""vjp and plain calls on NumPy arrays after recorded ones: the bits of a first call, and no check is repeated."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import dispatch, vjp
from linattn_np.call.options import is_plain_tuple
from linattn_np.call.replay import plans as replay
from tests.call.replays import B, H, K, apart, backwards, copied, given, numbers, transposed
from tests.cases import CASES, GROWING, cases_of, draw, parts, parts_like

FORMS = {"one token": 1, "tokens": 5, "chunks": 40}


@pytest.fixture(autouse=True)
def nothing_recorded():
    replay.clear()
    yield
    replay.clear()


def bits(*found):
    return [None if y is None else (y.shape, y.dtype, y.tobytes()) for y in found]


def pulled(fn, keywords, seed=0, arrays=()):
    """The result and two pullbacks of a call on copies, as bytes; or its error."""
    own = copied({**{str(n): y for n, y in enumerate(arrays)}, **keywords})
    try:
        result, pullback = la.vjp(fn, *(own[str(n)] for n in range(len(arrays))), **{n: own[n] for n in keywords})
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    out, state = result if isinstance(result, tuple) else (result, None)
    rng = np.random.default_rng(seed)
    dout = None if out is None else rng.standard_normal(out.shape).astype(out.dtype)
    dstate = None if state is None else parts_like(state, [rng.standard_normal(S.shape) for S in parts(state)])
    dstate = None if state is None else parts_like(state, [d.astype(S.dtype) for d, S in
                                                           zip(parts(dstate), parts(state), strict=True)])  # fmt: skip
    grads = [pullback(*cotangents) for cotangents in ((dout, dstate), (dout, dstate))]
    each = [[*g[:-1], *(parts(g[-1]) if g[-1] is not None else [None])] for g in grads]
    assert bits(*each[0]) == bits(*each[1])
    return [isinstance(result, tuple), *bits(*parts(result)), *bits(*each[0])]


def vjp_plans():
    return [plan for key, plan in replay.by_key.items() if key[0] == "vjp"]


def check(fn, recorded, other):
    """other, after `recorded` twice, gives what it gives first."""
    replay.clear()
    expected = pulled(fn, other)
    replay.clear()
    for _ in range(2):
        pulled(fn, recorded)
    assert len(vjp_plans()) == 1
    for _ in range(2):
        assert pulled(fn, other) == expected
    return expected


def unprepared(monkeypatch):
    """Within: no call is bound and checked, and no backend is chosen."""
    for module in (dispatch, vjp):
        monkeypatch.setattr(module, "prepare", None)


@pytest.mark.parametrize("T", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replay_gives_what_a_first_call_gives(case, T, monkeypatch):
    """Other numbers at other places, with a state and without: no check, no plan, the same bits."""
    sets = [draw(case, T=T, H=2, K=4, V=4, seed=seed, dtype=np.float32) for seed in range(3)]
    for more in ({}, {"return_state": True}):
        calls = [{**x, **case.options, **({"state": S} if more else {}), **more} for x, S in sets]
        expected, plain = [], []
        for n, one in enumerate(calls):
            replay.clear()
            expected.append(pulled(case.fn, one, n))
            plain.append(bits(*parts(case.fn(**one))))
        tuples = [y for y in case.options.values() if type(y) is tuple]
        recorded = all(map(is_plain_tuple, tuples))  # not a map given as functions
        assert len(vjp_plans()) == int(recorded)
        with monkeypatch.context() as patch:
            if recorded:
                unprepared(patch)
            assert [pulled(case.fn, one, n) for n, one in enumerate(calls)] == expected
            assert [bits(*parts(case.fn(**one))) for one in calls] == plain


@pytest.mark.parametrize("T", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("case", [case for fn in GROWING for case in cases_of(fn)], ids=str)
def test_attention_without_a_cache_gives_what_a_first_call_gives(case, T):
    """Heads that share queries and keys, numbers of 16 bits: gradients are sums over heads, in new memory."""
    for heads, dtype in (({}, np.float32), ({"Hq": 4, "Hk": 2}, np.float32), ({}, ml_dtypes.bfloat16)):
        sizes = {"T": T, "H": 2, "K": 4, "V": 4, "dtype": dtype} | heads
        first, other = (draw(case, seed=seed, **sizes)[0] | case.options for seed in range(2))
        check(case.fn, first, other)
        replay.clear()
        expected = bits(case.fn(**other))
        replay.clear()
        assert [bits(case.fn(**x)) for x in (first, other)][1] == expected


@pytest.mark.parametrize("backend", ["reference", "chunks", "numba"])
@pytest.mark.parametrize(
    "more",
    [{}, {"layout": "heads_first"}, {"qk_l2norm": True}, {"num_threads": 2}, {"chunk_size": 16}, {"scale": 3.0}],
    ids=str,
)
def test_every_backend_and_option(backend, more, monkeypatch):
    if backend == "numba":
        pytest.importorskip("numba")
    sets = []
    for seed in range(2):
        x, S = given(40, seed)
        if "layout" in more:
            x = {n: np.ascontiguousarray(y.swapaxes(1, 2)) for n, y in x.items()}
        sets.append(x | {"state": S, "return_state": True, "backend": backend} | more)
    expected = [pulled(la.gated_delta_rule, one) for one in sets]
    plain = []
    for one in sets:
        replay.clear()
        plain.append(bits(*la.gated_delta_rule(**one)))
    replay.clear()
    for one in sets[:1]:
        pulled(la.gated_delta_rule, one)
        la.gated_delta_rule(**one)
    unprepared(monkeypatch)
    assert [pulled(la.gated_delta_rule, one) for one in sets] == expected
    assert [bits(*la.gated_delta_rule(**one)) for one in sets] == plain


OPTIONS = [({"scale": 2.0}, {"scale": 3.0}), ({"scale": 2.0}, {}), ({}, {"return_state": True}),
           ({"return_state": True}, {}), ({}, {"chunk_size": 16}), ({"chunk_size": 1}, {"chunk_size": True}),
           ({}, {"backend": "chunks"}), ({}, {"backend": "nowhere"}), ({}, {"num_threads": 0}),
           ({}, {"qk_l2norm": True}), ({}, {"qk_l2norm": 1}), ({}, {"overwrite_state": True}), ({}, {"state": None}),
           ({"state": None}, {}), ({}, {"q": None}), ({"q": None}, {}), ({}, {"cu_seqlens": [0, 5]}),
           ({}, {"precision": "float16"}), ({}, {"nonsense": 1}), ({}, {"state_rows": [0, 1]})]  # fmt: skip


@pytest.mark.parametrize(("first", "then"), OPTIONS, ids=str)
def test_another_option(first, then):
    (x, S), (y, R) = given(5), given(5, 1)
    if "cu_seqlens" in then:
        y, R = {n: z[:1] for n, z in y.items()}, R[:1]
    if first.get("q", 0) is None or then.get("q", 0) is None:
        first, then = first | {"return_state": True}, then | {"return_state": True}
    check(la.gated_delta_rule, x | {"state": S} | first, y | {"state": R} | then)


ARRAYS = {
    "strides": transposed,
    "every second": apart,
    "backwards": backwards,
    "float64": lambda y: y.astype(np.float64),
    "float16": lambda y: y.astype(np.float16),
    "swapped bytes": lambda y: y.astype(">f4"),
    "integers": lambda y: y.astype(int),
    "one row": lambda y: y[:1],
    "none": lambda y: None,
    "a list": lambda y: y.tolist(),
}


@pytest.mark.parametrize("T", [5, 40])
@pytest.mark.parametrize("name", ["q", "v", "g", "state"])
@pytest.mark.parametrize("kind", ARRAYS)
def test_another_array(kind, name, T):
    (x, S), (y, R) = given(T), given(T, 1)
    x, y = x | {"state": S}, y | {"state": R}
    check(la.gated_delta_rule, x, y | {name: ARRAYS[kind](y[name])})
    if kind in ("strides", "every second", "backwards", "float64", "float16"):
        check(la.gated_delta_rule, x | {name: ARRAYS[kind](x[name])}, y)


def test_the_other_layout():
    """As many tokens as heads: shapes and strides tell nothing."""
    x, S = given(H, H=H)
    a = check(la.gated_delta_rule, x | {"state": S}, x | {"state": S, "layout": "heads_first"})
    b = check(la.gated_delta_rule, x | {"state": S, "layout": "heads_first"}, x | {"state": S})
    assert a != b


def test_bytes_that_are_swapped_are_not_recorded():
    x, _ = given(5)
    swapped = {n: y.astype(">f4") for n, y in x.items()}
    assert pulled(la.gated_delta_rule, swapped) == pulled(la.gated_delta_rule, swapped)
    assert vjp_plans() == []


def test_one_array_given_twice():
    x, _ = given(5)
    once, twice = x | {"q": x["k"].copy()}, x | {"q": x["k"]}
    assert pulled(la.gated_delta_rule, twice) == pulled(la.gated_delta_rule, once)
    check(la.gated_delta_rule, twice, given(5, 1)[0])
    for fn in (la.comba,):  # p that is k, or another array with its numbers
        arrays = x | {"p": x["k"]}
        check(fn, arrays, given(5, 1)[0] | {"p": numbers((B, 5, H, K), 7)})
        check(fn, given(5, 1)[0] | {"p": numbers((B, 5, H, K), 7)}, arrays)


def test_arrays_by_position():
    (x, _), (y, _) = given(5), given(5, 1)
    g, gv = numbers((B, 5, H, K), 7, -1, 0), numbers((B, 5, H, K), 8, -1, 0)
    expected = pulled(la.gla, {}, arrays=(y["q"], y["k"], y["v"], g, gv))
    replay.clear()
    for _ in range(2):
        pulled(la.gla, {}, arrays=(x["q"], x["k"], x["v"], gv, g))
    assert pulled(la.gla, {}, arrays=(y["q"], y["k"], y["v"], g, gv)) == expected
    assert pulled(la.gla, {"gv": gv, "g": g}, arrays=(y["q"], y["k"], y["v"])) == expected
    assert pulled(la.gla, {"v": y["v"], "gv": gv, "g": g}, arrays=(y["q"], y["k"])) == expected


# the pullback of a replayed call


def test_an_input_changed_in_place_is_named():
    x, S = given(40)
    x["state"] = S
    for _ in range(3):
        for name, y in x.items():
            out, pullback = la.vjp(la.gated_delta_rule, **x)
            y *= 2
            with pytest.raises(RuntimeError, match=f"^gated_delta_rule: {name} was changed in place"):
                pullback(out)
            y /= 2


def test_bad_cotangents_are_named():
    x, S = given(5)
    for _ in range(3):
        (out, end), pullback = la.vjp(la.gated_delta_rule, **x, state=S, return_state=True)
        for bad, error in (((None, None), TypeError), ((out[:1], None), ValueError), ((out, end[..., :2]), ValueError),
                           ((out.astype(int), None), TypeError), ((out, (end, end)), TypeError),
                           ((out.tolist(), None), TypeError)):  # fmt: skip
            with pytest.raises(error, match=r"^gated_delta_rule: (the pullback|dout|dstate)"):
                pullback(*bad)
        pullback(out, end)


@pytest.mark.parametrize("T", [5, 40])
def test_pullbacks_in_another_order(T):
    """Each reads its own call."""
    sets = [given(T, seed)[0] for seed in range(3)]
    right = [pulled(la.gated_delta_rule, x, 9) for x in sets]
    calls = [la.vjp(la.gated_delta_rule, **x) for x in sets]
    for n in (2, 0, 1, 0, 2):
        out, pullback = calls[n]
        dout = np.random.default_rng(9).standard_normal(out.shape).astype(out.dtype)
        assert bits(*pullback(dout)) == right[n][2:]


@pytest.mark.parametrize("T", [3, 40, 200])
@pytest.mark.parametrize("fn", [la.gated_delta_rule, la.simple_gla, la.mlstm, la.gsa], ids=lambda fn: fn.__name__)
def test_a_pullback_that_is_recorded_after_the_call(fn, T):
    """A replayed forward holds the arrays that the pullbacks before it read; a later one may read others."""
    rng = np.random.default_rng(0)
    drawn = [la.testing.sample(fn, rng, B=(1,), T=T, H=2, K=8, V=8, optional=False) for _ in range(2)]
    (x, y), options = ({n: a.astype(np.float32) for n, a in each.items()} for each in drawn), {"return_state": True}
    options |= {"feature_map": "elu+1"} if "feature_map" in fn.spec.options else {}
    (out, state), pullback = la.vjp(fn, **x, **options)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    dstate = parts_like(state, [rng.standard_normal(S.shape).astype(S.dtype) for S in parts(state)])
    orders = [(None, dstate), (dout, None), (dout[..., ::-1], dstate)]
    expected = [bits(*pullback(*each)[:3]) for each in orders]
    for first in range(3):
        replay.clear()
        la.vjp(fn, **y, **options)[1](*orders[first])
        _, early = la.vjp(fn, **x, **options)  # replayed
        for n, each in enumerate(orders):
            la.vjp(fn, **y, **options)[1](*each)
            assert bits(*early(*each)[:3]) == expected[n]


def test_the_result_may_be_written_to():
    q, k, v = (given(40)[0][n] for n in "qkv")
    for _ in range(3):
        out, pullback = la.vjp(la.linear_attention, q, k, v, normalize=True, feature_map="elu+1")
        expected = bits(*pullback(v))
        out[...] = np.nan
        assert bits(*pullback(v)) == expected


def test_threads():
    """Several threads replay one plan, each on arrays of its own."""
    sets = [given(20, seed)[0] for seed in range(4)]
    right = [pulled(la.gated_delta_rule, x) for x in sets]
    wrong: list[int] = []

    def work(n):
        for _ in range(20):
            if pulled(la.gated_delta_rule, sets[n]) != right[n]:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wrong == []


# plans


def test_clear_and_eviction(monkeypatch):
    x, _ = given(5)
    monkeypatch.setattr(replay, "MOST", 3)
    expected = {}
    for scale in (1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 4.0):
        found = pulled(la.gated_delta_rule, x | {"scale": scale})
        assert found == expected.setdefault(scale, found)
        assert 1 <= replay.count() <= 3
    replay.clear()
    assert replay.count() == 0
    assert pulled(la.gated_delta_rule, x | {"scale": 2.0}) == expected[2.0]


def test_switched_off(monkeypatch):
    x, _ = given(5)
    expected = pulled(la.gated_delta_rule, x)
    replay.clear()
    monkeypatch.setattr(replay, "ENABLED", False)
    for _ in range(2):
        assert pulled(la.gated_delta_rule, x) == expected
        la.gated_delta_rule(**x)
    assert replay.count() == 0


def test_a_plan_holds_no_array_of_the_caller():
    import gc
    import weakref

    class Traced(np.ndarray):
        pass

    base = np.zeros((B, 5, H, K), np.float32).view(Traced)
    x = {**given(5)[0], "v": np.ndarray(base.shape, base.dtype, base.data)}  # its memory belongs to `base`
    alive = weakref.ref(base)
    for options in ({}, {"backend": "chunks"}):
        _, pullback = la.vjp(la.gated_delta_rule, **x, **options)
        pullback(x["q"].copy())
        la.gated_delta_rule(**x, **options)
    assert replay.count() == 4
    del base, x, pullback
    gc.collect()
    assert alive() is None


def test_an_option_that_is_an_array_is_not_recorded(monkeypatch):
    """Its numbers are no part of the key."""
    x, _ = given(5)
    monkeypatch.setitem(la.gated_delta_rule.spec.options, "weights", None)
    for weights in (1.0, 2.0):
        _, pullback = la.vjp(la.gated_delta_rule, **x, weights=np.full(3, weights))
        pullback(x["v"])
        la.gated_delta_rule(**x, weights=np.full(3, weights))
    assert vjp_plans() == []
    assert [*replay.by_key.values()] == [replay.computed_in_full]
