"""The kernels that warmup compiles ahead, and the words of their calls, by purpose."""

from __future__ import annotations

from typing import Any

from ...ops.cpu.formulas import KINDS, formula
from ...runtime.pieces.record import check, execute, share
from . import levels, levels_vjp
from .l2norm import divided
from .recurrent import step
from .scan import backward, forward, reverse
from .solve import find_zeros

ALL = forward, backward, reverse, step


def groups() -> dict[str, tuple[tuple[Any, ...], str]]:
    """(kernels, words of calls)."""
    return {
        "chunks": ((forward,), ""), "gradients": ((backward, reverse), ""), "few tokens": ((step,), ""),
        "delta rule": (ALL, "delta"), "free erase": (ALL, "free"), "vector decay": (ALL, "vector channels"),
        "decay on the value axis": (ALL, "value_decay channels"), "bonus": (ALL, "bonus"), "feature maps": (ALL, "map"),
        "averages": (ALL, "averaged"), "l2 norms": ((divided,), ""),
        "conjugate gradients": ((forward,), "solved formed"), "exact systems": ((forward,), "solved formed exact"),
        "ridges": ((find_zeros,), ""),
        "states by levels": ((levels.forward, levels.advance, levels_vjp.backward), "delta"),
        "repeated calls": ((execute, share, check), ""),
        "other dtypes of inputs": (ALL, "converted"), "16-bit results": ((formula,), "copy rounded"),
        "formulas": ((formula,), " ".join((*KINDS, "converted", "rounded"))),
    }  # fmt: skip
