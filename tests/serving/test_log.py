"""StateLog: drafts, trees and tokens taken back leave the bits of a decode that never had them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest

import linattn_np as la
from linattn_np.serving import log_loops
from linattn_np.serving.log import unsupported_reason
from linattn_np.testing import relative_error
from tests import cases
from tests.cases import draw, tokens


def has_log(case):
    options = {**case.spec.options, **case.options}
    return unsupported_reason(case.spec, options) is None and case.causal and "gv" not in case.given


CASES = [case for case in cases.CASES if has_log(case)]
PLAIN = [case for case in cases.PLAIN if has_log(case)]
TREE = np.array([-1, 0, 0, 1, -1, 3, 4])


def log_of(case, arrays, state, length=4, dtype=None):
    pool = np.array(state, dtype or state.dtype)
    return la.StateLog(case.fn, pool, length=length, **case.options, **case.named)


def given(case, arrays):
    return {n: x for n, x in arrays.items() if n in case.given}


def cut(case, arrays, at):
    """The tokens with these numbers."""
    lead = {n: x.ndim - len(case.given[n].split()) for n, x in given(case, arrays).items()}
    return {n: np.take(x, at, axis=lead[n]) if case.on_tokens(n) else x for n, x in given(case, arrays).items()}


def row(case, arrays, n):
    """A batch of the row n alone."""
    return {name: x[n : n + 1] if case.on_tokens(name) else x for name, x in arrays.items()}


def drawn(case, T=11, dtype=np.float64, B=(2,), **sizes):
    arrays, state = draw(case, B=B, T=T, dtype=dtype, **sizes)
    return given(case, arrays), state


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_of_a_log_are_those_of_the_function(case):
    for sizes in ({}, {"H": 4, "Hq": 4, "Hk": 2}):
        arrays, state = drawn(case, **sizes)
        log = log_of(case, arrays, state)
        out = np.concatenate([log.step(**cut(case, arrays, at)) for at in ([0], [1, 2, 3, 4, 5], [], range(6, 11))], 1)
        whole, end = case.fn(**arrays, **case.options, **case.named, state=state, return_state=True)
        assert out.shape == whole.shape
        assert relative_error(out, whole) < 1e-12
        assert (log.position == 11).all()
        for position in (9, 11):
            part = case.fn(**tokens(case, arrays, 0, position), **case.options, **case.named, state=state,
                           return_state=True).state  # fmt: skip
            assert relative_error(log.state_at(position), part) < 1e-12
        log.flush()
        assert relative_error(log.state, end) < 1e-12
        assert (log.live == 0).all()


@pytest.mark.parametrize("sizes", [{"dtype": np.float64}, {"dtype": np.float32, "K": 33, "V": 20}], ids=str)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_tree_has_the_bits_of_a_decode_of_every_path(case, sizes):
    """The tree begins with two tokens in the log and does not reach the flush."""
    arrays, state = drawn(case, T=9, **sizes)
    log = log_of(case, arrays, state, length=16)
    log.step(**cut(case, arrays, [0, 1]))
    out = log.verify(**cut(case, arrays, range(2, 9)), parents=TREE)
    for node in range(len(TREE)):
        path = [node]
        while TREE[path[0]] >= 0:
            path.insert(0, TREE[path[0]])
        fresh = log_of(case, arrays, state, length=16)
        one = [fresh.step(**cut(case, arrays, [t]))[:, 0] for t in [0, 1, *(2 + np.array(path))]]
        assert np.array_equal(one[-1], out[:, node])
    log.accept(5)
    assert log.position.tolist() == [6, 6]
    again = log_of(case, arrays, state, length=16)
    again.step(**cut(case, arrays, [0, 1, 2, 3, 5, 7]))
    assert np.array_equal(log.state_at(), again.state_at())
    assert np.array_equal(log.step(**cut(case, arrays, [8])), again.step(**cut(case, arrays, [8])))


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_tokens_that_were_taken_back_leave_no_bit(case):
    arrays, state = drawn(case, T=11, dtype=np.float32)
    log, fresh = log_of(case, arrays, state), log_of(case, arrays, state)
    log.step(**cut(case, arrays, [0, 1, 9, 8]))
    log.rollback(2)
    log.verify(**cut(case, arrays, [7, 7]))
    log.accept(-1)
    out = [log.step(**cut(case, arrays, [2, 3])), log.step(**cut(case, arrays, range(4, 11)))]
    one = [fresh.step(**cut(case, arrays, [t])) for t in range(11)]
    assert np.array_equal(np.concatenate(out, 1), np.concatenate(one[2:], 1))
    assert np.array_equal(log.state, fresh.state)
    log.flush()
    assert np.array_equal(log.state, fresh.state_at())
    assert not np.array_equal(log.state, fresh.state)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_rows_of_a_pool_are_independent_of_each_other(case):
    """Rows with logs of different lengths, trees of their own, in any order; others are left as they are."""
    arrays, state = drawn(case, T=9, B=(5,), dtype=np.float32)
    log = log_of(case, arrays, state, length=6)
    log.step(**row(case, cut(case, arrays, [0, 1, 2]), 3), rows=[3])
    rows, parents = np.array([3, 0]), np.array([[-1, 0, 1, 0], [-1, -1, 1, 2]])
    both = {n: x[rows] if case.on_tokens(n) else x for n, x in cut(case, arrays, [3, 4, 5, 6]).items()}
    out = log.verify(**both, parents=parents, rows=rows)
    log.accept([2, 3])
    assert log.position.tolist() == [3, 0, 0, 6, 0]
    end = log.state_at(rows=rows)
    for n, start, path in ((3, [0, 1, 2], [0, 1, 2]), (0, [], [1, 2, 3])):
        alone = row(case, arrays, n)
        fresh = log_of(case, arrays, state[n : n + 1], length=6)
        fresh.step(**cut(case, alone, start))
        one = fresh.step(**cut(case, alone, [3 + t for t in path]))
        place = rows.tolist().index(n)
        assert np.array_equal(one[0], out[place, path])
        assert np.array_equal(fresh.state_at()[0], end[place])
    assert np.array_equal(log.state, state)
    log.flush([3])
    assert np.array_equal(log.state[[0, 1, 2, 4]], state[[0, 1, 2, 4]])
    assert np.array_equal(log.state[3], end[0])


@pytest.mark.parametrize("case", [c for c in PLAIN if c.fn in (la.gated_delta_rule, la.kda, la.rwkv6)], ids=str)
def test_random_calls_are_the_tokens_that_remain(case):
    """Against the function on the tokens that were accepted, over many flushes."""
    rng = np.random.default_rng(2)
    arrays, state = drawn(case, T=40, B=(3,))
    log = log_of(case, arrays, state, length=3)
    kept: list[list[int]] = [[], [], []]
    for _ in range(40):
        rows = rng.permutation(3)[: rng.integers(1, 4)]
        N = int(rng.integers(1, 6))
        drafts = rng.integers(0, 40, (len(rows), N))
        x = {n: np.stack([y[r, d] for r, d in zip(rows, drafts, strict=True)]) if case.on_tokens(n) else y
             for n, y in arrays.items()}  # fmt: skip
        kind = rng.integers(3)
        if kind == 0:
            out, paths = log.step(**x, rows=rows), [list(range(N))] * len(rows)
        elif kind == 1:
            parents = np.stack([[rng.integers(-1, n) if n else -1 for n in range(N)] for _ in rows])
            out, last = log.verify(**x, parents=parents, rows=rows), rng.integers(-1, N, len(rows))
            paths = []
            for one, node in zip(parents, last, strict=True):
                paths.append([])
                while node >= 0:
                    paths[-1].insert(0, int(node))
                    node = one[node]
            log.accept(last)
        else:
            count = rng.integers(0, log.live[rows] + 1)
            log.rollback(count, rows=rows)
            for r, n in zip(rows, count, strict=True):
                kept[r] = kept[r][: len(kept[r]) - n]
            continue
        for place, (r, path) in enumerate(zip(rows, paths, strict=True)):
            kept[r] += [int(drafts[place, n]) for n in path]
            if path:
                alone = cut(case, row(case, arrays, r), kept[r])
                whole = case.fn(**alone, **case.options, state=state[r : r + 1])
                assert relative_error(out[place, path], whole[0, -len(path) :]) < 1e-11
        assert log.position.tolist() == [len(t) for t in kept]
    for r, t in enumerate(kept):
        alone = cut(case, row(case, arrays, r), t)
        end = case.fn(**alone, **case.options, state=state[r : r + 1], return_state=True).state
        assert relative_error(log.state_at(rows=[r]), end) < 1e-11


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_tokens_between_two_flushes_are_one_launch(monkeypatch, case):
    """A flush is one more, and the nodes of an accepted path are one."""
    names, launch = [], log_loops.launch
    monkeypatch.setattr(log_loops, "launch", lambda f, *x: (names.append(f.__name__), launch(f, *x)))
    arrays, state = drawn(case, T=8, dtype=np.float32)
    log = log_of(case, arrays, state, length=6)
    pool = log.state
    log.step(**cut(case, arrays, range(8)))
    assert names == ["tokens", "fold", "tokens"]
    assert not np.array_equal(pool, state)  # where it lies
    log.verify(**cut(case, arrays, [0, 1, 2]))
    log.accept(2)
    assert names[3:] == ["tokens", "move"]


def test_hard_resets_in_a_tree_cut_off_what_came_before():
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, 1, 5, 2, 4))
    g, beta = np.full((1, 5, 2), -0.1), np.full((1, 5, 2), 0.5)
    g[:, 1:4] = -np.inf
    pool = np.full((1, 2, 4, 4), 3.0)
    log = la.StateLog(la.gated_delta_rule, pool)
    out = log.verify(q, k, v, g, beta, parents=[-1, 0, 0, 1, 3])
    alone = la.gated_delta_rule(*(x[:, 3:] for x in (q, k, v, g, beta)))
    assert np.allclose(out[:, 3:], alone, rtol=1e-12)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda log: pickle.loads(pickle.dumps(log))], ids=["copy", "pickle"])
@pytest.mark.parametrize("kind", [None, "int8"])
def test_a_copied_log_goes_on_by_itself(copied, kind):
    rng = np.random.default_rng(7)
    q, k, v = rng.standard_normal((3, 2, 9, 2, 16)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta = rng.uniform(0, 1, (2, 9, 2)).astype(np.float32)
    pool = np.zeros((2, 2, 16, 16), np.float32)
    log = la.StateLog(la.delta_rule, pool if kind is None else la.pack_state(pool, kind), length=4)

    def step(one, a, b):
        return one.step(*(x[:, a:b] for x in (q, k, v, beta)))

    step(log, 0, 3)
    other = copied(log)
    mine = step(log, 3, 9)
    assert np.array_equal(other.live, [3, 3])
    assert np.array_equal(step(other, 3, 9), mine)
    other.rollback(1)
    assert np.array_equal((log.position, other.position), [[9, 9], [8, 8]])


def test_a_new_sequence_in_a_row_begins_anew():
    rng = np.random.default_rng(6)
    x = rng.standard_normal((3, 2, 4, 2, 3)).astype(np.float32)
    log = la.StateLog(la.linear_attention, np.full((2, 2, 3, 3), np.nan, np.float32))
    log.step(*x[:, :1], rows=[1])
    log.reset([1])
    log.reset([0], np.ones((1, 2, 3, 3)))
    out = log.step(*x)
    assert relative_error(out[1:], la.linear_attention(*x[:, 1:])) < 1e-6
    state = np.ones((1, 2, 3, 3), np.float32)
    assert relative_error(out[:1], la.linear_attention(*x[:, :1], state=state)) < 1e-6


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_a_variant_without_such_a_step_is_refused(fn):
    """Every variant has a log, or is told why not."""
    pool = np.zeros((1, 2, 4, 4), np.float32)
    defaults = dict(fn.spec.options)
    if unsupported_reason(fn.spec, defaults) is None:
        assert la.StateLog(fn, pool).live.tolist() == [0]
    else:
        with pytest.raises(TypeError, match=rf"StateLog: fn is {fn.__name__}, "):
            la.StateLog(fn, pool)


def test_wrong_arguments_are_refused():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 2, 4, 2, 3))
    pool = np.zeros((2, 2, 3, 3))
    log = la.StateLog(la.linear_attention, pool)
    log.step(*x)
    for error, text, call in [
        (TypeError, "expected a NumPy or CuPy array, or a SmallState", lambda: la.StateLog(la.gla, [1.0])),
        (ValueError, r"expected a pool \(P, H, K, V\)", lambda: la.StateLog(la.gla, pool[0])),
        (TypeError, "state has dtype int64", lambda: la.StateLog(la.gla, pool.astype(int))),
        (ValueError, "read-only or strided", lambda: la.StateLog(la.gla, pool[..., ::2])),
        (ValueError, "length is 0", lambda: la.StateLog(la.gla, pool, length=0)),
        (ValueError, "return_state is given", lambda: la.StateLog(la.gla, pool, return_state=True)),
        (ValueError, "causal is False", lambda: la.StateLog(la.linear_attention, pool, causal=False)),
        (ValueError, r"has the batch \(2,\)", lambda: log.step(*x, rows=[0])),
        (ValueError, r"rows of a pool of 2, none twice", lambda: log.step(*x, rows=[0, 0])),
        (ValueError, r"rows of a pool of 2", lambda: log.step(*x, rows=[0, 2])),
        (ValueError, r"has states of shape \(2, 3, 2\)", lambda: log.step(*x[:2], x[2][..., :2])),
        (ValueError, "an earlier node", lambda: log.verify(*x, parents=[-1, 1, 0, 0])),
        (ValueError, "expected 4 whole numbers", lambda: log.verify(*x, parents=[-1, 0])),
        (ValueError, "no tree is verified", lambda: log.accept(0)),
        (ValueError, r"numbers from 0 to live = \[4, 4\]", lambda: log.rollback([1, 5])),
        (TypeError, "expected a whole number", lambda: log.rollback(1.5)),
        (ValueError, r"from \[0, 0\] to \[4, 4\]", lambda: log.state_at(5)),
        (ValueError, r"expected \(1, 2, 3, 3\)", lambda: log.reset([0], pool)),
        (TypeError, "state has dtype complex128, expected one of", lambda: log.reset(None, pool * 1j)),
    ]:
        with pytest.raises(error, match=text):
            call()
    log.verify(*x)
    with pytest.raises(ValueError, match="numbers from -1 to 3"):
        log.accept(4)
    with pytest.raises(ValueError, match="gla: gv is given"):
        la.StateLog(la.gla, pool).step(*x, -abs(x[0]), -abs(x[0]))
    assert (pool == 0).all()


def test_nothing_is_a_batch_too():
    """No rows, no tokens, and no queries."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 2, 4, 2, 3))
    log = la.StateLog(la.linear_attention, np.zeros((2, 2, 3, 3)))
    assert log.step(*x[:, :0], rows=[]).shape == log.verify(*x[:, :0], rows=[]).shape == (0, 4, 2, 3)
    log.accept(-1)
    assert log.verify(*x[:, :, :0]).shape == (2, 0, 2, 3)
    log.accept(-1)
    log.flush([])
    log.rollback(0)
    assert log.position.tolist() == [0, 0]
    assert log.step(None, *x[1:]) is None
    assert relative_error(log.state_at(), la.linear_attention(None, *x[1:], return_state=True).state) < 1e-12
    assert la.StateLog(la.linear_attention, np.zeros((0, 2, 3, 3))).state_at().shape == (0, 2, 3, 3)


