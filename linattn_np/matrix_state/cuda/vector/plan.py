"""How the CUDA kernels of a vector decay are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ....runtime.cuda.elements import ELEMENTS, Constants
from ....runtime.cuda.launch import Kernel
from ... import policy
from .. import shared_memory

CHUNK, WIDEST = policy.GROUP_CHUNK, policy.WIDEST_GROUP  # tokens; columns of a tile
ALIGN = policy.ROW_BYTES // 2  # columns of 16 bits that every width is a multiple of
STATE = shared_memory.DELTA_STATE
MORE = 1, 2  # segments of a sequence between other ranks, with the delta rule (../neighbours.py)

KERNELS = {
    "scan": Kernel("vector/vector_scan.cu", "scan", 512),
    "adds": Kernel("vector/vector_adds.cu", "adds", 256),
    "segments": Kernel("vector/vector_segments.cu", "segments", 256),
    "segments in reverse": Kernel("vector/vector_segments.cu", "segments", 256),
    "inverse": Kernel("vector/vector_inverse.cu", "inverse", 256),
    "chain": Kernel("vector/vector_chain.cu", "chain", 512),
    "transfers": Kernel("vector/vector_transfers.cu", "transfers", 512),
}


class VectorKind(NamedTuple):
    """What the kernels of a call are compiled for."""

    K: int
    V: int
    gate: str  # dtype of the log decays: bfloat16 or float32
    before: bool = False  # queries read the previous state
    bonus: bool = False
    ragged: bool = False
    complement: bool = False  # keys are 1 - e^g: gradients of log decays have those through the keys in them


class Build(NamedTuple):
    """Which build of a kernel: of what was flagged; with residuals, or an inverse's factors, stored; with positions;
    with one reference a chunk; where a backward follows.
    """

    exact: bool = False
    keep: bool = False
    at: int = 0  # 2 of a ragged batch
    bounded: bool = False  # a scan whose gates are declared to be small
    two_term_keys: bool = False  # of a scan that a backward follows, or with config.training_bits


def takes(element: str, K: int, V: int, capability: int) -> bool:
    """Whether these kernels compute keys K and values V wide."""
    fits = element == "bfloat16" and capability == 90 and max(K, V) <= WIDEST and K % ALIGN == V % ALIGN == 0
    return fits and not policy.PORTABLE


@functools.cache
def constants(name: str, kind: VectorKind, build: Build = Build()) -> Constants:  # noqa: B008, a tuple
    """The constants of a kernel."""
    shared = shared_memory.vector(name, kind.gate, build.bounded, build.two_term_keys)
    stages = shared_memory.vector_stages(name, kind.gate, build.bounded)
    own: dict[str, int] = {}
    if name == "scan":
        own = {"LA_EXACT": build.exact}
    if name in ("scan", "chain"):
        own |= {"LA_RAGGED": kind.ragged}
    if build.at:
        own |= {"LA_AT": build.at}
    if name == "chain":
        own |= {"LA_KEEP": build.keep}
    if name in ("chain", "inverse", "transfers"):
        own |= {"LA_INVERSE": shared_memory.VECTOR_INVERSE}
    if name == "scan":
        own |= {"LA_KEEP": build.keep, "LA_BEFORE": kind.before, "LA_BONUS": kind.bonus}
        own |= {"LA_TWO_TERM_KEYS": build.two_term_keys}
        own |= {"LA_HANDED": shared_memory.VECTOR_HANDED}
        own |= {"LA_BOUNDED": True} if build.bounded else {}
    if name == "inverse":
        own |= {"LA_FACTORS": build.keep}
    most = policy.FACTORS_RESIDENT if name == "inverse" and build.keep else policy.VECTOR_RESIDENT.get(name, 1)
    resident = min(most, (policy.GROUP_SHARED + 1024) // (shared + 1024))
    return tuple(
        sorted(
            {
                "LA_DTYPE": 0,
                "LA_DECAY": 2,
                "LA_REVERSE": int(name == "segments in reverse"),
                "LA_GATE": ELEMENTS[kind.gate],
                "LA_ALIGN": policy.ROW_BYTES,
                "LA_K": kind.K,
                "LA_V": kind.V,
                "LA_C": CHUNK,
                "LA_WARPS": 8,
                "LA_TILES": 1,
                "LA_STAGES": stages,
                "LA_SHARED": shared,
                "LA_BLOCKS": resident,
                **{n: int(value) for n, value in own.items()},
            }.items()
        )
    )


def segments(slots: int, chunks: int, multiprocessors: int) -> int:
    """Pieces that sequences of `chunks` chunks are cut into; a block of the scan has a multiprocessor to itself."""
    return max(1, min(multiprocessors // max(slots, 1), chunks // policy.SEGMENT_CHUNKS))


def scan_blocks(traversals: int, segments: int, ragged: bool, multiprocessors: int) -> int:
    """Blocks of a scan: of as many steps each if sequences are equally long and there are more than multiprocessors."""
    return traversals if ragged or segments > 1 else min(traversals, multiprocessors)


def shares(traversals: int, chunks: int, blocks: int) -> tuple[int, int]:
    """Steps of each block of a scan, and how many blocks have one more (tile/share.cuh)."""
    return divmod(traversals * chunks, blocks) if blocks else (0, 0)


# the backward

REVERSE = Kernel("vector/backward/vector_reverse.cu", "reverse", 512)
GRADS = Kernel("vector/backward/vector_grads.cu", "grads", 256)
STRENGTHS = Kernel("vector/backward/vector_strengths.cu", "strengths", 256)
BONUS = Kernel("vector/backward/vector_bonus.cu", "bonus", 256)


def _common(kind: VectorKind, erase: bool) -> dict[str, int]:
    return {
        "LA_DTYPE": 0, "LA_K": kind.K, "LA_V": kind.V, "LA_GATE": ELEMENTS[kind.gate], "LA_BEFORE": int(kind.before),
        "LA_BONUS": int(kind.bonus), "LA_WARPS": 8, "LA_END": shared_memory.vector_state(erase),
        "LA_ENDS": shared_memory.vector_ends(erase), "LA_GRAM": shared_memory.vector_gram(erase),
        "LA_INVERSE": shared_memory.VECTOR_INVERSE, "LA_ERASE": int(erase),
    }  # fmt: skip


@functools.cache
def reverse_constants(kind: VectorKind, erase: bool = False, adds: bool = False, at: int = 0) -> Constants:
    """The constants of vector_reverse.cu; adds: what a segment adds to the gradient before it; at: positions."""
    more = {"LA_ADDS": int(adds), "LA_SHARED": shared_memory.vector_reverse(erase)} | ({"LA_AT": at} if at else {})
    return tuple(sorted({**_common(kind, erase), **more}.items()))


@functools.cache
def grads_constants(kind: VectorKind, erase: bool = False, exact: bool = False, dq: str = "bfloat16") -> Constants:
    """The constants of vector_grads.cu; exact: for chunks that decay too far for scaled copies. dq: its dtype."""
    more = {"LA_EXACT": int(exact), "LA_SHARED": shared_memory.vector_gradients(erase, exact)}
    more |= {"LA_DQ": ELEMENTS[dq]} if dq != "bfloat16" else {}
    more |= {"LA_COMPLEMENT": 1} if kind.complement else {}
    return tuple(sorted({**_common(kind, erase), **more}.items()))


@functools.cache
def small_constants(kind: VectorKind, erase: bool) -> Constants:
    """The constants of vector_strengths.cu and vector_bonus.cu."""
    return tuple(sorted(_common(kind, erase).items()))


def halves(K: int) -> int:
    """Parts of the key channels that the gradients take one by one."""
    return -(-K // shared_memory.PANEL)
