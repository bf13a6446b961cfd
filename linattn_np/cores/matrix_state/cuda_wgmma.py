"""The passes by warpgroup products, of devices of compute capability 90. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
import os

from .cuda_plan import MARKS, Pass, round_up

SCAN, ADDS = "matrix_state/scan_wgmma.cu", "matrix_state/adds_wgmma.cu"
WRITES = "matrix_state/writes_wgmma.cu"  # dk and dv in one pass
CHUNK, PANEL = 64, 64  # tokens of a chunk; columns of a panel
SHARED = 227 * 1024  # bytes of shared memory of a block, and 1024 less than a multiprocessor has
NARROWEST, WIDEST = 40, 128  # narrower than half a panel wastes most of it; a wider state leaves no registers
ALIGN = 16  # bytes that every row's address and length are a multiple of
TOKEN_FLOATS = CHUNK * 4  # bytes of one number a token
DECAY = 4 * TOKEN_FLOATS + 16  # bytes of a stage's sums of decays
# 1 takes the portable passes, for measuring; read once, since calls that are made again (again.py) do not look
PORTABLE = os.environ.get("LINATTN_CUDA_PORTABLE", "0") not in ("", "0")


def takes(element: str, K: int, V: int, align: int, capability: int) -> bool:
    """Whether these passes compute keys K and values V wide, in rows that are aligned to `align` bytes."""
    fits = element == "bfloat16" and capability == 90 and align == ALIGN
    fits = fits and all(NARROWEST <= width <= WIDEST and width % 8 == 0 for width in (K, V))
    return fits and not PORTABLE


def takes_writes(K: int, V: int) -> bool:
    """Whether dk and dv come from one pass."""
    return round_up(K, PANEL) == round_up(V, PANEL)


@functools.cache
def scan_pass(
    K: int, V: int, decay: bool, reverse: bool = False, outputs: bool = True, dots: bool = False
) -> Pass:
    """The constants of scan_wgmma.cu, or of adds_wgmma.cu without outputs, for keys K and values V wide."""
    groups, keys = round_up(V, PANEL) // PANEL, round_up(K, PANEL)
    stage = CHUNK * 2 * (keys * (1 + outputs) + PANEL * groups * (1 + dots))
    rest = outputs * groups * CHUNK * CHUNK * 2 + dots * 4 * groups * TOKEN_FLOATS + 64
    each, resident = stage + DECAY + 16, 3 - groups
    stages = next(n for n in (6, 4, 3, 2) if resident * (n * each + rest + 1024) <= SHARED + 1024)
    file = SCAN if outputs else ADDS
    return _pass(file, K, V, decay, reverse, dots, groups, stages, stages * each + rest, resident)


@functools.cache
def writes_pass(K: int, V: int, decay: bool, dots: bool) -> Pass:
    """The constants of writes_wgmma.cu, dk and dv in one pass; dots: also what the gradient of the gates is made of."""
    width, stages = round_up(K, PANEL), 2
    groups = width // PANEL
    shared = stages * (4 * CHUNK * width * 2 + DECAY + 16) + width * width * 2 + 2 * CHUNK * CHUNK * 2 + 112
    shared += dots * 4 * groups * TOKEN_FLOATS
    return _pass(WRITES, K, V, decay, True, dots, groups, stages, shared, 3 - groups)


def _pass(
    file: str, K: int, V: int, decay: bool, reverse: bool, dots: bool, groups: int, stages: int, shared: int,
    resident: int,
) -> Pass:
    constants = {
        "LA_DTYPE": 0, "LA_DECAY": int(decay), "LA_REVERSE": int(reverse), "LA_ALIGN": ALIGN, "LA_K": K, "LA_V": V,
        "LA_C": CHUNK, "LA_WARPS": 4 * groups, "LA_TILES": 1, "LA_STAGES": stages, "LA_OUTPUTS": int(file != ADDS),
        "LA_DOTS": int(dots), "LA_MARK": MARKS["bfloat16"], "LA_SHARED": shared, "LA_BLOCKS": resident,
    }
    threads = 128 * groups + 128  # one group more fills the ring
    return Pass(file, tuple(sorted(constants.items())), shared, threads, 1, CHUNK, groups, 4)