def test_arrays_of_other_libraries_are_refused():
    torch = pytest.importorskip("torch")
    log = la.StateLog(la.linear_attention, np.zeros((1, 2, 3, 3)))
    with pytest.raises(TypeError, match="arrays of another library, expected NumPy arrays"):
        log.step(*torch.zeros((3, 1, 4, 2, 3)))


def test_calls_after_the_first_are_checked_and_hold_no_arrays():
    """Arrays of the last call's signature are not checked again; others are."""
    case = next(c for c in PLAIN if c.fn is la.gated_delta_rule)
    arrays, state = drawn(case, T=8, dtype=np.float32)
    log, fresh = log_of(case, arrays, state, length=3), log_of(case, arrays, state, length=3)
    for t in range(4):
        log.step(**cut(case, arrays, [t]))
    with pytest.raises(ValueError, match="beta has shape"):
        log.step(**cut(case, arrays, [4]) | {"beta": arrays["beta"][:, 4:6]})
    with pytest.raises(TypeError, match="gated_delta_rule"):
        log.step(**cut(case, arrays, [4]) | {"beta": None})
    strided = {n: np.asfortranarray(x) for n, x in cut(case, arrays, [4, 5]).items()}
    wide = {n: x.astype(np.float64) for n, x in cut(case, arrays, [6]).items()}
    last = cut(case, arrays, [7])
    held = [weakref.ref(x) for x in last.values()]
    out = [log.step(**strided), log.step(**wide), log.step(**last)]
    whole = fresh.step(**arrays)
    assert np.array_equal(np.concatenate(out, 1), whole[:, 4:])
    del last
    gc.collect()
    assert not any(x() is not None for x in held)
