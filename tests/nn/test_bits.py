"""The same bits alone, in a batch, in a ragged batch, wherever the memory lies, and in every repetition: all pieces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from tests.nn.table import CASES, PARAMETERS, SMALL, normal

cases = lambda every: pytest.mark.parametrize("case", every, ids=lambda c: f"{c.name} {c.label}".strip())  # noqa: E731
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])
RAGGED = [case for case in CASES if "cu_seqlens" in case.options]
ROWS = [case for case in SMALL if "cu_seqlens" not in case.options and case.name != "dropout"
        and case.options.get("reduction", "none" if case.name != "cross_entropy" else "mean") == "none"]  # fmt: skip


def parts(result):
    return result if isinstance(result, tuple) else (result,)


def outcome(case, arrays, **options):
    """The results, and the gradients by name."""
    result, pullback = case.vjp(arrays, **options)
    grads = pullback(*(normal(*y.shape).astype(y.dtype) for y in parts(result)))
    return parts(result), grads._asdict()


def same(found, wanted):
    for a, b in zip(found[0], wanted[0], strict=True):
        np.testing.assert_array_equal(a, b)
    for name, b in wanted[1].items():
        np.testing.assert_array_equal(found[1][name], b)


@DTYPES
@cases(CASES)
def test_repeated_calls(case, dtype):
    """Memory that is used again, arrays at other addresses and in strides, other numbers of threads, cleared caches."""
    arrays = {n: x.astype(dtype) for n, x in case.arrays.items()}
    first = outcome(case, arrays)
    for place in range(1, 6):
        memory = {n: np.zeros(x.size + place, dtype)[place:].reshape(x.shape) for n, x in arrays.items()}
        for n, x in arrays.items():
            memory[n][...] = x
        same(outcome(case, memory, num_threads=1 + place % 2), first)
    la.clear_cache()
    same(outcome(case, {n: np.repeat(x, 3, axis=-1)[..., 1::3] for n, x in arrays.items()}), first)
    for a, b in zip(parts(case(arrays)), first[0], strict=True):
        np.testing.assert_array_equal(a, b)


@DTYPES
@cases(ROWS)
def test_a_batch_row_alone(case, dtype):
    """Its results, and the gradients of its arrays; parameters have sums over the batch."""
    arrays = {n: x.astype(dtype) for n, x in case.arrays.items()}
    result, pullback = case.vjp(arrays)
    d = [normal(*y.shape).astype(dtype) for y in parts(result)]
    grads = pullback(*d)
    of_row = lambda given, b: {n: x if n in PARAMETERS else x[b : b + 1] for n, x in given.items()}  # noqa: E731
    for b in range(len(parts(result)[0])):
        one, pull = case.vjp(of_row(arrays | dict(case.whole), b))
        own = pull(*(y[b : b + 1] for y in d))
        for a, whole in zip(parts(one), parts(result), strict=True):
            np.testing.assert_array_equal(a, whole[b : b + 1])
        for n in arrays:
            if n not in PARAMETERS:
                np.testing.assert_array_equal(getattr(own, n), getattr(grads, n)[b : b + 1])


def test_every_piece_that_mixes_tokens_has_a_ragged_case():
    ragged = {n for n in la.nn.__all__ if "cu_seqlens" in getattr(la.nn, n).piece.defaults}
    assert {case.name for case in RAGGED} >= ragged - {"xpos"}  # whose turns are those of rotary


@DTYPES
@cases(RAGGED)
def test_a_sequence_of_a_ragged_batch_alone(case, dtype):
    arrays = {n: x.astype(dtype) for n, x in case.arrays.items()}
    options = {n: x for n, x in case.options.items() if n != "cu_seqlens"}
    result, pullback = case.vjp(arrays)
    d = [normal(*y.shape).astype(dtype) for y in parts(result)]
    grads = pullback(*d)
    for n, (a, b) in enumerate(itertools.pairwise(case.options["cu_seqlens"])):
        place = {"state": np.s_[n : n + 1]}
        own = {name: x if name in PARAMETERS else x[place.get(name, np.s_[:, a:b])] for name, x in arrays.items()}
        one, pull = la.vjp(case.fn, **own, **options)
        cotangents = [y[np.s_[:, a:b] if m == 0 else np.s_[n : n + 1]] for m, y in enumerate(d)]
        of_own = pull(*cotangents)
        for m, (y, whole) in enumerate(zip(parts(one), parts(result), strict=True)):
            np.testing.assert_array_equal(y, whole[np.s_[:, a:b] if m == 0 else np.s_[n : n + 1]])
        for name in own:
            if name not in PARAMETERS:
                whole = getattr(grads, name)[place.get(name, np.s_[:, a:b])]
                np.testing.assert_array_equal(getattr(of_own, name), whole)


@pytest.mark.parametrize(("D", "place"), [(32, 0), (32, 1), (35, 0), (48, 0)])
@pytest.mark.parametrize("options", [{}, {"activation": "silu"}, {"activation": "silu", "residual": True}], ids=str)
def test_results_that_are_written_past_the_caches(options, D, place, monkeypatch):
    """Of aligned and of other rows."""
    loops = pytest.importorskip("linattn_np.ops.cpu.short_conv")
    x, weight, dy = normal(2, 45, D).astype("float32"), normal(D, 4).astype("float32"), normal(2, 45, D, 1)[..., 0]
    found = []
    for far in (1 << 40, 0):
        monkeypatch.setattr(loops, "FAR", far)
        memory = np.zeros(x.size + 32, np.float32)
        out = memory[-memory.ctypes.data % 64 // 4 + place :][: x.size].reshape(x.shape)
        la.nn.short_conv(x, weight, **options, out=out)
        result, pullback = la.vjp(la.nn.short_conv, x, weight, **options)
        found.append([out, result, *(d for d in pullback(dy.astype("float32")) if d is not None)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
