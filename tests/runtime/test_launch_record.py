"""Launches that are recorded and replayed, and the arrays that are constant in them: no GPU."""

from __future__ import annotations

import struct
import threading

import numpy as np
import pytest

from linattn_np.ops.cuda.moves import namespace
from linattn_np.runtime.cuda import constants, launch
from linattn_np.runtime.cuda.record import LaunchSequence
from linattn_np.runtime.recorder import Recorder
from tests.matrix_state.cuda.step_twin import CUPY, stub
from tests.matrix_state.cuda.token import host as step_calls

launched = step_calls.launched


def written(arrays, pointers, first=b""):
    packed = first + b"".join(struct.pack("<q", y.data.ptr) for y in pointers)
    return launch.Launch(launch.Kernel("double", "double", 32), 1, packed, arrays)


def seen(launches, allocated):
    recorder = Recorder()
    recorder.launches, recorder.allocated = launches, allocated
    return recorder


def test_a_launch_whose_pointers_are_not_known_is_not_replayed(launched):
    x, y, z = (stub(np.zeros(4, np.float32)) for _ in range(3))
    good = seen([written((x, None, y), (x, y))], [y])
    LaunchSequence(good, [x])
    for bad in (
        seen([written(None, (x, y))], [y]),  # which arrays it takes was not said
        seen([written((x, y, z), (x, y, z))], [y]),  # z is nobody's
        seen([written((x, y), (x,))], [y]),  # y is not among its arguments
        seen([written((x, y), (x, y), b"\1\2\3\4")], [y]),  # nor where a pointer is looked for
        seen([written((x, y), (x, y))], [y, y]),  # two arrays at one place
        seen([written((x, y), (x, y))], [x, y]),
    ):
        with pytest.raises(LookupError):
            LaunchSequence(bad, [x])
    with pytest.raises(LookupError):
        LaunchSequence(good, [x, x])


def test_arrays_that_are_made_anew_and_constants_that_are_not(launched, monkeypatch):
    """Pointers of given arrays change, pointers of constants stay, allocated arrays are new ones."""
    fired = []
    cuda = launch.cupy().cuda
    monkeypatch.setattr(cuda.driver, "launchKernel", lambda *how: fired.append(how))
    monkeypatch.setattr(constants, "_cached", {})
    x, y, fixed = (stub(np.zeros(4, np.float32)) for _ in range(3))
    constants._cached["it"] = fixed
    assert constants.at(fixed.data.ptr) is fixed
    assert constants.at(x.data.ptr) is None
    sequence = LaunchSequence(seen([written((x, y, fixed), (y, fixed, x))], [y]), [x])
    other = stub(np.ones(4, np.float32))
    pointers = [other.data.ptr]
    (made,) = sequence.make(pointers)
    assert (made.shape, made.dtype) == (y.shape, y.dtype)
    assert made.data.ptr != y.data.ptr
    assert pointers == [other.data.ptr, made.data.ptr]
    assert list(sequence._launches[0][0]) == [made.data.ptr, fixed.data.ptr, other.data.ptr]
    assert fired[0][1:8] == (1, 1, 1, 32, 1, 1, 0)


def of(shapes):
    """(a sequence of a launch that takes new arrays of these shapes, the sizes of the memory that a call takes)."""
    x, made = stub(np.zeros(4, np.float32)), [stub(np.zeros(shape, np.float32)) for shape in shapes]
    sequence, sizes = LaunchSequence(seen([written((x, *made), (x, *made))], made), [x]), []
    allocate = sequence._allocate
    sequence._allocate = lambda size: sizes.append(size) or allocate(size)
    sequence.launch = lambda pointers, stream: None
    return sequence, sizes


def test_arrays_that_are_kept_together_share_memory(launched):
    """Apart from each other; one alone, and what nobody keeps, has memory of its own."""
    sequence, sizes = of([(3,), (200,), (5, 2), (7,)])
    sequence.keep([{1, 0}, {3}])
    pointers = [0]
    a, b, scratch, c = sequence.make(pointers)
    assert sizes == [512 + 1024, 512]
    assert [x.shape for x in (a, b, c)] == [(3,), (200,), (7,)]
    assert pointers[1:] == [a.data.ptr, a.data.ptr + 512, scratch.ptr, c.data.ptr]
    for n, x in enumerate((a, b, c)):
        x[...] = n
    assert [set(np.asarray(x)) for x in (a, b, c)] == [{0}, {1}, {2}]
    again = sequence.make([0])
    assert not any(np.shares_memory(x, y) for x in (a, b, c) for y in again if isinstance(y, np.ndarray))


