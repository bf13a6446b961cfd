"""Kernels that a call has run, on other arrays: the same bits, or a reason why there is no plan."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.call.replay.vjp import Forward, Residuals
from linattn_np.ops.cpu.sums import sum_to
from linattn_np.runtime import threads
from linattn_np.runtime.constants import constant_array
from linattn_np.runtime.pieces import record
from linattn_np.runtime.pieces.memory import destinations, empty
from linattn_np.runtime.pieces.record import LaunchSequence, view_of
from linattn_np.runtime.pieces.run import Launch
from linattn_np.runtime.recorder import MOST_BYTES, Recorder, active, refuse


def bits(y):
    return y.shape, y.dtype, y.tobytes()


def drawn(seed, shape=(3, 5, 4), dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def totals(x, y=None):
    """Sums over the first axis: of x, and of the same with y in front."""
    out = sum_to(x, x.shape[1:])
    return out if y is None else (out, sum_to(y, y.shape[1:]))


def test_other_arrays_give_the_bits_of_a_direct_call():
    x = drawn(0)
    with Recorder() as recorder:
        out = totals(x)
    sequence = LaunchSequence(recorder, [x], out)
    for seed in range(1, 4):
        y = drawn(seed)
        found = sequence([y])
        assert bits(found) == bits(totals(y))
        assert not np.shares_memory(found, y)


def test_arrays_that_are_no_results_share_one_buffer():
    """Results are found among those of `run`; a destination of the shape of an intermediate array is not taken."""
    x = drawn(0, (2, 1000, 4))
    with Recorder() as recorder:
        out = sum_to(x, (1, 1, 4))
    made = [y for y in recorder.allocated if np.shares_memory(y, out)]
    assert len(made) < len(recorder.allocated) - 1
    sequence = LaunchSequence(recorder, [x], out)
    other = np.zeros(recorder.allocated[0].shape, np.float32)
    for seed in range(1, 3):
        y = drawn(seed, x.shape)
        with destinations.filled([other]) as left:
            found = sequence([y])
        assert left == [other]
        assert bits(found) == bits(sum_to(y, (1, 1, 4)))
    assert [(y.shape, y.dtype) for y in made] == sequence.allocations  # the others are small


def test_large_arrays_of_a_backward_lie_apart_in_one_block():
    """A result has memory of its own, which does not keep the others alive."""
    x, wide = drawn(0, (3, 70_000)), (70_000,)
    with Recorder() as recorder:
        out, *held = (sum_to(y, wide) for y in (x, x[1:], x[:2]))
    sequence = LaunchSequence(recorder, [x], out, held=tuple(held))
    y = drawn(1, x.shape)
    pool = sequence.run([y])
    found, of_backward = sequence.get(pool), sequence.held(pool)
    for one, wanted in zip((found, *of_backward), (y, y[1:], y[:2]), strict=True):
        assert bits(one) == bits(sum_to(wanted, wide))
    first, second = of_backward
    assert first.base is second.base
    assert found.base is not first.base
    assert not np.shares_memory(first, second)


SHAPES = ((1, 64, 64), (1, 64), (400, 64, 1))


def sums(x):
    """Sums by threads, by one thread, and by threads."""
    return [sum_to(y, shape) for y, shape in zip((x, x[0], x), SHAPES, strict=True)]


@pytest.fixture
def shared():
    """A sequence for two threads, of launches that all or one of them execute, and its array."""
    x = drawn(0, (400, 64, 64))
    with threads.limited(2):
        with Recorder() as recorder:
            out = tuple(sums(x))
        yield LaunchSequence(recorder, [x], out), drawn(1, x.shape)


def check_shared(sequence, y):
    for one, wanted in zip(sequence([y]), sums(y), strict=True):
        assert bits(one) == bits(wanted)


def test_threads_share_all_launches_of_a_sequence(shared):
    sequence, y = shared
    assert [type(step) for step in sequence._steps] == [tuple]
    for count in (1, 2, 3, 9):
        with threads.limited(count):
            for _ in range(5):
                check_shared(sequence, y)


def test_a_thread_alone_executes_all_launches(shared, monkeypatch):
    def refused(*given):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_helpers", 0)
    monkeypatch.setattr(threads, "_until", 0.0)
    monkeypatch.setattr(threads, "_waiting", threads.queue.SimpleQueue())
    monkeypatch.setattr(threads._thread, "start_new_thread", refused)
    check_shared(*shared)


@pytest.mark.parametrize("few", [1, 3])
def test_shared_launches_go_on_after_a_return(shared, monkeypatch, few):
    """A thread returns after some parts, or without one where others work."""
    monkeypatch.setattr(record, "FEW", few)
    monkeypatch.setattr(record, "MANY", few)
    sequence, y = shared
    own, calls = sequence._share, []

    def share(*given):
        calls.append(given)
        if len(calls) % 3:
            own(*given)

    sequence._share = share
    check_shared(sequence, y)
    assert len(calls) > 20 / few


def test_shared_launches_are_interrupted_between_parts(shared, monkeypatch):
    monkeypatch.setattr(record, "FEW", 1)
    sequence, y = shared
    own, caller, calls = sequence._share, threads.threading.get_ident(), []

    def share(*given):
        if threads.threading.get_ident() == caller:
            calls.append(given)
            if len(calls) >= 2:
                raise KeyboardInterrupt
        own(*given)

    sequence._share = share
    with pytest.raises(KeyboardInterrupt):
        [sequence([y]) for _ in range(2)]
    sequence._share = own
    check_shared(sequence, y)


def test_long_launches_are_executed_between_shared_ones():
    """Of a launch that calls its kernel several times for a range of tasks a thread is interrupted inside a range."""
    x = drawn(0, (400, 64, 64))
    with threads.limited(2):
        with Recorder() as recorder:
            out = tuple(sums(x))
        long = max(recorder.launches, key=lambda one: one.bounds[-1])
        long.bounds, long.each = [0, long.bounds[-1]], 1
        sequence = LaunchSequence(recorder, [x], out)
        assert {type(step) for step in sequence._steps} == {tuple, Launch}
        check_shared(sequence, drawn(1, x.shape))


def test_a_view_of_a_given_array_is_read_at_its_offset():
    x = drawn(0, (4, 5, 4))
    with Recorder() as recorder:
        out = totals(x[1:])
    y = drawn(1, (4, 5, 4))
    assert bits(LaunchSequence(recorder, [x], out)([y])) == bits(totals(y[1:]))


def test_what_numpy_computes_has_no_plan():
    x = drawn(0)
    with Recorder() as recorder:
        totals(x * 2)
    with pytest.raises(LookupError, match="NumPy computed an array"):
        LaunchSequence(recorder, [x], ())
    with Recorder() as recorder:
        out = totals(x) + 1
    with pytest.raises(LookupError, match="NumPy computed a result"):
        LaunchSequence(recorder, [x], (out, None))
    with Recorder() as recorder:
        totals(x)
        empty((2,), np.dtype(np.float32))[...] = 1
    with pytest.raises(LookupError, match="something else"):
        LaunchSequence(recorder, [x], ())
    with Recorder() as recorder:
        totals(x)
        refuse("a reason")
        refuse("another one")
    with pytest.raises(LookupError, match="a reason"):
        LaunchSequence(recorder, [x], ())
    with pytest.raises(LookupError, match="no compiled kernel"):
        LaunchSequence(Recorder(), [x], ())


def test_a_freed_array_is_not_taken_for_a_new_one():
    """The memory of an array that NumPy computed is not given to an array of `empty` while a call is recorded."""
    x = drawn(0)
    with Recorder() as recorder:
        for _ in range(5):
            totals(x * 2)
            empty(x.shape, x.dtype)
    with pytest.raises(LookupError):
        LaunchSequence(recorder, [x], ())


def test_one_address_of_two_arrays_has_no_plan():
    x = drawn(0)
    with Recorder() as recorder:
        totals(x)
    with pytest.raises(LookupError, match="begin at one place"):
        LaunchSequence(recorder, [x, x[:1]], ())


def test_interleaved_arrays_are_told_apart():
    both = drawn(0, (3, 2, 5, 4))
    x, y = both[:, 0].copy(), both[:, 1].copy()
    with Recorder() as recorder:
        found = totals(x, y)
    assert [bits(z) for z in found] == [bits(totals(x)), bits(totals(y))]
    exchanged = LaunchSequence(recorder, [x, y], found)([y, x])
    assert [bits(z) for z in exchanged] == [bits(found[1]), bits(found[0])]


def test_an_overwritten_array_inside_another_and_a_misaligned_one_are_computed_in_full():
    x, S = drawn(0), drawn(1)
    with Recorder() as recorder:
        totals(x, S)
    sequence = LaunchSequence(recorder, [x, S], (), overwritten=S)
    memory = np.zeros(200, np.float32)
    apart = memory[:60].reshape(x.shape), memory[60:120].reshape(x.shape)
    assert sequence.run(list(apart)) is not None
    inside = memory[:60].reshape(x.shape), memory[59:119].reshape(x.shape)
    assert sequence.run(list(inside)) is None
    misaligned = np.ndarray(x.shape, x.dtype, np.zeros(300, np.uint8), 1)
    assert sequence.run([misaligned, apart[1]]) is None


def test_a_plan_keeps_its_constants():
    x = drawn(0)
    with Recorder() as recorder:
        for _ in range(2):
            ones = constant_array(np, "ones of a test", "cpu", lambda: np.ones(x.shape, x.dtype))
            out = totals(ones)
    sequence, expected = LaunchSequence(recorder, [x], out), bits(totals(ones))
    del ones, out, recorder
    la.clear_cache()
    drawn(1, (50, 50, 50))
    assert bits(sequence([x])) == expected


def test_results_are_views_of_what_kernels_fill():
    x = drawn(0)
    for n, view in enumerate((lambda y: y, lambda y: y[1:, ::2], lambda y: y.swapaxes(0, 1), lambda y: y[::-1])):
        y = drawn(1)
        z = view_of(view(x), [x])([y])
        assert (z is y) == (n == 0)
        assert bits(z) == bits(view(y))
        assert z.strides == view(y).strides
    with pytest.raises(LookupError):
        view_of(x.copy(), [x])


def test_pullbacks_of_other_layouts_read_what_a_replayed_forward_holds():
    x, y, d = drawn(0), drawn(1), drawn(2, (5, 4))
    with Recorder() as recorder:
        sums = totals(x, y)
    forward = Forward(record, "key", recorder, [x, y], (None, None), sums)
    in_full = Residuals(forward, [x, y, *record.owners(sums, recorder)], None)

    def add(which, cotangents):
        with Recorder() as pull:
            found = sum_to(sums[which], (4,))
        assert in_full.add_pullback(cotangents, pull, (found,))

    add(0, (d, None))
    _, early = forward([y, x], None)
    add(1, (d, d.copy()))
    assert bits(early.pullback((d, None))[0]) == bits(sum_to(sums[1], (4,)))
    for residuals in (early, forward([y, x], None)[1]):
        assert bits(residuals.pullback((d, d.copy()))[0]) == bits(sum_to(sums[0], (4,)))
    assert early.pullback((d, 1.0)) is None


def test_a_result_that_a_pullback_reads_is_copied():
    """The caller may write to it."""
    x, d = drawn(0), drawn(2, (5, 4))
    with Recorder() as recorder:
        sums = totals(x)
    forward = Forward(record, "key", recorder, [x], (sums, None), sums)
    with Recorder() as pull:
        found = sum_to(sums, (4,))
    assert Residuals(forward, [x, *record.owners(sums, recorder)], None).add_pullback((d, None), pull, (found,))
    y = drawn(1)
    (out, _), residuals = forward([y], None)
    expected = bits(sum_to(totals(y), (4,)))
    out[...] = 0
    assert bits(residuals.pullback((d, None))[0]) == expected


def test_a_call_of_large_arrays_is_not_recorded_and_nothing_of_it_is_held():
    with Recorder() as recorder:
        for _ in range(3):
            empty((MOST_BYTES // 10,), np.dtype(np.float32))
    assert recorder.allocated == []
    assert active.recorder is None
    with pytest.raises(LookupError, match="memory"):
        LaunchSequence(recorder, [], ())
