"""StateLog on CuPy arrays: the kernels of token/log.cu, emulated or on a GPU, against NumPy's loops, and their bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda.token import log as kernels
from linattn_np.matrix_state.types import Inputs
from linattn_np.testing import relative_error
from tests.cuda.emulation import device, emulated, public  # noqa: F401
from tests.serving.test_log import PLAIN, TREE, cut, drawn

ODD = {"dtype": np.float32, "K": 33, "V": 21, "H": 4, "Hq": 4, "Hk": 2}
KINDS = [c for c in PLAIN if c.fn in (la.linear_attention, la.gated_delta_rule, la.kda, la.rwkv6)]
SIZES = [(case, ODD) for case in PLAIN]
SIZES += [(case, {"dtype": np.float32, "K": 8, "V": 12}) for case in KINDS]
SIZES += [(case, {"dtype": np.float64, "K": 5, "V": 132}) for case in KINDS]  # two blocks of columns
WIDE = {"dtype": np.float32, "K": 160, "V": 4, "H": 1, "Hq": 1, "Hk": 1}
SIZES += [(case, WIDE) for case in KINDS if case.fn is la.kda]


@pytest.fixture(autouse=True)
def maps_are_of_the_device(public, monkeypatch):  # noqa: F811
    """Feature maps make plain arrays where they are emulated."""
    made = kernels.tokens_of
    if public.launched is not None:
        monkeypatch.setattr(kernels, "tokens_of", lambda x, *rest: made(
            Inputs(*(public.bring(y) if type(y) is np.ndarray else y for y in x)), *rest))  # fmt: skip


def there(public, arrays):  # noqa: F811
    return {n: public.bring(x) for n, x in arrays.items()}


def log_of(public, case, state, length=4, dtype=None):  # noqa: F811
    if state.shape[-2] > policy.WIDEST_CUDA:
        pytest.skip("its features are wider than the kernels support")
    pool = public.bring(np.asarray(state, dtype or state.dtype))
    return la.StateLog(case.fn, pool, length=length, **case.options, **there(public, case.named))


def loop_of(case, state, length=4):
    return la.StateLog(case.fn, np.array(state), length=length, **case.options, **case.named)


@pytest.mark.parametrize(("case", "sizes"), SIZES, ids=str)
def test_tokens_trees_and_flushes_are_those_of_numpy(public, case, sizes):  # noqa: F811
    """Every method in turn; outputs and states begin as NaN."""
    arrays, state = drawn(case, T=9, **sizes)
    log, loop = log_of(public, case, state), loop_of(case, state)
    most = 1e-12 if sizes["dtype"] is np.float64 else 2e-5

    def agree(x, y):
        assert relative_error(public.see(x), y) < most

    for at in ([0], [1, 2, 3], [4, 5]):
        tokens = cut(case, arrays, at)
        agree(log.step(**there(public, tokens)), loop.step(**tokens))
    tokens = cut(case, arrays, [0, 1, 2, 3, 6, 7, 8])
    agree(log.verify(**there(public, tokens), parents=TREE), loop.verify(**tokens, parents=TREE))
    for x in (log, loop):
        x.accept([5, 4])
        x.rollback([0, 1])
    assert log.position.tolist() == loop.position.tolist()
    assert log.live.tolist() == loop.live.tolist()
    agree(log.state_at(), loop.state_at())
    agree(log.state_at(5, rows=[1]), loop.state_at(5, rows=[1]))
    agree(log.state, loop.state)
    end = public.see(log.state_at())
    log.flush()
    assert np.array_equal(public.see(log.state), end)
    tokens = {n: x[1:] if case.on_tokens(n) else x for n, x in cut(case, arrays, [3]).items()}
    loop.flush()
    agree(log.step(**there(public, tokens), rows=[1]), loop.step(**tokens, rows=[1]))


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_tokens_that_were_taken_back_leave_no_bit(public, case):  # noqa: F811
    """Against a decode, one token a call, that never saw them, in a pool of other rows; trees too."""

    def same(one, other):
        """Equal bits; random features on a GPU are products of cuBLAS, whose bits depend on the number of tokens."""
        if public.launched is None and case.fn in (la.performer, la.rfa):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(one, other)

    arrays, state = drawn(case, T=9, **ODD)
    log, fresh = log_of(public, case, state, 6), log_of(public, case, state, 6)

    def part(at, rows=slice(None)):
        return there(public, {n: x[rows] if case.on_tokens(n) else x for n, x in cut(case, arrays, at).items()})

    log.step(**part([0, 1, 8, 7]))
    log.rollback(2)
    log.verify(**part([5, 5]))
    log.accept(-1)
    out = log.verify(**part([2, 3, 4, 5, 6, 7, 8]), parents=TREE)
    log.accept([3, 3])  # the nodes 0, 1, 3
    one = [public.see(fresh.step(**part([t]))) for t in (0, 1, 2, 3, 5)]
    same(np.concatenate(one[2:], 1), public.see(out)[:, [0, 1, 3]])
    same(public.see(log.state_at()), public.see(fresh.state_at()))
    both = [public.see(x.step(**part([6, 7, 8]))) for x in (log, fresh)]  # over a flush
    same(*both)
    same(public.see(log.state), public.see(fresh.state))
    alone = log_of(public, case, state[1:], 6)
    rows = [public.see(alone.step(**part([t], slice(1, 2))))[0] for t in (0, 1, 2, 3, 5)]
    same(np.stack(rows), np.stack([x[1] for x in one]))


@pytest.mark.parametrize(("fn", "kind"), [(la.linear_attention, "float32"), (la.kda, "float64"),
                                          (la.gated_delta_rule, "int8")])  # fmt: skip
def test_a_long_path_has_the_bits_of_single_tokens(public, fn, kind):  # noqa: F811
    """Of 32 tokens and more, in a tree with leaves."""
    case, many = next(c for c in PLAIN if c.fn is fn), 40
    dtype = np.float64 if kind == "float64" else np.float32
    arrays, state = drawn(case, T=many + 2, dtype=dtype, K=8, V=12, H=1, Hq=1, Hk=1)

    def new_log():
        S = la.pack_state(state, kind).mapped(public.bring) if kind == "int8" else public.bring(state.copy())
        return la.StateLog(case.fn, S, length=64, **case.options, **there(public, case.named))

    def token(t):
        return there(public, cut(case, arrays, [t]))

    log, fresh = new_log(), new_log()
    for t in (0, 1):
        log.step(**token(t))
        fresh.step(**token(t))
    nodes = np.arange(many)
    parents = np.where(nodes % 9 == 5, nodes - 3, nodes - 1)
    path = [many - 1]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    assert len(path) > 30
    out = public.see(log.verify(**there(public, cut(case, arrays, 2 + nodes)), parents=parents))
    alone = [public.see(fresh.step(**token(2 + node))) for node in path]
    np.testing.assert_array_equal(np.concatenate(alone, 1), out[:, path])


def test_chains_and_longer_paths_are_computed_token_by_token(public):  # noqa: F811
    case = next(c for c in PLAIN if c.fn is la.gated_delta_rule)
    arrays, state = drawn(case, T=kernels.LONGEST + 1, dtype=np.float32, K=8, V=12, H=1, Hq=1, Hk=1)
    log, loop = log_of(public, case, state), loop_of(case, state)
    long = kernels.LONGEST + 1
    for parents, entry in ((np.arange(3) - 1, "nodes"), (np.arange(long) - 1, "tokens"), (None, "tokens")):
        tokens = cut(case, arrays, range(3 if parents is None else len(parents)))
        out = log.verify(**there(public, tokens), parents=parents)
        assert public.launched is None or public.launched[-1][1] == entry
        assert relative_error(public.see(out), loop.verify(**tokens, parents=parents)) < 2e-5


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_states_and_tokens_in_sixteen_bits(public, stored):  # noqa: F811
    """Tokens are read and outputs written in their dtype, states are rounded at flushes alone."""
    dtype = np.dtype(getattr(ml_dtypes, stored, stored))
    case = next(c for c in PLAIN if c.fn is la.gated_delta_rule)
    arrays, state = drawn(case, T=6, dtype=np.float32, K=8, V=12)
    arrays = {n: x.astype(dtype) for n, x in arrays.items()}
    log, loop = (x(np.asarray(state, dtype)) for x in (lambda S: log_of(public, case, S), lambda S: loop_of(case, S)))
    before = public.see(log.state).copy()
    unit = float(ml_dtypes.finfo(dtype).eps)
    for t in range(4):
        tokens = cut(case, arrays, [t])
        out, expected = log.step(**there(public, tokens)), loop.step(**tokens)
        assert out.dtype == dtype
        assert relative_error(public.see(out).astype(np.float32), expected.astype(np.float32)) < unit
    assert np.array_equal(public.see(log.state), before)
    assert relative_error(public.see(log.state_at()), loop.state_at()) < 1e-5
    for x in (log, loop):
        x.flush()
    assert relative_error(public.see(log.state).astype(np.float32), loop.state.astype(np.float32)) < unit


def test_a_step_is_one_launch_that_leaves_the_states(public):  # noqa: F811
    """Cursors are not sent again where all rows go on alike; a fold is one more."""
    if public.launched is None:
        pytest.skip("launches are counted where they are emulated")
    case = next(c for c in PLAIN if c.fn is la.gated_delta_rule)
    arrays, state = drawn(case, T=5, dtype=np.float32, K=8, V=12)
    log = log_of(public, case, state, 3)
    public.launched.clear()
    for t in range(5):
        log.step(**there(public, cut(case, arrays, [t])))
        if t == 0:
            sent = log._launches["cursors"].there
    assert [x[1] for x in public.launched] == ["tokens"] * 3 + ["fold"] + ["tokens"] * 2
    assert log._launches["cursors"].there is sent


def test_reset_and_hard_resets(public):  # noqa: F811
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, 2, 5, 2, 4)).astype(np.float32)
    g, beta = np.full((2, 5, 2), -0.1, np.float32), np.full((2, 5, 2), 0.5, np.float32)
    g[:, 3] = -np.inf
    pool = np.full((2, 2, 4, 4), 3, np.float32)
    log = la.StateLog(la.gated_delta_rule, public.bring(pool), length=2)
    out = public.see(log.step(*map(public.bring, (q, k, v, g, beta))))
    assert relative_error(out, la.gated_delta_rule(q, k, v, g, beta, state=pool)) < 2e-5
    log.reset([1])
    log.reset([0], public.bring(pool[:1]))
    again = public.see(log.step(*map(public.bring, (q, k, v, g, beta))))
    assert np.array_equal(again[0], out[0])
    assert relative_error(again[1:], la.gated_delta_rule(*(x[1:] for x in (q, k, v, g, beta)))) < 2e-5


def test_nothing_and_strided_arrays(public):  # noqa: F811
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 2, 4, 2, 3)).astype(np.float32)
    log = la.StateLog(la.linear_attention, public.bring(np.zeros((2, 2, 3, 3), np.float32)))
    assert log.step(*(public.bring(y[:, :0]) for y in x)).shape == (2, 0, 2, 3)
    assert log.step(None, *map(public.bring, x[1:])) is None
    joint = public.bring(np.concatenate([x[0], x[1], x[2]], -1))
    log.reset()
    out = log.step(joint[..., :3], joint[..., 3:6], joint[..., 6:])
    assert relative_error(public.see(out), la.linear_attention(*x)) < 1e-6
    for error, text, call in [
        (TypeError, "expected CuPy arrays", lambda: log.step(*x)),
        (ValueError, "states of shape", lambda: log.step(*(public.bring(y[..., :2]) for y in x))),
        (TypeError, "up to 256", lambda: la.StateLog(la.gla, public.bring(np.zeros((1, 1, 300, 1), np.float32)))),
    ]:
        with pytest.raises(error, match=text):
            call()


def small_pools(public, case, state, kind, length=4):  # noqa: F811
    """Logs of one small pool on the device, and on NumPy."""
    small = la.pack_state(np.asarray(state, np.float32), kind)
    named = there(public, case.named)
    return (la.StateLog(case.fn, small.mapped(public.bring), length=length, **case.options, **named),
            la.StateLog(case.fn, small.mapped(np.copy), length=length, **case.options, **case.named))  # fmt: skip


SMALL = [(la.gated_delta_rule, "int8", {"K": 8, "V": 12}), (la.gated_delta_rule, "int16", {"K": 7, "V": 3}),
         (la.gated_delta_rule, "int12", {"K": 33, "V": 21}), (la.kda, "int8", {"K": 33, "V": 21}),
         (la.rwkv6, "int12", {"K": 8, "V": 12}), (la.linear_attention, "int16", {"K": 20, "V": 132})]  # fmt: skip
SMALL = [(next(c for c in KINDS if c.fn is fn), *how) for fn, *how in SMALL]


@pytest.mark.parametrize(("case", "kind", "sizes"), SMALL, ids=str)
def test_small_states_are_read_and_rounded_by_the_kernels(public, case, kind, sizes):  # noqa: F811
    """Every method in turn; a flush stores the codes of `state_at`, to the bit, and leaves other rows."""
    arrays, state = drawn(case, T=9, dtype=np.float32, H=4, Hq=4, Hk=2, **sizes)
    if state.shape[-2] > policy.WIDEST_CUDA:
        pytest.skip("its features are wider than the kernels support")
    state[0, 1, :, 0] = 0  # a channel without a scale
    log, loop = small_pools(public, case, state, kind)

    def agree(x, y):
        assert relative_error(public.see(x), y) < 2e-5

    before = log.state.mapped(lambda x: public.see(x).copy())
    for at in ([0], [1, 2]):
        tokens = cut(case, arrays, at)
        agree(log.step(**there(public, tokens)), loop.step(**tokens))
    assert all(np.array_equal(public.see(x), y) for x, y in zip(log.state.arrays, before.arrays, strict=True))
    agree(log.state_at(), loop.state_at())
    agree(log.state_at(1, rows=[1]), loop.state_at(1, rows=[1]))
    wanted = la.pack_state(public.see(log.state_at()), kind)
    log.flush([1])
    for own, new, old in zip(log.state.arrays, wanted.arrays, before.arrays, strict=True):
        assert np.array_equal(public.see(own)[1], new[1])
        assert np.array_equal(public.see(own)[0], old[0])
    for own, found in zip(loop.state.arrays, log.state.arrays, strict=True):
        own[1] = public.see(found)[1]
    loop.live[1], loop._start[1] = 0, 3
    tokens = cut(case, arrays, [0, 1, 2, 3, 6, 7, 8])
    agree(log.verify(**there(public, tokens), parents=TREE), loop.verify(**tokens, parents=TREE))
    log.reset([0], public.bring(state[:1]))
    again = la.pack_state(state[:1], kind)
    assert all(np.array_equal(public.see(x)[:1], y) for x, y in zip(log.state.arrays, again.arrays, strict=True))
    log.reset()
    assert not public.see(log.state_at()).any()


@pytest.mark.parametrize("kind", ["int8", "int12", "int16"])
def test_tokens_that_were_taken_back_leave_no_bit_in_small_states(public, kind):  # noqa: F811
    """Rollback and a tree against a decode, one token a call, that never saw them; over flushes."""
    case = next(c for c in PLAIN if c.fn is la.gated_delta_rule)
    arrays, state = drawn(case, T=9, **ODD)
    log, fresh = (small_pools(public, case, state, kind, 5)[0] for _ in range(2))

    def part(at):
        return there(public, cut(case, arrays, at))

    log.step(**part([0, 1, 8, 7]))
    log.rollback(2)
    out = public.see(log.verify(**part([2, 3, 4, 5, 6, 7, 8]), parents=TREE))
    log.accept(3)  # the nodes 0, 1, 3
    one = [public.see(fresh.step(**part([t]))) for t in (0, 1, 2, 3, 5)]
    np.testing.assert_array_equal(np.concatenate(one[2:], 1), out[:, [0, 1, 3]])
    both = [public.see(x.step(**part([6, 7, 8]))) for x in (log, fresh)]  # over a flush
    np.testing.assert_array_equal(*both)
    for x, y in zip(log.state.arrays, fresh.state.arrays, strict=True):
        np.testing.assert_array_equal(public.see(x), public.see(y))


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_small_states_that_are_not_finite_are_read_as_nan(public, number):  # noqa: F811
    """The value channel that has one, of its row and head alone; nothing waits for the kernel to say so."""
    rng = np.random.default_rng(8)
    q, k, v = rng.standard_normal((3, 2, 2, 2, 4)).astype(np.float32)
    v[1, 0, 1, 2] = number
    small = la.pack_state(np.ones((2, 2, 4, 4), np.float32), "int8").mapped(public.bring)
    log = la.StateLog(la.linear_attention, small)
    log.step(*map(public.bring, (q, k, v)))
    log.flush()
    found = np.isnan(public.see(la.unpack_state(log.state)))
    wanted = np.zeros((2, 2, 4, 4), bool)
    wanted[1, 1, :, 2] = True
    assert np.array_equal(found, wanted)
    out = public.see(log.step(*(public.bring(x[:, :1] * 0 + 1) for x in (q, k, q))))
    assert np.array_equal(np.isnan(out[:, 0]), wanted[:, :, 0])


@pytest.mark.parametrize("kind", ["int8", "int12", "int16"])
@pytest.mark.parametrize("V", [4, 7])
def test_states_are_packed_where_they_lie(public, kind, V):  # noqa: F811
    S = np.random.default_rng(2).standard_normal((2, 3, 4, V)).astype(np.float32)
    S[0, 0, :, 1] = 0
    small, wanted = la.pack_state(public.bring(S), kind), la.pack_state(S, kind)
    for x, y in zip(small.arrays, wanted.arrays, strict=True):
        assert type(x) is type(public.bring(S))
        assert np.array_equal(public.see(x), y)
    assert np.array_equal(public.see(la.unpack_state(small)), la.unpack_state(wanted))


@pytest.mark.parametrize("kind", ["int8", "int16"])
def test_a_flush_rounds_channels_of_every_size(public, kind):  # noqa: F811
    """As `pack_state` does, to the bit: small and large channels are divided by another rule.

    Of so many numbers some are halfway between two codes of int16 once their product with 2^15 - 1 is rounded.
    """
    rng = np.random.default_rng(4)
    q, k = rng.standard_normal((2, 2, 3, 2, 256)).astype(np.float32)
    v = rng.standard_normal((2, 3, 2, 8)).astype(np.float32)
    v *= np.array([1e-42, 1e-37, 1e-25, 1, 3e11, 1e25, 1e36, 0], np.float32)
    small = la.pack_state(np.zeros((2, 2, 256, 8), np.float32), kind).mapped(public.bring)
    log = la.StateLog(la.linear_attention, small)
    log.step(*map(public.bring, (q, k, v)))
    state = public.see(log.state_at())
    parts = (state / np.maximum(abs(state).max(-2, keepdims=True), np.float32(1e-45))).astype(np.float64)
    assert kind != "int16" or (np.rint(parts * 32767) != np.rint(np.float32(parts * 32767))).sum() > 3
    wanted = la.pack_state(state, kind)
    log.flush()
    for found, other in zip(log.state.arrays, wanted.arrays, strict=True):
        assert np.array_equal(public.see(found), other)
