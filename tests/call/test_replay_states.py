"""Calls after a remembered one whose state differs, or whose arrays share memory: to the bit what a first one gives."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.call.replay import plans as replay
from tests.call.replays import B, H, K, apart, check, every_form, frozen, given, numbers, of


@pytest.fixture(autouse=True)
def nothing_remembered():
    replay.clear()
    yield
    replay.clear()


# the state


SEVERAL = [fn for fn in la.VARIANTS if fn.spec.state.type_of(fn.spec.options) is not None]


@pytest.mark.parametrize("fn", SEVERAL, ids=lambda fn: fn.__name__)
def test_a_plain_tuple_is_a_state_of_several_arrays(fn):
    """In the first call and in later ones, as its named tuple is."""
    rng = np.random.default_rng(0)
    arrays, before = (la.testing.sampling.sample(fn, rng, T=T, H=2, K=4, V=3) for T in (5, 3))
    state = fn(**before, return_state=True).state
    expected = fn(**arrays, state=state)
    for _ in range(4):
        np.testing.assert_array_equal(fn(**arrays, state=tuple(state)), expected)


STATES = {
    "none": lambda S: None,
    "read-only": frozen,
    "float64": lambda S: S.astype(np.float64),
    "every second": lambda S: np.repeat(S, 2, axis=-1)[..., ::2],
    "bfloat16": lambda S: S.astype(ml_dtypes.bfloat16),
    "float16": lambda S: S.astype(np.float16),
    "transposed": lambda S: np.ascontiguousarray(S.swapaxes(1, 2)).swapaxes(1, 2),
    "columns first": lambda S: np.ascontiguousarray(S.swapaxes(2, 3)).swapaxes(2, 3),
    "one head": lambda S: S[:, :1],
    "one batch row": lambda S: S[:1],
    "fewer columns": lambda S: S[..., :-1],
    "integers": lambda S: np.ones(S.shape, int),
    "swapped bytes": lambda S: S.astype(">f4"),
    "a list": lambda S: S.tolist(),
    "a pair": lambda S: (S, S[..., 0]),
}


@every_form
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", STATES)
def test_another_kind_of_state(kind, overwrite, T):
    (x, S), (y, R) = given(T), given(T, 1)
    options = {"overwrite_state": overwrite, "return_state": True}
    other = STATES[kind](R)
    check(la.gated_delta_rule, of(x, state=S, **options), of(y, state=other, **options))
    good = kind in (
        "none",
        "read-only",
        "every second",
        "bfloat16",
        "float16",
        "transposed",
        "columns first",
        "float64",
    )
    if good and not (overwrite and kind in ("none", "read-only", "float64")):
        check(la.gated_delta_rule, of(x, state=STATES[kind](S), **options), of(y, state=R, **options))
        check(la.gated_delta_rule, of(x, state=STATES[kind](S), **options), of(y, state=other, **options))


@every_form
@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True)])
def test_a_state_is_overwritten_only_on_request(first, then, T):
    (x, S), (y, R) = given(T), given(T, 1)
    check(la.gated_delta_rule, of(x, state=S, overwrite_state=first), of(y, state=R, overwrite_state=then))
    check(la.gated_delta_rule, of(x, state=S, overwrite_state=True), of(y, state=R, overwrite_state=1))


def test_a_state_whose_dtype_alone_differs():
    (x, S), (y, R) = given(5), given(5, 1)
    wide = np.zeros((*S.shape[:-1], 2 * K), np.float32)
    wide[..., ::2] = S
    first, then = wide[..., ::2], R.astype(np.float64)
    assert first.strides == then.strides
    check(la.gated_delta_rule, of(x, state=first), of(y, state=then))
    check(la.gated_delta_rule, of(x, state=first), of(y, state=then, overwrite_state=True))


# memory that is shared


def halves(x, names):
    """Arrays of one shape, each half of what the next one begins in the middle of."""
    first = x[names[0]]
    wide = numbers((*first.shape[:-1], first.shape[-1] * (len(names) + 1) // 2), 11)
    step = first.shape[-1] // 2
    return {n: wide[..., step * i : step * i + first.shape[-1]] for i, n in enumerate(names)}


SAME = [("q", "k"), ("k", "v"), ("q", "v"), ("q", "k", "v"), ("g", "beta")]


@every_form
@pytest.mark.parametrize("names", SAME, ids="-".join)
def test_one_array_given_twice(names, T):
    """First, then; beta <= 0 is as good as another for the bits."""
    (x, S), (y, R) = given(T), given(T, 1)
    one = x | dict.fromkeys(names, x[names[0]])
    keywords = {"state": S, "return_state": True}
    check(la.gated_delta_rule, of(one, **keywords), of(y, state=R, return_state=True), count=0)
    check(la.gated_delta_rule, of(y, state=R, return_state=True), of(one, **keywords))


@every_form
@pytest.mark.parametrize("names", SAME[:4], ids="-".join)
def test_views_that_overlap(names, T):
    (x, S), (y, R) = given(T), given(T, 1)
    x, z = x | halves(x, names), {n: w.copy() for n, w in y.items()}
    for n in names:  # with the strides of the views
        wide = np.zeros((*z[n].shape[:-1], x[n].strides[-2] // 4), np.float32)
        wide[..., :K] = z[n]
        z[n] = wide[..., :K]
    assert all(x[n].strides == z[n].strides for n in x)
    check(la.gated_delta_rule, of(x, state=S, return_state=True), of(z, state=R, return_state=True))
    check(la.gated_delta_rule, of(z, state=R, return_state=True), of(x, state=S, return_state=True))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("T", [5, 40])
def test_a_state_that_is_an_input(name, overwrite, T):
    """As many tokens as heads as channels; and with a state of its own."""
    H = T
    x, y = ({n: numbers((B, T, H, T), seed + n) for n in range(3)} for seed in (0, 5))
    x, y = ({n: z[i] for i, n in enumerate(("q", "k", "v"))} for z in (x, y))
    for z in (x, y):
        z["k"] /= np.linalg.norm(z["k"], axis=-1, keepdims=True)
    S, options = numbers((B, T, T, T), 9), {"overwrite_state": overwrite, "return_state": True}
    apart = ([*x.values()], {"state": S, **options})
    same = ([*y.values()], {"state": y[name], **options})
    expected = check(la.linear_attention, apart, same)
    check(la.linear_attention, same, apart, count=0)
    out = la.linear_attention(*y.values(), state=y[name].copy(), return_state=True)
    assert expected[1][0][2] == out.out.tobytes()
    assert expected[1][1][2] == out.state.tobytes()


@every_form
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("edge", ["last of it", "first of it", "behind it", "before it"])
def test_a_state_at_the_edge_of_an_input(name, edge, T):
    """One number shared at either end, and none: after a call whose state lay elsewhere, and before it."""
    (x, S), (y, R) = given(T), given(T, 1)
    size, states = y[name].size, R.size
    begin = {"last of it": size - 1, "first of it": 1 - states, "behind it": size, "before it": -states}[edge]
    buffer = np.zeros(size + 2 * states, np.float32)
    written, state = buffer[states : states + size], buffer[states + begin :][:states]
    state[:] = R.ravel()
    written[:] = y[name].ravel()
    y = y | {name: written.reshape(y[name].shape)}
    options = {"overwrite_state": True, "return_state": True}
    other = of(y, state=state.reshape(R.shape), **options)
    expected = check(la.gated_delta_rule, of(x, state=S, **options), other)
    check(la.gated_delta_rule, other, of(x, state=S, **options))
    right = la.gated_delta_rule(*other[0], state=state.reshape(R.shape).copy(), return_state=True)
    assert expected[1][0][2] == right.out.tobytes()
    assert expected[1][1][2] == right.state.tobytes()


# states of parts


def steps_of_mlstm(seed):
    x = {n: numbers((B, 1, H, K), seed + i) for i, n in enumerate("qkv")}
    x |= {n: numbers((B, 1, H), seed + i + 3, -3, 3) for i, n in enumerate("if")}
    return x, (numbers((B, H, K, K), seed + 5), numbers((B, H, K), seed + 6), numbers((B, H), seed + 7))


@pytest.mark.parametrize(
    "then",
    [
        {"soft_cap": 0.5},
        {"forget_gate": "exp"},
        {"scale": 3.0},
        {"overwrite_state": True},
        {"return_state": True},
        {"chunk_size": 16},
        {"backend": "chunks"},
        {"state": None},
        {"forget_gate": "relu"},
    ],
    ids=str,
)
def test_another_option_of_a_step_with_a_state_of_parts(then):
    x, state = steps_of_mlstm(0)
    y, other = steps_of_mlstm(20)
    check(la.mlstm, ([], {**x, "state": state}), ([], {**y, "state": other} | then))
    check(la.mlstm, ([], {**x, "state": state, "forget_gate": "exp"}), ([], {**y, "state": other} | then))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("change", ["float64", "bfloat16", "every second", "read-only", "one batch row", "transposed"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_another_part_of_a_state(part, change, overwrite):
    (x, state), (y, other) = steps_of_mlstm(0), steps_of_mlstm(20)
    if change == "transposed":
        other = tuple(np.asfortranarray(S) if n == part else S for n, S in enumerate(other))
        other = tuple(S.copy(order="K") for S in other)
        if part != 0:
            return
        buffer = np.zeros((H, B, K, K), np.float32)
        buffer[...] = other[0].swapaxes(0, 1)
        other = (buffer.swapaxes(0, 1), *other[1:])
    else:
        other = tuple(STATES[change](S) if n == part else S for n, S in enumerate(other))
    options = {"overwrite_state": overwrite, "return_state": True}
    check(la.mlstm, ([], {**x, "state": state, **options}), ([], {**y, "state": other, **options}))


def test_parts_of_a_state_in_one_memory():
    """S and n of one array (..., K, V + 1), and apart."""
    options = {"overwrite_state": True, "return_state": True}
    (x, state), (y, (S, n, m)) = steps_of_mlstm(0), steps_of_mlstm(20)
    joined = np.concatenate([S, n[..., None]], axis=-1)
    whole = np.zeros((*S.shape[:-1], K + 1), np.float32)
    whole[..., :K] = state[0]
    first = (whole[..., :K], apart(np.repeat(state[1], 1, axis=-1), K + 1), state[2])
    then = (joined[..., :K], joined[..., K], m)
    assert first[1].strides == then[1].strides
    expected = check(la.mlstm, ([], {**x, "state": first, **options}), ([], {**y, "state": then, **options}))
    right = la.mlstm(**y, state=(S.copy(), n.copy(), m.copy()), return_state=True)
    assert expected[1][0][2] == right.out.tobytes()
    assert expected[1][1][2] == right.state.S.tobytes()
    assert expected[1][2][2] == right.state.n.tobytes()


def test_parts_of_a_state_that_overlap():
    """n is a column of S: an error, also after a step of the same shapes and strides."""
    options = {"overwrite_state": True, "return_state": True}
    (x, state), (y, (S, _, m)) = steps_of_mlstm(0), steps_of_mlstm(20)
    first = (state[0], apart(state[1], K), state[2])
    then = (S, S[..., 0], m)
    assert first[1].strides == then[1].strides
    expected = check(la.mlstm, ([], {**x, "state": first, **options}), ([], {**y, "state": then, **options}))
    assert expected[0] is ValueError
    assert "state.S and state.n share memory" in expected[1]
