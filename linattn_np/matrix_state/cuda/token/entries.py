"""Kernels of a few tokens, and of gradients token by token, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator

from ....runtime.cuda.entries import Entry
from ...policy import WIDEST_CUDA
from ...types import Decay, Erase
from . import gradients_plan as plan
from . import log
from . import plan as steps


def step_entries(dtype: str, K: int, V: int, decay: Decay, erase: Erase, state: str = "float32") -> Iterator[Entry]:
    """The kernels of a few tokens for one kind of decay and erase, with states overwritten in place."""
    wide, stored = K % 4 == V % 4 == 0, "" if state == "float32" else f", a state in {state}"

    def step(
        words: str, separate: bool = False, before: bool = False, read: int = 1, bonus: bool = False
    ) -> Iterator[Entry]:
        kind = steps.StepKind(K, V, decay, False, erase, separate, before, read, bonus)
        seen = set()
        for one, many in ((False, False), (True, False), (True, True)) if wide else ((False, False),):
            constants = steps.step_constants(kind, steps.Stored(dtype, wide, one, state, state, many))
            if constants not in seen:
                seen.add(constants)
                tokens = ("one token" if one else "a few tokens") + " of many states" * many
                yield Entry(f"{tokens}{words}{stored}", steps.STEP, constants)

    yield from step("")
    if erase is Erase.DELTA and decay is Decay.SCALAR:
        yield from step(", an erase vector that reads the undecayed state", separate=True, before=True)
    if erase is Erase.NONE and decay is Decay.VECTOR:
        yield from step(", read before the write with a bonus", read=2, bonus=True)


def log_entries(K: int, V: int, decay: Decay, state: str) -> Iterator[Entry]:
    """The kernels of a StateLog, of erase terms that write one row; state: a dtype, or the kind of a SmallState."""
    if max(K, V) <= WIDEST_CUDA:
        constants = log.constants_of(K, V, K if decay is Decay.VECTOR else 1, state, V % 4 == 0)
        yield Entry(f"tokens after a log, states in {state}", log.FILE, constants)


def recurrence_entries(dtype: str, K: int, V: int, erase: bool, bonus: bool = False) -> Iterator[Entry]:
    """The kernels of gradients token by token, with log decays in float32."""
    kind = plan.RecurrenceKind(K, V, dtype, "float32", erase, bonus, bonus, K % 4 == V % 4 == 0)
    for name, kernel in (("values", plan.VALUES), ("channels", plan.CHANNELS)):
        for back in (False, True):
            if name == "channels" or back or erase:
                constants = plan.constants(name, kind, back)
                words = f"gradients token by token, {name}{', from the last token' * back}"
                yield Entry(words, kernel.file, constants)
