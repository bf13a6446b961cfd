"""The passes by warpgroup products, of devices of compute capability 90. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
import os

from .cuda_plan import MARK, PANEL, SCAN_WGMMA, WRITES, Pass, round_up

CHUNK = 64
SHARED = 227 * 1024  # bytes of shared memory of a block, and 1024 less than a multiprocessor has
NARROWEST, WIDEST = 33, 128  # narrower than half a panel wastes most of it; wider leaves no registers
PORTABLE = "LINATTN_CUDA_PORTABLE"  # in the environment: 1 takes the portable passes, for measuring


def takes(element: str, K: int, V: int, capability: int) -> bool:
    """Whether these passes compute keys K and values V wide."""
    fits = element == "bfloat16" and capability == 90 and min(K, V) >= NARROWEST and max(K, V) <= WIDEST
    return fits and os.environ.get(PORTABLE, "0") in ("", "0")


def takes_writes(K: int, V: int) -> bool:
    """Whether dk and dv come from one pass."""
    return round_up(K, PANEL) == round_up(V, PANEL) <= 2 * PANEL


@functools.cache
def scan_pass(
    K: int, V: int, align: int, decay: bool, reverse: bool = False, outputs: bool = True, dots: bool = False
) -> Pass:
    """The constants of scan_wgmma.cu for keys K and values V wide."""
    groups = 1 if V <= PANEL else 2  # of 64 value columns
    warps, rows, keys = 4 * groups, PANEL * groups, round_up(K, PANEL)
    stage = CHUNK * 2 * (keys * (1 + outputs) + rows * (1 + dots))
    rest = outputs * CHUNK * CHUNK * 2 + warps * 3 * CHUNK * 4 + dots * (warps + 1) * CHUNK * 4
    registers = keys // 2 + (136 if dots else 104 if outputs else 64)  # a thread, about
    resident = max(1, min(4, 65536 // (32 * warps * registers)))
    stages, shared = 0, 0
    while resident and not stages:
        for n in (3, 2):
            shared = round_up(n * (stage + CHUNK * 4), 1024) + rest
            if shared <= SHARED and resident * (shared + 1024) <= SHARED + 1024:
                stages = n
                break
        else:
            resident -= 1
    return _pass(SCAN_WGMMA, K, V, align, decay, reverse, outputs, dots, warps, stages, shared, resident)


@functools.cache
def writes_pass(K: int, V: int, align: int, decay: bool) -> Pass:
    """The constants of writes_wgmma.cu, dk and dv in one pass; the gradient of the gates where there is a decay."""
    width = round_up(K, PANEL)
    warps, stages = width // 16, 2
    shared = stages * (4 * CHUNK * width * 2 + CHUNK * 4) + width * width * 2 + 2 * CHUNK * CHUNK * 2
    shared += warps * 3 * CHUNK * 4 + decay * (warps + 1) * CHUNK * 4 + 128
    return _pass(WRITES, K, V, align, decay, True, True, decay, warps, stages, shared, 1 if width > PANEL else 2)


def _pass(
    file: str, K: int, V: int, align: int, decay: bool, reverse: bool, outputs: bool, dots: bool, warps: int,
    stages: int, shared: int, resident: int,
) -> Pass:
    constants = {
        "LA_DTYPE": 0, "LA_DECAY": int(decay), "LA_REVERSE": int(reverse), "LA_ALIGN": align, "LA_K": K, "LA_V": V,
        "LA_C": CHUNK, "LA_WARPS": warps, "LA_TILES": 1, "LA_STAGES": stages, "LA_OUTPUTS": int(outputs),
        "LA_DOTS": int(dots), "LA_MARK": MARK, "LA_SHARED": shared, "LA_BLOCKS": resident,
    }
    parts = 1 if file == WRITES else -(-V // (16 * warps))
    return Pass(file, tuple(sorted(constants.items())), shared, 32 * warps, parts, CHUNK)
