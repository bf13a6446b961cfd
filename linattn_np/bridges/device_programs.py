"""Programs on a CUDA device: recorded launches on the buffers of the framework, or the CuPy path on views of them.

A program whose launches are all that it does on the device is recorded when it is compiled: one call, and one pullback,
on arrays of zeros. At run time the launches take the framework's buffers: the results, the residuals and whatever else
the call allocates are outputs of the operation. Nothing is allocated, copied or waited for, so that the framework can
capture the operation in a CUDA graph. Other programs compute with CuPy, copy their results into the buffers and save
no residuals.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from ..call.binding import is_cut
from ..runtime.arrays import CUDA, Array
from ..runtime.cuda import launch
from ..runtime.cuda.record import LaunchSequence, View, view_of
from ..runtime.recorder import Recorder
from ..runtime.shapes import flatten
from .linearise import Linearised, computed_call, prepared
from .programs import KEY, Program, SavedArrays, unleaves
from .shapes import Abstract


class Recorded(NamedTuple):
    """Launches: `places` says which output of the operation each array is that the call allocated."""

    sequence: LaunchSequence
    places: tuple[int, ...]
    scratch: tuple[Abstract, ...]  # after the outputs of the program


class DeviceCall(NamedTuple):
    """A call while it is recorded."""

    given: list[Array]
    recorder: Recorder
    linearised: Linearised
    results: list[Array]


class DeviceProgram(Program):
    """A call of one signature on arrays of these shapes and dtypes on a CUDA device."""

    can_map = False  # the residuals of a batch are not checked at run time

    @functools.cached_property
    def recorded(self) -> dict[str, Recorded]:
        """The functions of the program that are recorded."""
        self.device, found = launch.current_device(), {}
        with contextlib.suppress(LookupError, ValueError, ArithmeticError):  # a call may reject zeros
            found["forward"] = self._forward(self._call(False))
        with contextlib.suppress(LookupError, ValueError, ArithmeticError):
            call = self._call(True)
            found["saving"], found["backward"] = self._with_pullback(call)
        return found

    @functools.cached_property
    def saved(self) -> SavedArrays | None:
        """The residuals; None if a backward begins with the forward."""
        return self._saved if "backward" in self.recorded else None

    def is_recorded(self, kind: str) -> bool:
        """Whether a function of the program is launches alone."""
        return ("backward" if kind == "pullback" else kind) in self.recorded

    def scratch(self, kind: str) -> tuple[Abstract, ...]:
        """Outputs of the operation that are no results."""
        if not self.is_recorded(kind):
            return ()
        if kind == "pullback":
            return (*self.saving_results[:-1], *self.scratch("saving"), *self.scratch("backward"))
        return self.recorded[kind].scratch

    def launch(self, kind: str, out: Sequence[int], given: Sequence[int], stream: int) -> None:
        """Launch on pointers."""
        if kind == "pullback":
            self._launch_pullback(out, given, stream)
            return
        sequence, places, _ = self.recorded[kind]
        if kind == "backward":
            at = len(given) - len(self.results) - 1  # the key
            given = [*given[:at], *given[at + 1 :]]
        sequence.launch([*given, *(out[n] for n in places)], stream)

    def _launch_pullback(self, out: Sequence[int], given: Sequence[int], stream: int) -> None:
        """The launches of `saving`, then of `backward`; between them 0 stands for the key."""
        count = len(self.given)
        arrays, cotangents, grads, memory = given[:count], given[count:], out[:count], out[count:]
        saved = len(self.saving_results) - 1
        scratch = saved + len(self.scratch("saving"))
        self.launch("saving", [*memory[:saved], 0, *memory[saved:scratch]], arrays, stream)
        saved_results, extras = [memory[n] for n in self.saved_results], memory[len(self.results) : saved]
        self.launch("backward", [*grads, *memory[scratch:]], [*arrays, *saved_results, *extras, 0, *cotangents], stream)

    def _call(self, gradients: bool) -> DeviceCall:
        """A call on zeros.   Raises LookupError if it cannot be recorded."""
        given = [launch.cupy().zeros(x.shape, x.dtype) for x in self.given]
        call = prepared(self.signature.spec, self.signature.keywords(given), gradients)
        options = call.options
        parts = options["reverse"] or options["check"] or options["return_states_at"] is not None
        if parts or is_cut(call) or call.recorder is None:
            raise LookupError("a call of several parts")
        linearised, found, _ = computed_call(call)
        return DeviceCall(given, call.recorder, linearised, list(self._public(found)))

    def _forward(self, call: DeviceCall) -> Recorded:
        return _recorded(call, [_place(x, call.recorder.allocated) for x in call.results], self.results)

    def _with_pullback(self, call: DeviceCall) -> tuple[Recorded, Recorded]:
        """(saving, backward); sets `saved`."""
        allocated = call.recorder.allocated
        at = [_place(x, allocated) for x in call.results]
        cotangents, recorder = [launch.cupy().zeros(x.shape, x.dtype) for x in self.results], Recorder()
        d = unleaves(self.result, iter(cotangents))
        dout, dstate = (*d, None)[:2] if self.is_several else (d, None)
        grads = call.linearised.gradients(dout, dstate, recorder)._asdict()
        grads |= flatten("state", grads["state"])
        taken = {y.data.ptr for one in recorder.launches for y in one.arrays or () if y is not None}
        held = [n for n, x in enumerate(allocated) if x.data.ptr in taken]
        saved_results, others = [n for n, place in enumerate(at) if place in held], [n for n in held if n not in at]
        read = [*call.given, *(allocated[at[n]] for n in saved_results), *(allocated[n] for n in others), *cotangents]
        pullback = DeviceCall(read, recorder, call.linearised, [grads[n] for n in self.signature.names])
        backward = _recorded(pullback, [_place(x, recorder.allocated) for x in pullback.results], self.given)
        extras = tuple(_abstract(allocated[n]) for n in others)
        self._saved = SavedArrays(None, tuple(saved_results), extras, None)
        return _recorded(call, [*at, *others], (*self.results, *extras, KEY)), backward


def _recorded(call: DeviceCall, at: list[int], outputs: Sequence[Abstract]) -> Recorded:
    """at: the positions of the first outputs among the allocated arrays; the other allocated arrays are scratch."""
    allocated = call.recorder.allocated
    if len(set(at)) < len(at):
        raise LookupError("two results are one array")
    rest = [n for n in range(len(allocated)) if n not in at]
    places = {n: place for place, n in enumerate(at)} | {n: len(outputs) + i for i, n in enumerate(rest)}
    sequence = LaunchSequence(call.recorder, call.given)
    return Recorded(
        sequence, tuple(places[n] for n in range(len(allocated))), tuple(_abstract(allocated[n]) for n in rest)
    )


def _place(x: Array, pool: list[Array]) -> int:
    """The position of a dense array in a pool.   Raises LookupError."""
    view = view_of(x, pool)
    if type(view) is not View or view.axis:
        raise LookupError("a result in another order")
    return view.of


def _abstract(x: Array) -> Abstract:
    return Abstract(tuple(x.shape), np.dtype(x.dtype))


# buffers


def available() -> bool:
    """Whether CuPy is installed."""
    return find_spec("cupy") is not None


def device_of(buffer: Any) -> int | None:
    """The CUDA device of a buffer; None on a CPU."""
    kind, number = buffer.__dlpack_device__()
    return number if int(kind) == CUDA else None


_capsule = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))  # fmt: skip
_address = ctypes.c_void_p.from_address


def pointer(buffer: Any) -> int:
    """The address of a device buffer, with which a DLManagedTensor begins.

    `__cuda_array_interface__` raises for bfloat16, and an error of JAX takes 10 us; this 0.7.
    """
    return _address(_capsule(buffer.__dlpack__(), b"dltensor")).value or 0


def view(buffer: Any, device: int) -> Array:
    """A device buffer as a CuPy array."""
    cupy = launch.cupy()
    shape, dtype = tuple(buffer.shape), np.dtype(buffer.dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    if not size:
        return cupy.empty(shape, dtype)
    memory = cupy.cuda.UnownedMemory(pointer(buffer), size, buffer, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


class _Stream:
    """A stream by its address."""

    def __init__(self, address: int):
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


@functools.lru_cache(maxsize=64)
def _stream(address: int, device: int) -> Any:
    return launch.cupy().cuda.Stream.from_external(_Stream(address))


@contextlib.contextmanager
def current(device: int, stream: int) -> Iterator[None]:
    """Device and stream of the framework, for CuPy."""
    with launch.cupy().cuda.Device(device), _stream(stream, device):
        yield


def execute(program: Program, kind: str, place: tuple[int, int], out: Sequence[Any], given: Sequence[Any]) -> None:
    """One function of a program on buffers of a device; place: the device, the stream."""
    device, stream = place
    if isinstance(program, DeviceProgram) and program.is_recorded(kind) and program.device == device:
        program.launch(kind, [pointer(x) for x in out], [pointer(x) for x in given], stream)
        return
    with current(device, stream):
        getattr(program.unsaved, kind)([view(x, device) for x in out], [view(x, device) for x in given])
