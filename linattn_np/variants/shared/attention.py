"""Options of the variants of the softmax core."""

from __future__ import annotations

from typing import Any

from ...call.options import Options
from ...runtime.values import LARGEST, is_whole, shown
from ...spec import ArgSpec
from .arguments import LOG_DECAY, STRENGTHS

QUERY_DECAY = ArgSpec("T Hq", "log decay of the token, <= 0", limits=LOG_DECAY)
DIRECTIONS = ArgSpec("T Hk K", "directions of the position maps, of unit length")
MAP_STRENGTH = ArgSpec("T Hk", "strengths of the position maps in [0, 2]", limits=STRENGTHS)


class AttentionOptions(Options, total=False):
    """The common options, a window of tokens, and whether outputs are averages."""

    window: int | None
    normalize: bool


class CausalOptions(AttentionOptions, total=False):
    """Also: causal, whether a query reads only itself and earlier tokens; return_lse, whether lse is returned."""

    causal: bool
    return_lse: bool


def check_options(fn: str, options: dict[str, Any]) -> None:
    """Raise ValueError for a window that is no number of tokens or is not causal."""
    window = options["window"]
    if options.get("return_lse") and not options["normalize"]:
        raise ValueError(f"{fn}: return_lse=True with normalize=False, expected normalize=True")
    if window is None:
        return
    if not is_whole(window, 1, LARGEST):
        raise ValueError(f"{fn}: window is {shown(window)}, expected None or a whole number from 1")
    if not options.get("causal", True):
        raise ValueError(f"{fn}: window with causal=False, expected causal=True")
    options["window"] = int(window)


ATTENTION: dict[str, Any] = {"window": None, "normalize": True}
BOTH_WAYS = ATTENTION | {"causal": True, "return_lse": False}
