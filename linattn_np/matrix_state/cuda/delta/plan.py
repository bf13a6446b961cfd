"""Launch plans of the warpgroup kernels of the delta rule. Pure functions of dtype and shape."""

from __future__ import annotations

import functools

from ....runtime.cuda.elements import Constants
from ....runtime.cuda.launch import Kernel
from ... import policy
from .. import shared_memory

FACTORS, CHAIN, ADDS = "delta/delta_block.cu", "delta/delta_chain.cu", "delta/delta_adds.cu"
SEGMENTS = "delta/delta_segments.cu"
REVERSE, GRADS = "delta/delta_reverse.cu", "delta/delta_grads.cu"
MORE = 2  # segments of a sequence between other ranks (../neighbours.py)


KERNELS = {
    "block": Kernel(FACTORS, "block", 128),
    "chain": Kernel(CHAIN, "chain", 384),
    "adds": Kernel(ADDS, "adds", 128),
    "segments": Kernel(SEGMENTS, "segments", 256),
    "reverse": Kernel(REVERSE, "reverse", 384),
    "grads": Kernel(GRADS, "grads", 512),
}
MAPS = {  # the arrays whose tiles a kernel copies in or out
    "block": ("k",), "chain": ("q", "k", "v"), "adds": ("k", "v"), "segments": (), "reverse": ("q", "k", "dout"),
    "grads": ("q", "k", "v", "dout", "dv", "dq", "dk"),
}  # fmt: skip
A_TOKEN, STEPPED = ("q", "dout"), ("chain", "grads")  # arrays with a row per token; kernels that store them


def skips(steps: int, K: int = policy.WIDEST_GROUP, V: int = policy.WIDEST_GROUP) -> bool:
    """Whether the kernels compute outputs for the last of `steps` micro-steps only: at measured widths."""
    return steps == 1 or (steps in policy.DELTA_STEPS and K == V == policy.WIDEST_GROUP)


def takes(element: str, K: int, V: int, capability: int) -> bool:
    """Whether these kernels support key width K and value width V."""
    fits = element == "bfloat16" and capability == 90 and max(K, V) <= policy.WIDEST_GROUP and K % 8 == V % 8 == 0
    return fits and not policy.PORTABLE


@functools.cache
def constants(
    name: str, K: int, V: int, decay: bool, reverse: bool = False, unit: bool = False, steps: int = 1, at: int = 0
) -> Constants:
    """The constants of a kernel for key width K and value width V.

    reverse: segments.cu from the last segment to the first. unit: q and k are divided by their L2 norm. steps:
    micro-steps of a token. at: the chains store states at positions, or add their gradients; 2 of a ragged batch.
    """
    more = {"LA_UNIT": 1} if unit and name != "segments" else {}
    if at and name in ("chain", "reverse"):
        more["LA_AT"] = at
    if steps > 1 and name not in ("adds", "segments"):
        more["LA_STEPS"] = steps
    return tuple(
        sorted(
            {
                "LA_DTYPE": 0,
                "LA_DECAY": int(decay),
                "LA_REVERSE": int(reverse),
                "LA_ALIGN": policy.ROW_BYTES,
                "LA_K": K,
                "LA_V": V,
                "LA_C": policy.GROUP_CHUNK,
                "LA_WARPS": 8,
                "LA_TILES": 1,
                "LA_SHARED": shared_memory.delta(name, unit),
                "LA_STATE": shared_memory.DELTA_STATE,
                "LA_ENDS": shared_memory.DELTA_ENDS,
                "LA_CHECKPOINT": shared_memory.delta_checkpoint(unit and name != "segments"),
                **more,
            }.items()
        )
    )


def names(segments: int, gradients: bool) -> list[tuple[str, bool]]:
    """(kernel, reverse) of all launches of a call and its backward."""
    kernels = [("block", False), ("chain", False)]
    if segments > 1:
        kernels += [("adds", False), ("segments", False)]
    if gradients:
        kernels += [("reverse", False), ("grads", False)] + [("segments", True)] * (segments > 1)
    return kernels


def segments(slots: int, chunks: int, multiprocessors: int) -> int:
    """Number of segments of a sequence of `chunks` chunks; a block of the scan occupies a whole multiprocessor.

    One or two fewer if all blocks that compute offsets then run at once, three per multiprocessor.
    """
    n = max(1, min(multiprocessors // max(slots, 1), chunks // policy.SEGMENT_CHUNKS))
    together = (3 * multiprocessors // slots + 6) // 4  # two blocks per offset and per transfer matrix but the first
    return together if 7 * n <= 8 * together < 8 * n else n
