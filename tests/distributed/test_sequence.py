"""Sequences over ranks: every variant whose states compose, forward and backward, is the call on one rank."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.distributed import in_threads, run
from tests import cases
from tests.cases import parts
from tests.distributed.ranks import assert_close, assert_same_bits, cotangents, cut, drawn, on_one, on_ranks

CAUSAL = [case for case in cases.SPANS if case.causal]
PLAIN = [cases.plain_case(fn) for fn in cases.COMPOSING]
OFFSETS = [0, 3, 3, 14, 15, 15]  # an empty sequence, one over three ranks, an empty one at the end


@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_outputs_states_and_gradients_are_those_of_one_rank(case):
    arrays, state = drawn(case, 15)
    d = cotangents(case, arrays, state)
    wanted = on_one(case, arrays, state, d)
    assert_close(on_ranks(case, arrays, state, d, [4, 9, 2]), wanted)


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("lengths", [[6, 9], [5, 0, 10], [15, 0]], ids=str)
def test_sequences_of_a_ragged_batch_cross_ranks(case, lengths):
    arrays, _ = drawn(case, 15, B=(1,))
    state = case.fn(**arrays, **case.options, cu_seqlens=OFFSETS, return_state=True).state
    d = cotangents(case, arrays, state, cu_seqlens=OFFSETS)
    wanted = on_one(case, arrays, state, d, cu_seqlens=OFFSETS)
    assert_close(on_ranks(case, arrays, state, d, lengths, cu_seqlens=OFFSETS), wanted)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_bits_do_not_depend_on_the_number_of_ranks(case):
    """With segments: outputs, states and gradients of arrays with an axis of tokens."""
    arrays, state = drawn(case, 24, dtype=np.float32)
    d = cotangents(case, arrays, state)
    one, *others = (on_ranks(case, arrays, state, d, lengths, segment=4)
                    for lengths in ([24], [12, 12], [8, 8, 8], [4, 8, 4, 8]))  # fmt: skip
    shared = [n for n in case.given if not case.on_tokens(n)]
    for found in others:
        assert_same_bits({n: x for n, x in found.items() if n not in shared}, one)
    assert_close(one, on_one(case, arrays, state, d), 2e-4)


def test_bits_of_a_ragged_batch_do_not_depend_on_the_number_of_ranks():
    case = next(c for c in PLAIN if c.fn is la.kda)
    arrays, _ = drawn(case, 24, B=(1,), dtype=np.float32)
    offsets = [0, 5, 19, 24]
    state = case.fn(**arrays, cu_seqlens=offsets, return_state=True).state
    d = cotangents(case, arrays, state, cu_seqlens=offsets)
    one, *others = (on_ranks(case, arrays, state, d, lengths, segment=4, cu_seqlens=offsets)
                    for lengths in ([24], [12, 12], [8, 8, 8], [4, 8, 4, 8]))  # fmt: skip
    for found in others:
        assert_same_bits(found, one)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_one_rank_without_segments_is_the_plain_call(case):
    arrays, state = drawn(case, 9)
    d = cotangents(case, arrays, state)
    assert_same_bits(on_ranks(case, arrays, state, d, [9]), on_one(case, arrays, state, d))


@pytest.mark.parametrize("fn", [la.gated_delta_rule, la.simple_gla, la.mlstm], ids=lambda fn: fn.__name__)
def test_bytes_sent_do_not_depend_on_the_number_of_tokens(fn):
    case = next(c for c in PLAIN if c.fn is fn)

    def sent(T):
        arrays, _ = drawn(case, T)

        def work(comm):
            counting = Counting(comm)
            out, pullback = la.vjp(run, fn, **cut(case, arrays, comm.rank * T // 3, (comm.rank + 1) * T // 3),
                                   comm=counting)  # fmt: skip
            pullback(np.ones_like(out))
            return counting.bytes

        return in_threads(3, work, timeout=30.0)

    assert sent(12) == sent(48)
    assert max(sent(12)) > 0


class Counting:
    """A communicator that counts."""

    def __init__(self, comm):
        self.rank, self.size, self._comm, self.bytes, self.calls = comm.rank, comm.size, comm, 0, 0

    def all_gather(self, x):
        self.bytes, self.calls = self.bytes + x.nbytes, self.calls + 1
        return self._comm.all_gather(x)


def test_outputs_need_one_exchange():
    case = next(c for c in PLAIN if c.fn is la.gla)
    arrays, _ = drawn(case, 12)

    def work(comm):
        counting = Counting(comm)
        _, pullback = la.vjp(run, case.fn, **cut(case, arrays, comm.rank * 6, comm.rank * 6 + 6), comm=counting)
        forward = counting.calls
        pullback(np.ones((*arrays["v"].shape[:-3], 6, *arrays["v"].shape[-2:])))
        return forward, counting.calls - forward

    assert in_threads(2, work, timeout=30.0) == [(1, 1)] * 2


def test_a_gradient_of_the_state_alone_reaches_every_rank():
    case = next(c for c in PLAIN if c.fn is la.gated_delta_rule)
    arrays, state = drawn(case, 12)
    _, dstate = cotangents(case, arrays, state)
    wanted = on_one(case, arrays, state, (None, dstate))

    def work(comm):
        own = cut(case, arrays, comm.rank * 4, comm.rank * 4 + 4)
        _, pullback = la.vjp(run, case.fn, **own, comm=comm, state=state, return_state=True)
        return pullback(None, dstate)._asdict()

    each = in_threads(3, work, timeout=30.0)
    for name in arrays:
        found = np.concatenate([grads[name] for grads in each], arrays["v"].ndim - 3)
        assert_close({name: found}, wanted)
    assert_close({"state": each[1]["state"]}, wanted)


def test_a_chain_of_spans_is_followed_over_every_number_of_ranks():
    """Without an initial state, and where some ranks have no tokens."""
    case = next(c for c in PLAIN if c.fn is la.rwkv7)
    arrays, _ = drawn(case, 10)
    wanted = case.fn(**arrays, **case.options)
    for lengths in ([3, 7], [0, 10], [2, 0, 8], [1] * 10):
        bounds = np.cumsum([0, *lengths])

        def work(comm, lengths=lengths, bounds=bounds):
            return run(case.fn, **cut(case, arrays, *bounds[comm.rank : comm.rank + 2]), **case.options, comm=comm,
                       lengths=lengths)  # fmt: skip

        out = np.concatenate(in_threads(len(lengths), work, timeout=30.0), wanted.ndim - 3)
        assert_close({"out": out}, {"out": wanted})


def test_tensors_are_differentiated_by_autograd():
    torch = pytest.importorskip("torch")
    case = next(c for c in PLAIN if c.fn is la.gated_delta_rule)
    arrays, state = drawn(case, 12)
    d = cotangents(case, arrays, state)
    wanted = on_one(case, arrays, state, d)

    def work(comm):
        own = {n: torch.tensor(x, requires_grad=True)
               for n, x in cut(case, arrays, comm.rank * 6, comm.rank * 6 + 6).items()}  # fmt: skip
        S = torch.tensor(state, requires_grad=True)
        out, end = run(case.fn, **own, comm=comm, state=S, return_state=True)
        dout = torch.tensor(d[0][..., comm.rank * 6 : comm.rank * 6 + 6, :, :])
        torch.autograd.backward((out, end), (dout, torch.tensor(d[1])))
        return {n: x.grad.numpy() for n, x in (own | {"state": S}).items()}

    each = in_threads(2, work, timeout=30.0)
    for name in arrays:
        found = np.concatenate([grads[name] for grads in each], arrays["v"].ndim - 3)
        assert_close({name: found}, wanted)
    assert_close({"state": each[0]["state"]}, wanted)


ONE = [np.ones((4, 1, 2)), np.ones((4, 1, 2)), np.ones((4, 1, 3))]


@pytest.mark.parametrize(("options", "message"), [
    ({"reverse": True}, "reverse is given, expected none"),
    ({"return_states_at": [1]}, "return_states_at is given, expected none"),
    ({"layout": "heads_first"}, "layout is 'heads_first', expected 'time_first'"),
    ({"causal": False}, "causal is False, expected True"),
    ({"segment": 0}, "segment is 0, expected None or a whole number from 1"),
    ({"segment": 3}, "rank 1 begins at token 4, expected a multiple of segment = 3"),
    ({"lengths": [4]}, r"lengths is \[4\], expected the tokens of each of 2 ranks"),
    ({"lengths": [4, 5]}, r"lengths\[1\] is 5, expected T = 4"),
    ({"cu_seqlens": [0, 7]}, "cu_seqlens ends at 7, expected"),
])  # fmt: skip
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=f"distributed.run of linear_attention: {message}"):
        in_threads(2, lambda comm: run(la.linear_attention, *ONE, comm=comm, **options), timeout=30.0)


def test_bad_calls_are_named():
    comm = la.distributed.Threads.of(1)[0]
    with pytest.raises(TypeError, match=r"distributed\.run: fn is 3, expected a variant"):
        run(3, comm=comm)
    with pytest.raises(TypeError, match="linear_attention: v is missing"):
        run(la.linear_attention, *ONE[:2], comm=comm)
    with pytest.raises(TypeError, match=r"distributed\.run: comm is missing"):
        la.vjp(run, la.linear_attention, *ONE)
    with pytest.raises(ValueError, match=r"dout has shape \(3, 1, 3\), expected \(4, 1, 3\)"):
        la.vjp(run, la.linear_attention, *ONE, comm=comm)[1](np.ones((3, 1, 3)))
    with pytest.raises(TypeError, match="the pullback got neither dout nor dstate"):
        la.vjp(run, la.linear_attention, *ONE, comm=comm)[1]()
    for fn in (fn for fn in la.VARIANTS if not fn.spec.composes):
        arrays = la.testing.sample(fn, np.random.default_rng(0), T=3)
        with pytest.raises(TypeError, match=f"fn is {fn.__name__}, whose states do not compose"):
            run(fn, **arrays, comm=comm)


def test_the_state_of_the_last_rank_is_on_every_rank():
    case = next(c for c in PLAIN if c.fn is la.mesa_net)
    arrays, state = drawn(case, 8)
    wanted = case.fn(**arrays, **case.options, state=state, return_state=True).state

    def work(comm):
        own = cut(case, arrays, comm.rank * 4, comm.rank * 4 + 4)
        return run(case.fn, **own, **case.options, comm=comm, state=state, return_state=True).state

    for end in in_threads(2, work, timeout=30.0):
        assert type(end) is type(wanted)
        assert all(np.allclose(a, b, rtol=1e-12) for a, b in zip(parts(end), parts(wanted), strict=True))
