"""Launch plans of the portable kernels of the delta rule. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ....runtime.cuda.elements import BYTES, ELEMENTS, Constants
from ....runtime.cuda.launch import Kernel
from ... import policy
from .. import shared_memory
from ..shared_memory import delta_chunk as chunk_length
from ..shared_memory import round_up

INVERSE, SCAN = "portable/delta_inverse.cu", "portable/delta_scan.cu"
REVERSE, GRADS = "portable/delta_scan_reverse.cu", "portable/delta_scan_grads.cu"
SEGMENTS = "portable/delta_scan_segments.cu"


class PortableDeltaKind(NamedTuple):
    """What a kernel is compiled for."""

    element: str
    K: int
    V: int
    align: int  # largest power of two that divides every row's address and length, in bytes
    decay: bool
    separate_erase_key: bool = False  # r is not k
    before: bool = False  # r reads the state before it decays
    cut: bool = False  # sequences are cut into segments
    capability: int = 80


def _constants(kind: PortableDeltaKind, **more: int) -> Constants:
    values = {
        "LA_DTYPE": ELEMENTS[kind.element], "LA_DECAY": int(kind.decay), "LA_REVERSE": 0,
        "LA_ALIGN": kind.align, "LA_K": kind.K, "LA_V": kind.V, "LA_C": chunk_length(kind.element),
        "LA_TILES": 1, "LA_SEPARATE_ERASE_KEY": int(kind.separate_erase_key), "LA_BEFORE": int(kind.before),
        "LA_STATE": shared_memory.delta_state(kind), "LA_INVERSE": shared_memory.delta_inverse_bytes(kind.element),
    }  # fmt: skip
    return tuple(sorted((values | more).items()))


def inverse_pass(kind: PortableDeltaKind) -> Kernel:
    """T_inv of every chunk."""
    C, shared = chunk_length(kind.element), shared_memory.delta_inverse(kind)
    constants = _constants(kind, LA_WARPS=C // 16, LA_SHARED=shared)
    return Kernel(INVERSE, "inverse", 2 * C, constants, shared)


OUTPUTS, WRITES, ADDS = 1, 0, 2  # what a scan computes: LA_OUTPUTS


class Cut(NamedTuple):
    """One way to partition a scan."""

    tiles: int  # of 16 value rows per warp
    blocks: int  # per multiprocessor
    stages: int
    queries: int  # buffers of the queries


NARROW = (Cut(1, 2, 2, 2), Cut(1, 2, 2, 1))
ALONE = (Cut(1, 1, 2, 2), Cut(1, 1, 2, 1), Cut(1, 1, 1, 1))
WIDE = Cut(2, 2, 2, 1)  # half as many warps read each operand from shared memory: for batches that fill the device


def chain_pass(kind: PortableDeltaKind, limit: int, reverse: bool = False, what: int = OUTPUTS) -> Kernel:
    """The scan, forward or in reverse, within `limit` bytes of shared memory."""
    wide = kind.element == "bfloat16" and kind.K <= 128 and kind.V > 64 and not kind.cut
    cuts: tuple[Cut, ...] = NARROW if kind.V <= 64 else ()
    if wide and kind.capability == 90:  # other architectures spill
        cuts = (WIDE,)
    cuts += ALONE
    for cut in cuts:
        how = _chain_pass(kind, reverse, what, cut)
        if how.shared <= (limit if cut.blocks == 1 else limit // 2 - 512):
            return how
    return _chain_pass(kind, reverse, what, ALONE[-1])


def _chain_pass(kind: PortableDeltaKind, reverse: bool, what: int, cut: Cut) -> Kernel:
    C, V, tiles = chunk_length(kind.element), kind.V, cut.tiles
    warps = 1
    while warps < 8 // tiles and warps * 16 * tiles < V:
        warps *= 2
    rows = 16 * tiles * warps
    reads = reverse or what == OUTPUTS  # the queries
    over_beta = kind.element == "float16" and what == (OUTPUTS if reverse else WRITES)
    shared = shared_memory.delta_chain(kind, warps, rows, cut, reads, over_beta)
    constants = _constants(
        kind,
        LA_WARPS=warps,
        LA_TILES=tiles,
        LA_RUN=16 if tiles > 1 or kind.element == "float32" else C,
        LA_STAGES=cut.stages,
        LA_QUERY_BUFFERS=cut.queries,
        LA_BLOCKS=cut.blocks,
        LA_SHARED=shared,
        LA_OUTPUTS=what,
    )
    parts = -(-V // rows) + (-(-kind.K // rows) if what == ADDS and not reverse else 0)
    return Kernel(REVERSE if reverse else SCAN, "reverse" if reverse else "scan", 32 * warps, constants, shared, parts)


def segments_pass(kind: PortableDeltaKind, reverse: bool) -> Kernel:
    """Initial states of segments, or in reverse their final gradients."""
    constants = _constants(kind, LA_REVERSE=int(reverse), LA_WARPS=8)
    return Kernel(SEGMENTS, "segments", 256, constants, 0, -(-kind.V // 16))


def segments(blocks: int, chunks: int, multiprocessors: int) -> int:
    """Number of segments of a sequence of `chunks` chunks, if the scan of a whole batch has `blocks` blocks.

    The offsets and transfer matrices of n segments take 2 n - 3 blocks each, which should all run at once.
    """
    places = multiprocessors // max(blocks, 1)
    return max(1, min(places, (places + 3) // 2, chunks // policy.SEGMENT_CHUNKS))


def grads_pass(kind: PortableDeltaKind, limit: int) -> Kernel:
    """All other gradients, one block per chunk; keys in pieces narrow enough for two resident blocks, or one."""
    C, narrow = chunk_length(kind.element), kind.element != "float32"
    # groups of warps, columns of a piece
    cuts = [(2, 64)] * (narrow and round_up(kind.K, 16) > 32) + [(2, 32), (1, 16)]
    sizes = {cut: shared_memory.delta_grads(kind, *cut) for cut in cuts}
    pair = [cut for cut in cuts[:-1] if 2 * (sizes[cut] + 1024) <= limit + 1024]
    groups, piece = next((cut for cut in pair or cuts if sizes[cut] <= limit), cuts[-1])
    shared = sizes[groups, piece]
    constants = _constants(
        kind, LA_WARPS=groups * C // 16, LA_PIECE=piece, LA_SHARED=shared, LA_BLOCKS=2 if pair else 1
    )
    return Kernel(GRADS, "grads", groups * C * 2, constants, shared)


def passes(kind: PortableDeltaKind, limit: int, gradients: bool) -> dict[str, Kernel]:
    """All launches of a call and its backward, by description."""
    kernels = {"inverse": inverse_pass(kind), "out": chain_pass(kind, limit)}
    if kind.cut:
        kernels["offsets of segments"] = chain_pass(kind, limit, what=ADDS)
        kernels["states of segments"] = segments_pass(kind, False)
    if gradients:
        kernels["new values"] = chain_pass(kind, limit, what=WRITES)
        kernels["dv"] = chain_pass(kind, limit, True)
        kernels["gradients"] = grads_pass(kind, limit)
    if gradients and kind.cut:
        kernels["dstate offsets of segments"] = chain_pass(kind, limit, True, ADDS)
        kernels["dstates of segments"] = segments_pass(kind, True)
    return kernels


@functools.cache
def too_large(element: str, K: int, V: int, limit: int, separate: bool = False) -> str | None:
    """Why tiles of these widths exceed `limit` bytes of shared memory per block; None if they fit."""
    if max(K, V) > policy.WIDEST_CUDA:
        return f"keys are {K} and values {V} wide, the kernels support up to {policy.WIDEST_CUDA}"
    kind = PortableDeltaKind(element, K, V, BYTES[element], True, separate, separate)
    need = max(how.shared for how in passes(kind, limit, True).values())
    return f"{K} x {V} {element} takes {need} bytes of shared memory, a block has {limit}" if need > limit else None
