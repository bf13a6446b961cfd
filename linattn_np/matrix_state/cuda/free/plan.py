"""How the CUDA kernels of erase FREE are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ....runtime.cuda.elements import ELEMENTS, Constants
from ....runtime.cuda.launch import Kernel
from ... import policy
from .. import shared_memory
from ..shared_memory import PANEL, round_up
from ..vector.plan import ALIGN, CHUNK

FACTORS, CHAIN, GRADS, EXACT_GRADS = "factors", "chain", "grads", "exact grads"
KERNELS = {
    FACTORS: Kernel("free/free_factors.cu", "factors", 256),
    CHAIN: Kernel("free/free_chain.cu", "chain", 384),
    GRADS: Kernel("free/free_grads.cu", "grads", 512),
    EXACT_GRADS: Kernel("free/free_exact_grads.cu", "grads", 512),
}


class FreeKind(NamedTuple):
    """What the kernels of a call are compiled for."""

    K: int
    V: int
    gate: str  # dtype of the log decays: bfloat16 or float32
    ragged: bool = False


class Build(NamedTuple):
    """Which build of a kernel: of what was flagged; from the last chunk; for or with residuals; with positions."""

    exact: bool = False
    backward: bool = False
    keep: bool = False
    at: bool = False


def state_bytes(K: int, V: int) -> int:
    """Bytes of a state in bfloat16."""
    return round_up(K, PANEL) * round_up(V, PANEL) * 2


@functools.cache
def constants(name: str, kind: FreeKind, build: Build = Build()) -> Constants:  # noqa: B008, a tuple
    """The constants of a kernel."""
    size = shared_memory.free(name, kind.K, kind.V, kind.gate, build)
    own: dict[str, int] = {}
    if name in (FACTORS, CHAIN):
        own = {"LA_BACKWARD": build.backward}
    if name == CHAIN:
        own |= {"LA_KEEP": build.keep}
    if name == FACTORS:
        own |= {"LA_EXACT": build.exact, "LA_PIECES": policy.EXACT_PIECES}
    if name == EXACT_GRADS:
        own = {"LA_EXACT": True}
    if name == CHAIN and build.at:
        own |= {"LA_AT": True}
    most = 1 if build.exact else 3 if name == FACTORS else 2
    resident = min(most, (policy.GROUP_SHARED + 1024) // (size + 1024))
    return tuple(sorted({
        "LA_DTYPE": 0, "LA_DECAY": 2, "LA_REVERSE": 0, "LA_GATE": ELEMENTS[kind.gate], "LA_ALIGN": ALIGN * 2,
        "LA_K": kind.K, "LA_V": kind.V, "LA_C": CHUNK, "LA_WARPS": 4 * groups(kind.V), "LA_TILES": 1,
        "LA_SHARED": size, "LA_BLOCKS": resident, "LA_FACTORS": shared_memory.free_factors_of(kind.K),
        "LA_RAGGED": int(kind.ragged), **{n: int(y) for n, y in own.items()},
    }.items()))  # fmt: skip


def groups(V: int) -> int:
    """Warpgroups of 64 columns."""
    return round_up(V, PANEL) // PANEL


def kernel(name: str, kind: FreeKind, build: Build = Build()) -> Kernel:  # noqa: B008, a tuple
    """A kernel for a kind of call; of narrow keys or values, with fewer threads."""
    found = KERNELS[name].built(constants(name, kind, build))
    if name == CHAIN:
        return found._replace(threads=128 * (groups(kind.V) + 1))
    return found._replace(threads=256 * groups(kind.K)) if name in (GRADS, EXACT_GRADS) else found
