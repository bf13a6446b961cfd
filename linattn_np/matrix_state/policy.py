"""Thresholds and sizes of the matrix-state core, each with its reason: the defaults of form and chunk size.

The form depends only on the length of the sequence, the chunk size only on the library: the same sequence gives the
same bits alone, in a batch and in a ragged batch.
"""

from __future__ import annotations

from typing import Any

import array_api_compat as compat

from .types import Plan

# chunks

ARRAY_CHUNK = 64  # tokens of a chunk in array calls, and of a tile of the parallel form
NUMPY_CHUNK = 32  # the same on NumPy: work quadratic in the chunk costs more than short products
CPU_CHUNK = 32  # tokens of a chunk of the compiled loops
LONGEST_CPU_CHUNK = 128  # longest chunk of the compiled loops

# longest sequences that use the recurrent form by default

SHORT_ARRAY = 4  # array calls: up to here the recurrence costs less than the set-up of a chunk
SHORT_CPU = 31  # compiled loops: less than a chunk
SHORT_CPU_PLAIN = 15  # the same where a chunk is cheap: no erase, and decay NONE or SCALAR
SHORT_CUDA = 16  # CUDA kernels: one kernel that reads the state once, against two or three for chunks

WIDEST_CUDA = 256  # largest key and value width of the CUDA kernels
SAVED_BLOCKS = "LINATTN_CUDA_SAVED_BLOCKS"  # in the environment: most MiB of checkpoints that a CUDA forward saves


def array_chunk(plan: Plan, T: int) -> int:
    """C of array calls; the parallel form uses tiles of the default length."""
    return ARRAY_CHUNK if is_parallel(plan, T) else int(plan.chunk_size or default_array_chunk(plan))


def default_array_chunk(plan: Plan) -> int:
    """The default C of array calls."""
    return NUMPY_CHUNK if compat.is_numpy_namespace(plan.xp) else ARRAY_CHUNK


def in_chunks(plan: Plan) -> Plan:
    """The plan of a call with backend="chunks": the chunk form for any number of tokens."""
    return plan if plan.chunk_size is not None else plan._replace(chunk_size=default_array_chunk(plan))


def is_parallel(plan: Plan, T: int) -> bool:
    """Whether array calls use the parallel form: requested, or a chunk above ARRAY_CHUNK that holds all T tokens."""
    C: Any = plan.chunk_size
    return C == "parallel" or (isinstance(C, int) and C > ARRAY_CHUNK and C >= T)


def is_short(plan: Plan, T: int) -> bool:
    """Whether array calls use the recurrent form for T tokens by default."""
    return plan.chunk_size is None and T <= SHORT_ARRAY


def cpu_chunk(plan: Plan, T: int) -> int:
    """C of the compiled loops, at most T."""
    C: Any = plan.chunk_size
    return max(1, min(C if isinstance(C, int) and C > 1 else CPU_CHUNK, T))


def is_short_cuda(plan: Plan) -> bool:
    """Whether the CUDA kernels use the recurrent form: chunk_size=1, or by default for few tokens."""
    if plan.chunk_size is None:
        return max((s.stop - s.start for s in plan.sequences), default=0) <= SHORT_CUDA
    return plan.chunk_size == 1
