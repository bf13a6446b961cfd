"""States at positions from one pass, in every backend for NumPy arrays: values, gradients, bits, replay."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.matrix_state import policy
from linattn_np.runtime.shapes import is_of_pairs
from linattn_np.testing import relative_error
from tests.cases import (
    PLAIN,
    Case,
    cell,
    cotangents,
    draw,
    of_matrices,
    one_per,
    parts,
    parts_like,
    tokens,
    with_arrays,
)

T, POSITIONS = 70, [0, 1, 16, 33, 34, 64, 70]


def case_of(fn):
    return next(c for c in PLAIN if c.fn is fn)


def readout(spec):
    """The kind of a state that the core has in another form; None if it has not."""
    return (spec.readout, spec.state.parts, spec.state.unpack_at) if spec.state.pack is not None else None


SCALAR, VECTOR = (with_arrays("q k v g", decay=kind) for kind in ("SCALAR", "VECTOR"))
DELTA, VECTOR_DELTA = (with_arrays("q k v g beta", decay=kind) for kind in ("SCALAR", "VECTOR"))
SCALAR, VECTOR, DELTA, VECTOR_DELTA = map(case_of, (SCALAR, VECTOR, DELTA, VECTOR_DELTA))
KINDS = [c for c in of_matrices(PLAIN) if c.fn in (*one_per(cell), *one_per(readout))]
LONG = [c for c in PLAIN if c.fn in one_per(lambda s: cell(s) and (s.decay, s.erase, s.query_reads, "u" in s.arrays))]
OF_TOKENS = [
    c
    for c in of_matrices(PLAIN)
    if c.fn
    in one_per(
        lambda s: (
            (s.readout, s.state.unpack_at) if s.state.unpack_vjp is not None or s.readout.name == "SOLVED" else None
        )
    )
]
HOWS = [{"backend": "reference"}, {"backend": "chunks", "chunk_size": 16}, {"backend": "numba", "chunk_size": 16},
        {"backend": "chunks", "chunk_size": 16, "chunk_states": "scan"}, {"chunk_size": "parallel"},
        {"backend": "numba", "chunk_size": 1}]  # fmt: skip
every_kind = pytest.mark.parametrize("case", KINDS, ids=str)


def named(grads):
    return {f"{n}.{i}": y for n, d in grads._asdict().items() if d is not None for i, y in enumerate(parts((d,)))}


def random_like(x, seed=0):
    rng = np.random.default_rng(seed)
    return parts_like(x, [rng.standard_normal(y.shape).astype(y.dtype) for y in parts(x)])


def is_equal(found, expected):
    found, expected = parts(found), parts(expected)
    return len(found) == len(expected) and all(np.array_equal(x, y) for x, y in zip(found, expected, strict=True))


def goes_in_pieces(spec):
    """Whether states are those of calls that end at the positions."""
    return (spec.state.unpack_vjp is not None and spec.state.unpack_at is None) or spec.readout.name == "LEVELS"


def in_one_pass(case, arrays, **options):
    return "pieces" not in la.explain(case.fn, **arrays, **case.options, return_states_at=POSITIONS, **options).reason


def with_gradients(case, arrays, **options):
    """(result, gradients by name) with random cotangents of out, the final state and the states."""
    result, pullback = la.vjp(case.fn, **arrays, **case.options, **options)
    dout, dstate = cotangents((result.out, result.state))
    return result, named(pullback(dout, dstate, random_like(result.states)))


@every_kind
def test_every_backend_gives_the_states_of_prefixes_in_one_pass(case):
    arrays, state = draw(case, T=T)
    results = []
    for how in HOWS:
        chunks = how.get("backend") == "chunks" or how.get("chunk_size") == "parallel"
        pieces = (case.fn is la.based and chunks) or goes_in_pieces(case.spec)  # array calls, ends of tokens
        assert in_one_pass(case, arrays, **how) or pieces
        results.append(with_gradients(case, arrays, state=state, return_state=True, return_states_at=POSITIONS, **how))
    for n, p in enumerate(POSITIONS):
        _, expected = case.fn(**tokens(case, arrays, 0, p), **case.options, state=state, return_state=True)
        for result, _ in results:
            for S, own in zip(parts(result.states), parts(expected), strict=True):
                assert relative_error(S[:, n], own) < 1e-11
    grads = results[0][1]
    for result, found in results[1:]:
        assert max(relative_error(x, y) for x, y in zip(parts(tuple(result)), parts(tuple(results[0][0])),
                                                        strict=True)) < 1e-11  # fmt: skip
        assert max(relative_error(found[n], grads[n]) for n in grads) < 1e-9


def check_gradients(case, arrays, options):
    """Of all arrays and the state against central differences along a random direction."""
    result, pullback = la.vjp(case.fn, **arrays, **case.options, **options)
    cotangent = [*cotangents((result.out, result.state)), random_like(result.states)]
    grads = pullback(*cotangent)
    step = {n: random_like(x, 5) for n, x in arrays.items() if not isinstance(x, str)}
    eps, values = 1e-6, []
    for sign in (1, -1):
        moved = {n: parts_like(x, [y + sign * eps * d if y.dtype.kind == "f" else y
                                   for y, d in zip(parts((x,)), parts((step[n],)), strict=True)])
                 for n, x in arrays.items()}  # fmt: skip
        found = case.fn(**moved, **case.options, **options)
        values.append(sum(float(np.sum(x * d)) for x, d in zip(parts(tuple(found)), parts(tuple(cotangent)),
                                                               strict=True)))  # fmt: skip
    slope = (values[0] - values[1]) / (2 * eps)
    change = sum(float(np.sum(d * y)) for n in step if getattr(grads, n) is not None
                 for d, y in zip(parts((getattr(grads, n),)), parts((step[n],)), strict=True))  # fmt: skip
    assert abs(slope - change) < 1e-6 * max(1.0, abs(slope))


@pytest.mark.parametrize("case", LONG, ids=str)
@pytest.mark.parametrize("heads", [{}, {"Hq": 4}, {"Hk": 1}], ids=str)
def test_long_sequences_of_grouped_heads(case, heads):
    """Blocks of time between the positions; gradients with the states of all blocks kept, and of the positions."""
    if not any(letter in axes.split() for letter in heads for axes in case.given.values()):
        heads = {}
    arrays, state = draw(case, B=(2,), T=700, K=4, **heads)
    options = {"state": state, "return_state": True, "return_states_at": [3, 100, 300, 512, 513, 600]}
    result, grads = with_gradients(case, arrays, backend="numba", **options)
    expected, own = with_gradients(case, arrays, backend="chunks", **options)
    assert max(relative_error(x, y) for x, y in zip(parts(tuple(result)), parts(tuple(expected)), strict=True)) < 1e-10
    assert max(relative_error(grads[n], own[n]) for n in own) < 1e-9


@pytest.mark.parametrize(("stored", "threads"), [(0, 1), (policy.STORED_BYTES, 1), (policy.STORED_BYTES, 2)])
def test_no_bit_depends_on_kept_states_and_threads(monkeypatch, stored, threads):
    """One head: with two threads gradients of states between blocks of time are found first."""
    case = SCALAR
    arrays, state = draw(case, B=(1,), T=1500, H=1, K=32, V=32, dtype=np.float32)
    options = {"state": state, "return_state": True, "return_states_at": [100, 256, 1003, 1500], "backend": "numba"}
    expected, grads = with_gradients(case, arrays, num_threads=1, **options)
    monkeypatch.setattr(policy, "STORED_BYTES", stored)
    monkeypatch.setattr(policy, "APART_OPERATIONS", 0)
    replay.clear()
    found, own = with_gradients(case, arrays, num_threads=threads, **options)
    assert is_equal(tuple(found), tuple(expected))
    assert all(np.array_equal(own[n], grads[n]) for n in grads)
    plain = case.fn(**arrays, **case.options, num_threads=threads, **options)
    assert is_equal(tuple(plain), tuple(expected))


@pytest.mark.parametrize("backend", ["numba", "chunks"])
@pytest.mark.parametrize("case", [DELTA, VECTOR], ids=str)
def test_sequences_of_a_packed_row_have_the_bits_of_calls_of_their_own(case, backend):
    offsets, positions = [0, 0, 100, 120, 120, 300], [50, 100, 105, 110, 200, 299, 300]
    arrays, state = draw(case, B=(1,), T=300, N=5, dtype=np.float32)
    options = {"backend": backend, "return_state": True}
    found, grads = with_gradients(case, arrays, state=state, cu_seqlens=offsets, return_states_at=positions, **options)
    owners = {1: (0, 100, [50, 100]), 2: (100, 120, [5, 10]), 4: (120, 300, [80, 179, 180])}
    for s, (start, stop, own) in owners.items():
        one = tokens(case, arrays, start, stop)
        alone = case.fn(**one, **case.options, state=state[s : s + 1], return_states_at=own, **options)
        assert np.array_equal(alone.out, found.out[:, start:stop])
        assert np.array_equal(alone.state[0], found.state[s])
        first = next(n for n, p in enumerate(positions) if p > start)
        assert np.array_equal(alone.states[0], found.states[first : first + len(own)])
    reference, own = with_gradients(case, {n: x.astype(np.float64) for n, x in arrays.items()}, state=state,
                                    cu_seqlens=offsets, return_states_at=positions, return_state=True,
                                    backend="reference")  # fmt: skip
    assert relative_error(found.states, reference.states) < 1e-5
    assert max(relative_error(grads[n], own[n]) for n in own) < 1e-4


def test_a_row_alone_has_the_bits_of_a_batch():
    case = VECTOR_DELTA
    arrays, _ = draw(case, B=(3,), T=300, H=4, dtype=np.float32)
    found = case.fn(**arrays, **case.options, return_states_at=[20, 256, 271])
    one = case.fn(**{n: x[1:2] for n, x in arrays.items()}, **case.options, return_states_at=[20, 256, 271])
    assert is_equal((one.out[0], one.states[0]), (found.out[1], found.states[1]))


@pytest.mark.parametrize("T", [5, 300])
@pytest.mark.parametrize("positions", [(0, 3, 5), [3, 5], [], 2], ids=str)
def test_repeated_calls(T, positions):
    """A checked call is replayed on other arrays: with the same bits, in arrays of their own."""
    replay.clear()
    case, calls = DELTA, []
    for seed in (0, 1):
        arrays, state = draw(case, T=T, dtype=np.float32, seed=seed)
        calls.append((arrays, {"state": state, "return_states_at": positions, "return_state": True}))
    first = [case.fn(**arrays, **options) for arrays, options in calls]
    assert is_equal(tuple(case.fn(**calls[0][0], **calls[0][1])), tuple(first[0]))
    assert sum("return_states_at" in key for key in replay.by_key) == 1
    graded = [with_gradients(case, arrays, **options) for arrays, options in calls]
    replay.clear()
    for (arrays, options), plain, (result, grads) in zip(calls, first, graded, strict=True):
        again, own = with_gradients(case, arrays, **options)
        assert is_equal(tuple(again), tuple(result))
        assert is_equal(tuple(again), tuple(plain))
        assert all(np.array_equal(own[n], grads[n]) for n in grads)
        replay.clear()
    case.fn(**calls[0][0], **calls[0][1])
    is_whole = la.explain(case.fn, **calls[0][0], **calls[0][1]).replay == "replayed"
    assert is_whole == (0 not in np.ravel(positions))  # the state at 0 is copied by NumPy


@pytest.mark.parametrize("case", [DELTA, *(c for c in PLAIN if c.fn is la.mlstm)], ids=str)
def test_the_states_are_the_callers(case):
    """The pullback does not read the results that the caller may overwrite."""
    arrays, _ = draw(case, T=100)
    (out, state, states), pullback = la.vjp(case.fn, **arrays, return_state=True, return_states_at=[0, 40, 100])
    cotangent = random_like(out), random_like(state), random_like(states)
    expected = pullback(*cotangent)
    for x in (out, *parts(state), *parts(states)):
        x[...] = np.nan
    assert is_equal(tuple(pullback(*cotangent)), tuple(expected))


def test_no_tokens():
    case = DELTA
    arrays, state = draw(case, T=0)
    result, pullback = la.vjp(case.fn, **arrays, state=state, return_states_at=[0])
    assert np.array_equal(result.states[:, 0], state)
    assert np.array_equal(pullback(None, None, result.states).state, state)


@pytest.mark.parametrize("case", OF_TOKENS, ids=str)
def test_states_that_depend_on_tokens_or_systems_in_a_packed_row(case):
    """Of ragged sequences and at any position as of calls on their tokens; position 0 is of the first sequence."""
    offsets, positions = [0, 3, 3, 30, 40], [0, 1, 3, 20, 30, 33, 40]
    arrays, state = draw(case, B=(1,), T=40, N=4)
    options = {"cu_seqlens": offsets, "return_state": True, "return_states_at": positions}
    pieces = "pieces" in la.explain(case.fn, **arrays, **case.options, **options).reason
    assert pieces == goes_in_pieces(case.spec)
    found = case.fn(**arrays, **case.options, state=state, **options)
    for n, p in enumerate(positions):
        s = max(n for n, start in enumerate(offsets[:-1]) if start < p) if p else 0
        begin = parts_like(state, [S[s : s + 1] for S in parts(state)])
        one = case.fn(**tokens(case, arrays, offsets[s], p), **case.options, state=begin, return_state=True)
        assert max(relative_error(S[n], own[0]) for S, own in
                   zip(parts(found.states), parts(one.state), strict=True)) < 1e-11  # fmt: skip
    check_gradients(case, arrays | {"state": state}, options)


@pytest.mark.parametrize("case", OF_TOKENS, ids=str)
@pytest.mark.parametrize("positions", [[], [0]], ids=str)
def test_states_that_depend_on_tokens_or_systems_at_no_token(case, positions):
    arrays, state = draw(case, T=9, dtype=np.float32)
    result, grads = with_gradients(case, arrays, state=state, return_state=True, return_states_at=positions)
    for S, begin in zip(parts(result.states), parts(state), strict=True):
        assert S.shape[1] == len(positions)
        assert not positions or relative_error(S[:, 0], begin) < 1e-6
    assert all(np.isfinite(d).all() for d in grads.values())


ARRAYS = {fn: {n: a.axes.split("|")[0] for n, a in fn.spec.arrays.items()
               if not (a.reinterprets or is_of_pairs(a.axes))} for fn in la.VARIANTS}  # fmt: skip
CATALOG = [Case(fn, dict(options), ARRAYS[fn], {}) for fn in la.VARIANTS for options in fn.samples.options]


@pytest.mark.parametrize("case", CATALOG, ids=str)
@pytest.mark.parametrize("begins", [False, True], ids=["no state", "state"])
def test_every_variant_has_gradients_at_any_positions(case, begins):
    """Of none, the first, the last and several; through each cotangent alone, and all of them."""
    T, counts = 5, ("length", "position")
    for at in ([], [0], [T], [0, 3, T]):
        arrays, state = draw(case, B=(1,), T=T, H=1, K=4, V=3)
        options = case.options | {"return_state": True, "return_states_at": at}
        given = arrays | ({"state": state} if begins else {})
        result, pullback = la.vjp(case.fn, **given, **options)
        every = (*cotangents((result.out, result.state)), random_like(result.states))
        rng = np.random.default_rng(5)
        step = {n: parts_like(x, [rng.standard_normal(y.shape) * (name not in counts) for name, y in named_parts(x)])
                for n, x in given.items() if not isinstance(x, str)}  # fmt: skip
        moved = [case.fn(**{n: parts_like(x, [y if name in counts else y + sign * 1e-6 * d for (name, y), d
                                              in zip(named_parts(x), parts((step[n],)), strict=True)])
                            if n in step else x for n, x in given.items()}, **options) for sign in (1, -1)]  # fmt: skip
        for kept in ({0, 1, 2}, {0}, {1}, {2}):
            cotangent = [d if n in kept else None for n, d in enumerate(every)]
            grads = pullback(*cotangent)
            slope = sum(
                float(np.sum((x - y) * d.conj()).real) / 2e-6
                for ends, others, c in zip(*moved, cotangent, strict=True)
                if c is not None
                for x, y, d in zip(*map(parts, ((ends,), (others,), (c,))), strict=True)
            )
            change = sum(
                float(np.sum(d * y.conj()).real)
                for n in step
                for d, y in zip(parts((getattr(grads, n),)), parts((step[n],)), strict=True)
            )
            assert abs(slope - change) < 1e-6 * max(1.0, abs(slope)), (at, kept)


def named_parts(x):
    """(name, array) of an array, or of the parts of a state."""
    return list(x._asdict().items()) if hasattr(x, "_asdict") else [("", x)]


def test_explain_says_that_the_pass_stores_states():
    case = VECTOR
    arrays, _ = draw(case, T=T)
    assert "the pass stores 7 states" in la.explain(case.fn, **arrays, return_states_at=10).reason
