"""GPU calls after one that was kept and differs in one thing, on arrays that look like CuPy's: what a first call gives.

The kernel of a few tokens is its twin (step_twin.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import device as device_plans
from linattn_np.call.replay import plans as replay
from linattn_np.matrix_state.cuda.token import calls as cuda_step
from linattn_np.ops.cuda import complement
from linattn_np.runtime.cuda import launch
from tests.cases import RECURRENT, has_plain_state, one_per, parts, passes_through
from tests.matrix_state.cuda.step_twin import Stub, recorded_plans, stub
from tests.matrix_state.cuda.token import host as step_calls

launched, public = step_calls.launched, step_calls.public
H, K = 4, 8
SPEC = la.gated_delta_rule.spec


def drawn(seed, T=2, K=K, V=K, H=H):
    """Arrays of gated_delta_rule on the device, and a state."""
    x = {n: stub(y) for n, y in step_calls.arrays_of(la.gated_delta_rule, T, H, H, K, V, seed).items()}
    return x, stub(np.random.default_rng(seed + 100).standard_normal((2, H, K, V)).astype(np.float32))


def misaligned(x, by=4):
    """The same numbers `by` bytes behind a multiple of 16."""
    buffer = stub(np.zeros(x.nbytes + 16, np.uint8))
    y = buffer[by : by + x.nbytes].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


def copied(x):
    """The same numbers, strides and alignment elsewhere."""
    steps = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)]
    low, high = (sum(sign * max(sign * n, 0) for n in steps) for sign in (-1, 1))
    by = (x.data.ptr + low) % 16
    buffer = stub(np.zeros(by + high - low + x.itemsize, np.uint8))
    y = np.ndarray(x.shape, x.dtype, np.asarray(buffer), by - low, x.strides).view(Stub)
    y[...] = x
    return y


def result(fn, keywords):
    """All that a call gives or changes, as bytes with dtype, shape and strides; or its error. It overwrites a copy."""
    state = keywords.get("state")
    own = keywords | {"state": copied(state)} if keywords.get("overwrite_state") and type(state) is Stub else keywords
    try:
        found = fn(**own)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    kept = own.get("state")
    identities = [isinstance(found, tuple), *(y is kept for y in parts(found)[1:])]
    each = parts(found) + ([] if kept is None else [kept])
    return identities, [(y.shape, y.strides, y.dtype, y.tobytes()) for y in each]


def check(fn, kept, other, count=1, launched=()):
    """other, after calls like `kept`, is what it is first, and `launched` gets the same kernels."""
    replay.clear()
    before = len(launched)
    expected = result(fn, other)
    first = launched[before:]
    replay.clear()
    for _ in range(2):
        result(fn, kept)
    assert len(recorded_plans()) == count
    for _ in range(2):
        before = len(launched)
        assert result(fn, other) == expected
        assert launched[before:] == first
    return expected


def by_position(**keywords):
    """The same call with its arrays by position."""
    arrays = [keywords.pop(n) for n in ("q", "k", "v", "g", "beta")]
    return la.gated_delta_rule(*arrays, **keywords)


OPTIONS = [  # of a call that is kept, and of one that differs
    ({"scale": 2.0}, {"scale": 3.0}),
    ({"scale": 2.0}, {}),
    ({"scale": 1}, {"scale": True}),
    ({"chunk_size": 1}, {"chunk_size": True}),
    ({"scale": 1}, {"chunk_size": 1}),
    ({"num_threads": 2}, {"scale": 2}),
    ({}, {"num_threads": 0}),
    ({}, {"return_state": True}),
    ({"return_state": True}, {}),
    ({"return_state": True}, {"return_state": 1}),
    ({"return_state": True}, {"overwrite_state": True}),
    ({"overwrite_state": True}, {"return_state": True}),
    ({"overwrite_state": True}, {"overwrite_state": 1}),
    ({"overwrite_state": True}, {"overwrite_state": True, "return_state": True}),
    ({"overwrite_state": True}, {"overwrite_state": True, "state": None}),
    ({}, {"state": None}),
    ({"state": None}, {}),
    ({"return_state": True}, {"return_state": True, "state": None}),
    ({}, {"backend": "reference"}),
    ({}, {"backend": "nowhere"}),
    ({}, {"precision": "float16"}),
    ({}, {"layout": "sideways"}),
    ({}, {"qk_l2norm": 1}),
    ({}, {"cu_seqlens": [0, 2]}),
    ({}, {"nonsense": None}),
    ({}, {"q": None}),
    ({"q": None}, {}),
]


@pytest.mark.parametrize(("first", "then"), OPTIONS, ids=str)
def test_another_option(public, first, then):
    (x, S), (y, R) = drawn(0), drawn(1)
    check(la.gated_delta_rule, x | {"state": S} | first, y | {"state": R} | then)


@pytest.mark.parametrize("first", ["time_first", "heads_first"])
def test_the_other_layout(public, first):
    """As many tokens as heads: shapes and strides tell nothing."""
    x, y = drawn(0, T=H)[0], drawn(1, T=H)[0]
    other = {"time_first": "heads_first", "heads_first": "time_first"}[first]
    assert check(la.gated_delta_rule, x | {"layout": first}, y | {"layout": other}) != result(
        la.gated_delta_rule, y | {"layout": first}
    )


def test_another_function(public):
    x = drawn(0)[0]
    for _ in range(2):
        la.delta_rule(x["q"], x["k"], x["v"], x["beta"])
    assert len(recorded_plans()) == 1
    out = la.simple_gla(x["q"], x["k"], x["v"], x["g"])
    right = la.simple_gla(*(np.array(x[n]) for n in ("q", "k", "v", "g")))
    assert np.abs(out - right).max() < 1e-5


def test_names_of_arrays_in_another_order(public):
    x = {n: y for n, y in drawn(0)[0].items() if n in "qkv"}
    g, gv = (stub(-np.random.default_rng(n).uniform(0, 1, (2, 2, H, K)).astype(np.float32)) for n in (1, 2))
    check(la.gla, x | {"g": g, "gv": gv}, x | {"gv": g, "g": gv})
    check(la.gla, x | {"g": g, "gv": gv}, x | {"g": g})


def test_positions_and_names(public):
    """An array that is left out by position is not the next one."""
    x = drawn(0)[0]
    g = stub(-np.random.default_rng(1).uniform(0, 1, (2, 2, H, K)).astype(np.float32))
    for _ in range(2):
        la.gla(x["q"], x["k"], x["v"], g, None)
    assert len(recorded_plans()) == 1
    with pytest.raises(TypeError, match="g is missing"):
        la.gla(x["q"], x["k"], x["v"], None, g)


# arrays


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: stub(np.asarray(x[:1])),
        lambda x: stub(np.asarray(x.astype(np.float16))),
        lambda x: stub(np.asarray(x.astype(ml_dtypes.bfloat16))),
        lambda x: stub(np.asarray(x.astype(np.float64))),
        lambda x: stub(np.asarray(x).swapaxes(1, 2).copy()).swapaxes(1, 2),
        misaligned,
        lambda x: misaligned(x, 8),
        lambda x: stub(np.asarray(x)[:, ::-1])[:, ::-1],
        lambda x: None,
    ],
    ids=["shape", "float16", "bfloat16", "float64", "strides", "by 4", "by 8", "backwards", "none"],
)
def test_another_array(public, name, change):
    (x, S), (y, R) = drawn(0), drawn(1)
    x, y = x | {"state": S}, y | {"state": R}
    for more in ({"return_state": True}, {"overwrite_state": True}):
        for fn in (la.gated_delta_rule, by_position):
            check(fn, x | more, y | {name: change(y[name])} | more, launched=public)


@pytest.mark.parametrize("name", ["q", "v", "g", "state"])
def test_an_alignment_of_its_own(public, name):
    """Kept of misaligned arrays, then of aligned ones: by 4 bytes and by 8 are two calls."""
    (x, S), (y, R) = drawn(0), drawn(1)
    x, y = x | {"state": S}, y | {"state": R}
    first = x | {name: misaligned(x[name])}
    for then in (y, y | {name: misaligned(y[name], 8)}, y | {n: misaligned(y[n]) for n in ("k", "v")}):
        for fn in (la.gated_delta_rule, by_position):
            check(fn, first, then, launched=public)
            check(fn, then, first, launched=public)
    kinds = [dict(n) for n, *_ in public]
    assert {d["LA_WIDE"] for d in kinds} == {0, 1}  # which the kernels were launched for


@pytest.mark.parametrize("name", ["q", "v", "state"])
def test_two_arrays_that_are_not_dense(public, name):
    """Rows lie twice and three times as far apart as they are long."""
    (x, S), (y, R) = drawn(0), drawn(1)
    x, y = x | {"state": S}, y | {"state": R}
    for z, times in ((x, 2), (y, 3)):
        wide = stub(np.zeros((*z[name].shape[:-1], times * K), np.float32))
        wide[..., :K] = z[name]
        z[name] = wide[..., :K]
    for fn in (la.gated_delta_rule, by_position):
        check(fn, x, y, launched=public)
        check(fn, y, x, launched=public)


def test_the_same_strides_and_another_dtype(public):
    (x, S), (y, R) = drawn(0), drawn(1)
    wide = stub(np.zeros((*S.shape[:-1], 2 * K), ml_dtypes.bfloat16))
    wide[..., ::2] = S
    assert wide[..., ::2].strides == R.strides
    check(la.gated_delta_rule, x | {"state": S}, y | {"state": wide[..., ::2]})


def test_another_device(public, monkeypatch):
    """Arrays of another device than the current one are never launched on from memory, and each device has its own."""
    x, S = drawn(0)
    for _ in range(2):
        la.gated_delta_rule(**x, state=S)
    assert len(recorded_plans()) == 1
    first = replay.signature_of(SPEC, (), x | {"state": S})
    assert replay.by_key.get(first[0]) is not None
    monkeypatch.setattr(launch, "device_function", lambda: lambda: 1)
    monkeypatch.setitem(replay.makers, Stub, device_plans.signature_maker(Stub))
    assert replay.signature_of(SPEC, (), x | {"state": S}) is None
    assert replay.signature_of(SPEC, tuple(x.values()), {}) is None
    monkeypatch.setattr(Stub, "data", property(lambda y: SimpleNamespace(ptr=y.ctypes.data, device_id=1)))
    other = replay.signature_of(SPEC, (), x | {"state": S})
    assert replay.by_key.get(other[0]) is None
    assert other[0][1] == 1
    assert other[0] != first[0]


def test_rows_of_a_pool(public):
    (x, _), (y, _) = drawn(0), drawn(1)
    pool = stub(np.random.default_rng(5).standard_normal((6, H, K, K)).astype(np.float32))
    rows = {kind: stub(np.array([3, 1], kind)) for kind in (np.int32, np.int64)}
    options = {"state": pool, "overwrite_state": True}
    first, then = (z | options | {"state_rows": rows[kind]} for z, kind in ((x, np.int32), (y, np.int64)))
    a, b = check(la.gated_delta_rule, first, then), check(la.gated_delta_rule, then, first)
    assert a != b
    check(la.gated_delta_rule, first, y | options | {"state_rows": stub(np.array([0, 5], np.int32))})
    check(la.gated_delta_rule, first, first | {"state_rows": [3, 1]})
    check(la.gated_delta_rule, first, first | {"state_rows": [3, 3]})
    check(la.gated_delta_rule, first, first | {"state_rows": stub(np.array([3], np.int32))})
    check(la.gated_delta_rule, first, y | {"state": pool[:2].view(Stub), "overwrite_state": True})


# one array for two names


SAME = [("q", "k"), ("q", "v"), ("k", "v"), ("q", "k", "v"), ("g", "beta")]


@pytest.mark.parametrize("names", SAME, ids="-".join)
def test_one_array_given_twice(public, names):
    """First, then."""
    (x, S), (y, R) = drawn(0), drawn(1)
    one = x | {"state": S} | dict.fromkeys(names, x[names[0]])
    check(la.gated_delta_rule, one, y | {"state": R}, count=0)
    check(la.gated_delta_rule, y | {"state": R}, one)


@pytest.mark.parametrize("names", [("q", "k"), ("k", "v")], ids="-".join)
def test_views_that_overlap(public, names):
    (x, S), (y, R) = drawn(0), drawn(1)

    def views(z):
        wide = stub(np.concatenate([np.asarray(z[n]) for n in names], axis=-1))
        return {n: wide[..., 4 * i : 4 * i + K] for i, n in enumerate(names)}

    one, two = x | {"state": S} | views(x), y | {"state": R} | views(y)
    apart = y | {"state": R} | {n: views(y)[n] for n in names}
    check(la.gated_delta_rule, one, two)
    check(la.gated_delta_rule, one, apart)
    check(la.gated_delta_rule, apart, one)


def test_a_state_that_is_an_input(public):
    """Read, not written: as many tokens as heads as channels."""
    x, y = drawn(0, T=4, K=4)[0], drawn(1, T=4, K=4)[0]
    S = drawn(0, T=4, K=4)[1]
    check(la.gated_delta_rule, x | {"state": S}, y | {"state": y["v"]})
    check(la.gated_delta_rule, y | {"state": y["v"]}, x | {"state": S}, count=0)


def test_a_state_that_is_overwritten_where_an_input_lies(public):
    """An error, also of a call that was there before with arrays apart; nothing is written."""
    x, S = drawn(0)
    for _ in range(2):
        la.gated_delta_rule(**x, state=S, overwrite_state=True)
    buffer = stub(np.zeros(x["v"].nbytes + S.nbytes, np.uint8))
    for at in (0, 64, S.nbytes - 64):
        state = buffer[: S.nbytes].view(np.float32).reshape(S.shape)
        v = buffer[at : at + x["v"].nbytes].view(np.float32).reshape(x["v"].shape)
        before = np.array(buffer)
        with pytest.raises(ValueError, match="state and v share memory"):
            la.gated_delta_rule(**x | {"v": v}, state=state, overwrite_state=True)
        assert np.array_equal(buffer, before)
    v = buffer[S.nbytes : S.nbytes + x["v"].nbytes].view(np.float32).reshape(x["v"].shape)
    v[...] = x["v"]
    la.gated_delta_rule(**x | {"v": v}, state=state, overwrite_state=True)  # one behind the other


CHANGED = one_per(lambda spec: spec.erase, [fn for fn in RECURRENT if has_plain_state(fn.spec) and
                                            not passes_through(fn)])  # fmt: skip


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("how", ["out", "in place"])
@pytest.mark.parametrize("fn", CHANGED, ids=lambda fn: fn.__name__)
def test_launches_after_a_change_of_variables_by_array_calls(public, monkeypatch, fn, how, T):
    """Array calls run again; the launches of the core are replayed on what they give."""
    monkeypatch.setattr(complement, "takes", lambda *arrays: False)
    more = {"overwrite_state": how == "in place", "return_state": True}

    def call(seed, change=lambda x: x):
        x = {n: stub(y) for n, y in step_calls.arrays_of(fn, T, H, H, K, K, seed).items()}
        S = stub(np.random.default_rng(seed + 100).standard_normal((2, H, K, K)).astype(np.float32))
        return result(fn, x | {"v": change(x["v"]), "state": S} | more)

    expected, other = call(1), call(1, misaligned)
    replay.clear()
    for _ in range(2):
        call(0)
    before = len(public)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_step, "forward", None)
        assert call(1) == expected
    assert len(public) == before + 1
    assert call(1, misaligned) == other
    assert call(1) == expected


def test_a_state_inside_an_input_is_an_error_after_a_replayed_call(public):
    x = {n: stub(y) for n, y in step_calls.arrays_of(la.hgrn2, 1, H, H, K, K, 0).items()}
    S = stub(np.zeros((2, H, K, K), np.float32))
    for _ in range(3):
        la.hgrn2(**x, state=S, overwrite_state=True)
    strides = tuple(4 * n for n in (H * K * K, H * K, K, 1))  # those of v
    x["v"] = np.lib.stride_tricks.as_strided(S, (2, 1, H, K), strides, subok=True)
    with pytest.raises(ValueError, match="state and v share memory"):
        la.hgrn2(**x, state=S, overwrite_state=True)
