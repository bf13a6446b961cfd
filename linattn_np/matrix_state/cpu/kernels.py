"""The kernels with the optional pieces of each kind of call: what a call compiles, and what warmup compiles ahead."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ops.cpu import array_calls, rounding, storage
from ...runtime.pieces.piece import load_pieces
from ...runtime.pieces.workspace import CHANNEL, CHANNELS, STORAGE
from ..types import Decay, Erase
from . import averages, chunk, chunk_vjp, decay, decay_vjp, l2norm, maps, value_decay
from .backward import backward, reverse
from .forward import forward
from .layout import Cell
from .table import STORAGES

VECTOR = (decay.channel_tables, decay.channel_gram)
VECTOR_VJP = (decay_vjp.channel_gate_vjp, decay_vjp.channel_gram_vjp)
MAPS = (maps.load_map, maps.features)
AVERAGES = (averages.load_z, averages.save_z, averages.find_averages, averages.add_keys)
AVERAGES_VJP = (averages.averages_vjp, averages.read_z_vjp, averages.add_weights, averages.add_dz)
VALUE_VJP = tuple(x for name, x in vars(value_decay).items() if "value_" in name)


def groups() -> dict[str, tuple[Any, ...]]:
    """All kernels and optional pieces, by what they are for."""
    from .recurrent import features, step  # whose package imports this module, as the next does
    from .systems import solve_systems

    return {
        "chunks": (forward,), "other dtypes of inputs": (storage.load_converted, storage.load_column_converted),
        "gradients": (backward, reverse, chunk_vjp.delta_vjp, chunk_vjp.free_vjp),
        "vector decay": (*VECTOR, *VECTOR_VJP), "free erase": (chunk.write_free,),
        "bonus": (chunk.bonus, chunk.bonus_vjp), "feature maps": (*MAPS, maps.features_vjp, *features.OF_MAPS),
        "averages": (*AVERAGES, *AVERAGES_VJP, *features.OF_AVERAGES), "decay on the value axis": VALUE_VJP,
        "few tokens": (step.step_tasks, step.write_faded, step.write_free, step.load_bonus),
        "conjugate gradients": (solve_systems,), "l2 norms": (l2norm.divided, l2norm.divided_vjp),
        "array calls": (array_calls.array_calls, step.step_between), "16-bit results": tuple(rounding.ROUNDED.values()),
    }  # fmt: skip


def compile_group(pieces: tuple[Any, ...], dtype: str) -> None:
    """Compile and load pieces for a dtype."""
    load_pieces(pieces, dtype, optional=False)


def storage_pieces(numbers: np.ndarray, dtype: str) -> tuple[Any, ...]:
    """What arrays need that `load` cannot copy: another dtype than that of the computation, or numbers apart.

    numbers: rows of the table of arrays, zeros for those that a call does not have.
    """
    own = (numbers[:, STORAGE] == STORAGES[dtype]) & (numbers[:, CHANNEL] == np.dtype(dtype).itemsize)
    return () if (own | (numbers[:, CHANNELS] == 0)).all() else (storage.load_converted, storage.load_column_converted)


def optional_of(cell: Cell) -> tuple[Any, ...]:
    """The optional pieces of a kind of call, forward."""
    found: tuple[Any, ...] = VECTOR if cell.decay is Decay.VECTOR else ()
    found += (chunk.write_free,) if cell.erase is Erase.FREE else ()
    found += (chunk.bonus,) if cell.bonus else ()
    found += MAPS if cell.features is not None else ()
    return (*found, *AVERAGES) if cell.averaged else found


def optional_vjp(cell: Cell) -> tuple[Any, ...]:
    """The optional pieces of its adjoint."""
    found = optional_of(cell) + (VECTOR_VJP if cell.decay is Decay.VECTOR else ())
    if cell.erase is not Erase.NONE:
        found += (chunk_vjp.delta_vjp if cell.erase is Erase.DELTA else chunk_vjp.free_vjp,)
    found += (chunk.bonus_vjp,) if cell.bonus else ()
    found += (maps.features_vjp,) if cell.features is not None else ()
    found += AVERAGES_VJP if cell.averaged else ()
    return (*found, *VALUE_VJP) if cell.value_decay else found
