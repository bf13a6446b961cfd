"""The backward of averages in compiled loops: z as a row beside the state, as if it were a column of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cpu import loops as numba_loops
from linattn_np.testing import check_vjp, relative_error

MAPPED = {fn.__name__: (fn, {"eps": 4.0} | {n: 9 for n in fn.spec.options if n == "num_features"})
          for fn in la.VARIANTS if {"normalize", "eps"} <= fn.spec.options.keys()
          and fn.spec.options["normalize"]}  # fmt: skip  # eps: no sum is near 0
SIZES = [  # B, T, heads of q, of k, of v, K, V
    (2, 77, 2, 1, 2, 5, 7), (1, 300, 4, 2, 2, 16, 64), (3, 33, 1, 1, 1, 3, 1),
]  # fmt: skip


def case(fn, sizes, seed=0):
    """q, k, v; and a state that other tokens have left."""
    B, T, Hq, Hk, H, K, V = sizes
    rng = np.random.default_rng(seed)
    draw = lambda T: [rng.standard_normal((B, T, h, d)) for h, d in ((Hq, K), (Hk, K), (H, V))]  # noqa: E731
    return draw(T), draw(40)


def parts(x):
    return list(x) if isinstance(x, tuple) else [] if x is None else [x]


def everything(fn, given, wanted=("out", "state"), **options):
    """Outputs, the last state, and all gradients from the cotangents `wanted`."""
    (out, state), pullback = la.vjp(fn, *given, return_state=True, **options)
    rng = np.random.default_rng(1)
    dout = rng.standard_normal(out.shape)
    dstate = type(state)(*(rng.standard_normal(x.shape) for x in state))
    grads = pullback(dout if "out" in wanted else None, dstate if "state" in wanted else None)
    return [out, *state, grads.q, grads.k, grads.v, *parts(grads.state)]


@pytest.mark.parametrize("wanted", [("out", "state"), ("out",), ("state",)], ids="-".join)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MAPPED)
def test_it_is_that_of_a_column_of_ones(name, sizes, wanted):
    fn, options = MAPPED[name]
    given, before = case(fn, sizes)
    options = options | {"state": la.vjp(fn, *before, return_state=True, **options)[0][1]}
    found, expected = (everything(fn, given, wanted, backend=backend, **options) for backend in ("numba", "chunks"))
    assert len(found) == 8
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) < 1e-11 if y.any() else not x.any()


@pytest.mark.parametrize("name", MAPPED)
def test_it_is_the_slope_of_the_forward(name):
    fn, options = MAPPED[name]
    given, before = case(fn, (1, 70, 2, 1, 2, 10, 5))  # channels enough that no norm is near 0
    state = la.vjp(fn, *before, return_state=True, **options)[0][1]
    check_vjp(fn, *given, state=state, return_state=True, backend="numba", **options)


@pytest.mark.parametrize("name", MAPPED)
def test_ragged_sequences_are_each_alone(name):
    fn, options = MAPPED[name]
    given, _ = case(fn, (1, 200, 2, 1, 2, 6, 9))
    offsets = [0, 0, 65, 66, 200]
    together = la.vjp(fn, *given, cu_seqlens=offsets, backend="numba", **options)[1](given[2])
    for a, b in itertools.pairwise(offsets):
        if a < b:
            one = [x[:, a:b] for x in given]
            alone = la.vjp(fn, *one, backend="numba", **options)[1](one[2])
            for x, y in zip(together[:3], alone[:3], strict=True):
                assert (x[:, a:b] == y).all()


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("name", MAPPED)
def test_no_bit_depends_on_the_blocks_of_a_backward(name, chunks, short_blocks):
    fn, options = MAPPED[name]
    given, before = case(fn, (1, 200, 2, 1, 2, 6, 9))
    options = options | {"state": la.vjp(fn, *before, return_state=True, **options)[0][1], "backend": "numba"}
    whole = everything(fn, given, **options)

    short_blocks(32 * chunks)
    cut = everything(fn, given, **options)
    assert all((x == y).all() for x, y in zip(whole, cut, strict=True))


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("name", MAPPED)
def test_few_heads_go_backward_by_time_blocks_at_once(name, queries, monkeypatch):
    """Several threads and one head: z and dz between time blocks, with the bits that one thread gives."""
    monkeypatch.setattr(policy, "APART_OPERATIONS", 0)
    fn, options = MAPPED[name]
    given, before = case(fn, (1, 900, queries, 1, 1, 6, 70))
    options = options | {"state": la.vjp(fn, *before, return_state=True, **options)[0][1], "backend": "numba"}
    calls, find = [], numba_loops._find_ends
    monkeypatch.setattr(numba_loops, "_find_ends", lambda *x: calls.append(find(*x)))
    found = [everything(fn, given, num_threads=count, **options) for count in (1, 3)]
    assert len(calls) == 1
    assert all((x == y).all() for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gradients_of_narrow_arrays_where_they_lie_or_loaded(dtype):
    """16 channels of float32 are read in place, others are not: the same to rounding."""
    given, _ = case(la.based, (1, 100, 2, 2, 2, 4, 16))
    narrow = [x.astype(dtype) for x in given]
    dout = np.random.default_rng(2).standard_normal(given[2].shape).astype(dtype)
    found = la.vjp(la.based, *narrow, backend="numba")[1](dout)
    expected = la.vjp(la.based, *(x.astype(np.float64) for x in narrow), backend="chunks")[1](dout.astype(np.float64))
    for x, y in zip(found[:3], expected[:3], strict=True):
        assert relative_error(x, y) < 200 * np.finfo(dtype).eps
