"""Pullbacks: they rely on unchanged inputs; their results can be copied and overwritten."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.types import Erase
from tests.cases import CASES, covered, draw, one_per, parts, parts_like


def ones(result):
    """Cotangents (dout, dstate) of ones."""
    return np.ones_like(result.out), parts_like(result.state, [np.ones_like(S) for S in parts(result.state)])


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(parts(tuple(a)), parts(tuple(b)), strict=True))


@pytest.mark.parametrize(
    "copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"]
)
@pytest.mark.parametrize("fn", one_per(lambda spec: (spec.state.parts, spec.state.wide)), ids=lambda fn: fn.__name__)
def test_results_and_gradients_can_be_pickled_and_copied(fn, copied):
    case = next(c for c in CASES if c.fn is fn)
    arrays, state = draw(case, T=5)
    result, pullback = la.vjp(fn, **arrays, **case.options, state=state, return_state=True)
    grads = pullback(*ones(result))
    for x in (result, result.state, grads):
        other = copied(x)
        assert type(other) is type(x)
        assert repr(other) == repr(x)
        if isinstance(x, tuple):
            assert other._fields == x._fields
            assert same(other, x)
    assert copied(la.vjp(la.read, Q, S)[1](la.read(Q, S)))._fields == ("q", "state")


Q, S = np.ones((1, 2, 1, 3)), np.ones((1, 1, 3, 4))


def drawn(fn, **sizes):
    arrays = la.testing.sample(fn, np.random.default_rng(0), **{"B": (1,), "T": 6, "H": 2, "K": 8, "V": 4} | sizes)
    return {n: x for n, x in arrays.items() if n not in ("A_log", "dt_bias")}


CHANGED = one_per(lambda spec: None if spec.erase is Erase.FREE else (spec.erase, spec.change.from_core is None))


@pytest.mark.parametrize("size", [6, 2000])
@pytest.mark.parametrize("fn", CHANGED, ids=lambda fn: fn.__name__)
def test_an_input_changed_in_place_is_named(fn, size):
    for name in drawn(fn):
        arrays = drawn(fn, T=size)
        out, pullback = la.vjp(fn, **arrays)
        first = pullback(out)
        assert same(pullback(out), first)
        arrays[name] *= 2
        with pytest.raises(RuntimeError, match=f"^{fn.__name__}: {name} was changed in place after vjp, expected"):
            pullback(out)
        arrays[name] /= 2
        assert same(pullback(out), first)


def test_arrays_by_position_states_and_views_are_looked_at():
    x = drawn(la.kda, T=400)
    q, k, v, g, beta = x.values()
    state = np.ones((1, 2, 8, 4))
    _, pullback = la.vjp(la.kda, q, k, v, g, beta, state=state)
    state[0, 1, 7, 3] = 2
    with pytest.raises(RuntimeError, match="kda: state was changed"):
        pullback(v)
    transposed = np.ascontiguousarray(np.swapaxes(q, 1, 2))
    fused = np.zeros((1, 400, 5, 2, 8))
    for changed in (transposed, fused):
        given = transposed.swapaxes(1, 2) if changed is transposed else fused[:, :, 3]
        _, pullback = la.vjp(la.kda, given, k, v, g, beta)
        changed += 1
        with pytest.raises(RuntimeError, match="kda: q was changed"):
            pullback(v)
    sums = la.NormalisedState(np.ones((1, 2, 8, 4)), np.ones((1, 2, 8)))
    _, pullback = la.vjp(la.linear_attention, q, k, v, normalize=True, feature_map="elu+1", state=sums)
    sums.z[...] = 3
    with pytest.raises(RuntimeError, match=r"linear_attention: state\.z was changed"):
        pullback(v)


def test_one_number_of_a_small_array_is_seen():
    arrays = drawn(la.gated_delta_rule, T=64, K=32)
    out, pullback = la.vjp(la.gated_delta_rule, **arrays)
    arrays["k"][0, 33, 1, 17] += 1
    with pytest.raises(RuntimeError, match="gated_delta_rule: k was changed"):
        pullback(out)


def test_read_looks_at_its_inputs_too():
    q, state = Q.copy(), S.copy()
    out, pullback = la.vjp(la.read, q, state)
    state[...] = 0
    with pytest.raises(RuntimeError, match="read: state was changed"):
        pullback(out)


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_of_vjp_may_be_written_to(case, chunk_size):
    arrays, state = draw(case, T=20)
    how = {**arrays, **case.options, "state": state, "return_state": True, "chunk_size": chunk_size}
    result, pullback = la.vjp(case.fn, **how)
    cotangents = ones(result)
    expected = pullback(*cotangents)
    result, pullback = la.vjp(case.fn, **how)
    for x in parts(result):
        x[...] = np.nan if x.dtype.kind == "f" else -1
    assert same(pullback(*cotangents), expected)


@pytest.mark.parametrize("T", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_result_shares_memory_with_another(case, T):
    """Sums over one token, and the gradient of a state that goes through no tokens; the calls are replayed too."""
    arrays, state = draw(case, B=(1,), T=T)
    for how in covered(case, [{}, {"backend": "chunks"}, {"backend": "reference"}]):
        for _ in range(2):
            given = {**arrays, **case.options, "state": state, "return_state": True, **how}
            result, pullback = la.vjp(case.fn, **given)
            cotangents = ones(result)
            grads = parts(pullback(*cotangents))
            others = [y for y in (*arrays.values(), *parts(state)) if isinstance(y, np.ndarray)]
            for own, beside in ((parts(result), others), (grads, [*others, *parts(tuple(cotangents))])):
                for n, x in enumerate(own):
                    assert not any(np.shares_memory(x, y) for y in (*own[:n], *beside))
                    assert x.flags.writeable


def test_results_of_read_may_be_written_to():
    state = la.NormalisedState(S, 1 + S[..., 0])
    out, pullback = la.vjp(la.read, Q, state)
    expected = pullback(np.ones_like(out))
    out, pullback = la.vjp(la.read, Q, state)
    out[...] = np.nan
    assert same(pullback(np.ones_like(out)).state, expected.state)