def test_memory_that_is_held_is_no_array_and_takes_what_only_launches_read(launched):
    sequence, sizes = of([(100,), (300,), (50,)])
    sequence.keep([{0}], held={1, 0})
    pointers = [0]
    a, held, scratch = sequence.make(pointers)
    assert sizes == [1536 + 512]
    assert a.shape == (100,)
    assert held is scratch
    assert pointers[1:] == [a.data.ptr, held.ptr, held.ptr + 1536]


def test_little_that_only_launches_read_lies_beside_a_large_array(launched):
    for size, count in ((1024, 0), (100000, 1)):  # an array alone takes its memory itself
        sequence, sizes = of([(64, 1024), (size,)])
        sequence.keep([{0}])
        large, _ = sequence.make([0])
        assert large.shape == (64, 1024)
        assert sizes == ([262144 + 4096] if not count else [400384])


def test_a_part_of_an_array_is_found_in_another_array(launched, monkeypatch):
    """A pointer inside a dense array moves with it; one inside of none is not known."""
    monkeypatch.setattr(launch.cupy().cuda.driver, "launchKernel", lambda *how: None)
    x, y = stub(np.zeros((4, 8), np.float32)), stub(np.zeros(4, np.float32))
    inside = x[2:]
    sequence = LaunchSequence(seen([written((x, inside, y), (inside, y, x))], [y]), [x])
    pointers = [4096]
    (made,) = sequence.make(pointers)
    assert list(sequence._launches[0][0]) == [4096 + 64, made.data.ptr, 4096]
    with pytest.raises(LookupError):
        LaunchSequence(seen([written((x[1:], y), (x[1:], y))], [y]), [stub(np.zeros(4, np.float32))])


def test_a_thread_has_a_context_before_it_launches(launched, monkeypatch):
    """The driver needs one; a thread whose arrays come from a pool may not have called the runtime, which makes it."""
    bound, fired = threading.local(), []
    cuda = launch.cupy().cuda
    monkeypatch.setattr(cuda.runtime, "setDevice", lambda device: setattr(bound, "device", device))
    monkeypatch.setattr(cuda.driver, "launchKernel", lambda *how: fired.append(getattr(bound, "device", None)))
    x, y = (stub(np.zeros(4, np.float32)) for _ in range(2))
    sequence = LaunchSequence(seen([written((x, y), (y, x))], [y]), [x])
    for _ in range(2):
        thread = threading.Thread(target=lambda: [sequence.make([x.data.ptr]) for _ in range(2)])
        thread.start()
        thread.join()
    assert fired == [0] * 4


def test_a_constant_is_of_its_device_and_its_key(launched, monkeypatch):
    monkeypatch.setattr(constants, "_cached", {})
    monkeypatch.setattr(constants, "MOST", 3)
    made = []

    def make():
        made.append(stub(np.full(4, len(made), np.float32)))
        return made[-1]

    kept = {(key, where): constants.once(CUPY, key, where, make) for key in ("a", "b") for where in (0, 1)}
    assert len(made) == 4
    for (key, where), found in kept.items():
        same = constants.once(CUPY, key, where, make) is found
        assert same == ((key, where) != ("b", 1))  # as many as are kept: no more, and none is let go
    assert len(constants._cached) == 3
    assert constants.once(np, "a", 0, lambda: 5) == 5  # of NumPy arrays none
    assert constants.once(np, "a", 0, lambda: 6) == 6


def test_what_is_allocated_inside_is_recorded(launched):
    """By the recorder that is entered last, and by none outside."""
    xp = namespace(CUPY)
    xp.empty((2,), dtype=np.float32)
    with Recorder() as outer:
        a = xp.empty((3,), dtype=np.float32)
        with Recorder() as inner:
            b = xp.empty((4,), dtype=np.float32)
        c = xp.empty((5,), dtype=np.float32)
    xp.empty((6,), dtype=np.float32)
    assert [x is y for x, y in zip(outer.allocated, (a, c), strict=True)] == [True, True]
    assert inner.allocated[0] is b
    assert len(inner.allocated) == 1


def test_an_array_that_no_launch_takes_was_filled_by_something_else(launched):
    x, y, z = (stub(np.zeros(4, np.float32)) for _ in range(3))
    with pytest.raises(LookupError, match="allocated for something else"):
        LaunchSequence(seen([written((x, y), (x, y))], [y, z]), [x])
