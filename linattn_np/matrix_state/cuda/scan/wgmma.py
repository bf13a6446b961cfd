"""Launch plans of the passes with warpgroup products (compute capability 90). Pure functions of dtype and shape."""

from __future__ import annotations

import functools

from ....runtime.cuda.launch import Kernel
from ... import policy
from .. import shared_memory
from ..shared_memory import PANEL, round_up

SCAN, ADDS = "scan/scan_wgmma.cu", "scan/adds_wgmma.cu"
WRITES = "scan/writes_wgmma.cu"  # one pass for dk and dv
LEVELS = "scan/levels_wgmma.cu"
ENTRIES = {WRITES: "writes", LEVELS: "levels"}


def takes(element: str, K: int, V: int, align: int, capability: int) -> bool:
    """Whether these passes support key width K and value width V in rows aligned to `align` bytes."""
    fits = element == "bfloat16" and capability == 90 and align == policy.ROW_BYTES
    fits = fits and all(policy.NARROWEST_GROUP <= width <= policy.WIDEST_GROUP and width % 8 == 0 for width in (K, V))
    return fits and not policy.PORTABLE


def takes_writes(K: int, V: int) -> bool:
    """Whether one pass computes dk and dv."""
    return round_up(K, PANEL) == round_up(V, PANEL)


@functools.cache
def scan_pass(
    K: int, V: int, decay: bool, reverse: bool = False, outputs: bool = True, dots: bool = False, at: int = 0
) -> Kernel:
    """The constants of scan_wgmma.cu, or without outputs of adds_wgmma.cu, for key width K and value width V."""
    groups = round_up(V, PANEL) // PANEL
    sizes = {n: shared_memory.scan_wgmma(K, groups, n, outputs, dots) for n in (6, 4, 3, 2)}
    stages = next(n for n, size in sizes.items() if (3 - groups) * (size + 1024) <= policy.GROUP_SHARED + 1024)
    flags = {"LA_REVERSE": reverse, "LA_OUTPUTS": outputs, "LA_DOTS": dots} | _positions(at)
    return _pass(SCAN if outputs else ADDS, K, V, decay, groups, stages, sizes[stages], flags)


@functools.cache
def writes_pass(K: int, V: int, decay: bool, dots: bool, at: int = 0) -> Kernel:
    """The constants of writes_wgmma.cu; dots: it also computes the terms of the gate gradient.

    at: it adds gradients of states at positions, as scan_pass stores these states.
    """
    width, stages = round_up(K, PANEL), 2
    shared = shared_memory.writes_wgmma(width, width // PANEL, stages, dots)
    flags = {"LA_REVERSE": True, "LA_OUTPUTS": True, "LA_DOTS": dots} | _positions(at)
    return _pass(WRITES, K, V, decay, width // PANEL, stages, shared, flags)


@functools.cache
def level_pass(K: int, V: int, decay: bool, reverse: bool = False, dots: bool = False) -> Kernel:
    """The constants of levels_wgmma.cu for key width K and value width V."""
    groups = round_up(V, PANEL) // PANEL
    sizes = {n: shared_memory.levels_wgmma(K, groups, n, dots) for n in (6, 4, 3, 2)}
    stages = next(n for n, size in sizes.items() if (3 - groups) * (size + 1024) <= policy.GROUP_SHARED + 1024)
    flags: dict[str, int] = {"LA_REVERSE": reverse, "LA_OUTPUTS": True, "LA_DOTS": dots}
    return _pass(LEVELS, K, V, decay, groups, stages, sizes[stages], flags)


def _positions(at: int) -> dict[str, int]:
    """The constant of a build with positions."""
    return {"LA_AT": at} if at else {}


def _pass(
    file: str, K: int, V: int, decay: bool, groups: int, stages: int, shared: int, flags: dict[str, int]
) -> Kernel:
    resident = 3 - groups
    constants = {
        "LA_DTYPE": 0, "LA_DECAY": int(decay), "LA_ALIGN": policy.ROW_BYTES, "LA_K": K, "LA_V": V,
        "LA_C": policy.GROUP_CHUNK, "LA_WARPS": 4 * groups, "LA_TILES": 1, "LA_STAGES": stages,
        "LA_MARK": policy.MARK_TOKENS["bfloat16"], "LA_MARK_BYTES": shared_memory.mark_bytes(K, 1, True),
        "LA_SHARED": shared, "LA_BLOCKS": resident,
        **{name: int(value) for name, value in flags.items()},
    }  # fmt: skip
    threads = 128 * groups + 128  # a producer warpgroup copies tiles
    return Kernel(file, ENTRIES.get(file, "scan"), threads, tuple(sorted(constants.items())), shared)
