"""Pieces with a window of inputs over ranks: outputs, states and gradients are those of one rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from linattn_np.distributed import in_threads, run
from linattn_np.testing import relative_error

T, D, W = 14, 3, 4
PIECES = [(la.nn.short_conv, {"activation": "silu"}), (la.nn.token_shift, {})]
by_name = pytest.mark.parametrize(("fn", "options"), PIECES, ids=lambda x: getattr(x, "__name__", ""))


def drawn(fn, batch, N=None):
    """(arrays, state, dout, dstate)."""
    rng = np.random.default_rng(2)
    weight = {"weight": rng.standard_normal((D, W)), "bias": rng.standard_normal(D)} if fn is la.nn.short_conv else {
        "mix": rng.uniform(0, 1, D)}  # fmt: skip
    S = W if weight.keys() >= {"weight"} else 2  # more than needed
    lead = batch if N is None else (N,)
    x, dout = (rng.standard_normal((*batch, T, D)) for _ in range(2))
    return (
        {"x": x} | weight,
        *(rng.standard_normal((*lead, S, D)) for _ in range(1)),
        dout,
        rng.standard_normal((*lead, S, D)),
    )


def assert_as_on_one(fn, drawn, lengths, **options):
    arrays, state, dout, dstate = drawn
    (out, end), pullback = la.vjp(fn, **arrays, **options, state=state, return_state=True)
    wanted = pullback(dout, dstate)._asdict()
    bounds = [0, *itertools.accumulate(lengths)]

    def work(comm):
        own = slice(*bounds[comm.rank : comm.rank + 2])
        mine = arrays | {"x": arrays["x"][..., own, :]}
        given = {**mine, **options, "comm": comm, "lengths": lengths, "state": state}
        (y, last), pull = la.vjp(run, fn, **given, return_state=True)
        assert np.array_equal(y, run(fn, **given))
        return y, last, pull(dout[..., own, :], dstate)._asdict()

    each = in_threads(len(lengths), work, timeout=30.0)
    assert np.array_equal(np.concatenate([y for y, _, _ in each], -2), out)
    for _, last, grads in each:
        assert np.array_equal(last, end)
        assert relative_error(grads["state"], wanted["state"]) < 1e-14
    assert relative_error(np.concatenate([grads["x"] for *_, grads in each], -2), wanted["x"]) < 1e-14
    for name in arrays.keys() - {"x"}:
        assert relative_error(sum(grads[name] for *_, grads in each), wanted[name]) < 1e-13


@by_name
@pytest.mark.parametrize("lengths", [[14], [7, 7], [1, 9, 4], [6, 5, 3], [5, 8, 1]], ids=str)
def test_a_window_reaches_back_to_the_rank_before(fn, options, lengths):
    assert_as_on_one(fn, drawn(fn, (2,)), lengths, **options)


@by_name
@pytest.mark.parametrize("lengths", [[6, 8], [5, 4, 5], [0, 14]], ids=str)
def test_windows_of_a_ragged_batch(fn, options, lengths):
    assert_as_on_one(fn, drawn(fn, (1,), N=5), lengths, **options, cu_seqlens=[0, 1, 1, 4, 13, 14])


def test_without_a_state_a_sequence_begins_with_zeros():
    arrays, *_ = drawn(la.nn.short_conv, (2,))
    halves = in_threads(2, lambda comm: run(la.nn.short_conv, arrays["x"][:, comm.rank * 7 : comm.rank * 7 + 7],
                                            arrays["weight"], comm=comm))  # fmt: skip
    assert np.array_equal(np.concatenate(halves, 1), la.nn.short_conv(arrays["x"], arrays["weight"]))


def test_bad_calls_are_named():
    x, weight = np.ones((2, 5, D)), np.ones((D, W))

    def fails(kind, message, fn=la.nn.short_conv, size=3, given=(x, weight), **options):
        with pytest.raises(kind, match=message):
            in_threads(
                size, lambda comm: run(fn, *(y(comm) if callable(y) else y for y in given), comm=comm, **options)
            )

    fails(ValueError, "short_conv: rank 1 has 2 tokens of a sequence between other ranks, expected at least 3",
          given=(lambda comm: x[:, : 2 if comm.rank == 1 else 5], weight))  # fmt: skip
    fails(TypeError, "fn is rms_norm, expected a variant, or a piece with a state", la.nn.rms_norm, given=(x,))
    fails(ValueError, "of short_conv: segment is given, expected none", segment=4)
    fails(ValueError, "of short_conv: overwrite_state is given, expected none", overwrite_state=True)
