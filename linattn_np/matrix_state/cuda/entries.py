"""Kernels of the core, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...runtime.cuda.elements import ELEMENTS
from ...runtime.cuda.entries import Entry
from ..types import Decay, Erase
from .delta.entries import delta_entries
from .free.entries import erase_vector_entries, free_entries
from .portable.entries import portable_entries
from .scan.entries import normaliser_entries, scan_entries
from .systems.entries import system_entries
from .token.entries import log_entries, recurrence_entries, step_entries
from .vector.entries import vector_backward_entries, vector_entries


def every_entry(
    dtype: str,
    K: int,
    V: int,
    capability: int,
    cell: tuple[Decay, Erase],
    backward: bool = True,
    raw: bool = False,
    states: Sequence[str] = ("float32",),
    log: bool = False,
) -> Iterator[Entry]:
    """Every kernel for key width K and value width V; raw: also those that normalise q and k of the delta rule.

    states: dtypes of states that are overwritten in place, or kinds of small states. log: also those of a StateLog.
    """
    decay, erase = cell
    vector, scalar = decay is Decay.VECTOR, decay is Decay.SCALAR
    how = (dtype, K, V, capability)
    if erase is Erase.NONE and not vector:
        yield from scan_entries(*how, scalar, backward)
        yield from normaliser_entries(dtype, K, V, scalar, backward)
        yield from system_entries(dtype, K, capability) if scalar else ()
    if erase is Erase.DELTA and vector:
        yield from erase_vector_entries(*how, backward)
    if erase is Erase.FREE and not scalar:
        yield from free_entries(*how, backward)
    if erase is not Erase.FREE and vector:
        for bonus in (False, True)[: 1 + (erase is Erase.NONE)]:
            yield from vector_entries(*how, erase, bonus, backward=backward)
            yield from vector_backward_entries(*how, erase, bonus) if backward else ()
            yield from portable_entries(*how, erase, bonus, backward)
    if dtype == "tf32":  # a few tokens and the delta rule are computed in float32
        return
    if backward and not scalar and (vector or erase is Erase.FREE):
        yield from recurrence_entries(dtype, K, V, erase is not Erase.NONE)
    if erase is Erase.DELTA and not vector:
        for unit in (False, True)[: 1 + raw]:
            yield from delta_entries(*how, scalar, backward, unit)
    for state in states:
        yield from step_entries(dtype, K, V, decay, erase, state) if state in ELEMENTS else ()
        yield from log_entries(K, V, decay, state) if log and erase is not Erase.FREE else ()
