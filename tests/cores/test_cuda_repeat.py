"""Launches that are written down and made again, and the arrays that are constant in them: no GPU."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import numpy as np
import pytest

from linattn_np import again
from linattn_np.cores.matrix_state.cuda_calls import Watched
from linattn_np.cuda import constants, launch
from linattn_np.cuda.repeat import Repeat, Seen
from tests.cores import test_cuda_step_calls as step_calls
from tests.cores.step_twin import CUPY, stub

launched = step_calls.launched


def written(arrays, pointers, first=b""):
    packed = first + b"".join(struct.pack("<q", y.data.ptr) for y in pointers)
    return launch.Written("double", "double", (), 1, 32, 0, packed, arrays)


def test_a_launch_whose_pointers_are_not_known_is_not_repeated(launched):
    x, y, z = (stub(np.zeros(4, np.float32)) for _ in range(3))
    good = Seen([written((x, None, y), (x, y))], [y])
    Repeat(good, [x])
    for bad in (
        Seen([written(None, (x, y))], [y]),  # which arrays it takes was not said
        Seen([written((x, y, z), (x, y, z))], [y]),  # z is nobody's
        Seen([written((x, y), (x,))], [y]),  # y is not among its arguments
        Seen([written((x, y), (x, y), b"\1\2\3\4")], [y]),  # nor where a pointer is looked for
        Seen([written((x, y), (x, y))], [y, y]),  # two arrays at one place
        Seen([written((x, y), (x, y))], [x, y]),
    ):
        with pytest.raises(LookupError):
            Repeat(bad, [x])
    with pytest.raises(LookupError):
        Repeat(good, [x, x])


def test_arrays_that_are_made_anew_and_constants_that_are_not(launched, monkeypatch):
    """Given arrays' pointers are told anew, those of constants stay, those of allocated arrays are of new ones."""
    fired = []
    cuda = launch.cupy().cuda
    monkeypatch.setattr(cuda.driver, "launchKernel", lambda *how: fired.append(how))
    monkeypatch.setattr(constants, "_kept", {})
    x, y, fixed = (stub(np.zeros(4, np.float32)) for _ in range(3))
    constants._kept["it"] = fixed
    assert constants.at(fixed.data.ptr) is fixed
    assert constants.at(x.data.ptr) is None
    repeat = Repeat(Seen([written((x, y, fixed), (y, fixed, x))], [y]), [x])
    other = stub(np.ones(4, np.float32))
    pointers = [other.data.ptr]
    made, = repeat(pointers)
    assert (made.shape, made.dtype) == (y.shape, y.dtype)
    assert made.data.ptr != y.data.ptr
    assert pointers == [other.data.ptr, made.data.ptr]
    assert list(repeat._launches[0]._words) == [made.data.ptr, fixed.data.ptr, other.data.ptr]
    assert fired[0][1:8] == (1, 1, 1, 32, 1, 1, 0)


def test_a_constant_is_of_its_device_and_its_key(launched, monkeypatch):
    monkeypatch.setattr(constants, "_kept", {})
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
    assert len(constants._kept) == 3
    assert constants.once(np, "a", 0, lambda: 5) == 5  # of NumPy arrays none
    assert constants.once(np, "a", 0, lambda: 6) == 6


def test_what_was_launched_around_a_core_belongs_to_its_call():
    """Launches before and after it are put in order with the arrays that each made."""
    a, b, c = (object() for _ in range(3))
    before, own, after = (written((), ())._replace(made=(y,)) for y in (a, b, c))
    kept = SimpleNamespace(saved=SimpleNamespace(starts=Watched("kept", Seen([own], [b]))))
    kept.saved._replace = lambda **new: SimpleNamespace(**new)
    kept._replace = lambda **new: SimpleNamespace(**new)
    seen = again.between([before], kept, [after]).saved.starts.seen
    assert seen.launches == [before, own, after]
    assert seen.made == [a, b, c]
    assert again.between([], kept, []) is kept
