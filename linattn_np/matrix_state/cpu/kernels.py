"""All kernels and the words of calls, by what they are for: what warmup compiles ahead."""

from __future__ import annotations

from typing import Any

from ...ops.cpu.array_calls import array_calls
from ...ops.cpu.rounding import rounded
from .backward import backward, reverse
from .forward import forward
from .l2norm import divided, divided_vjp
from .recurrent.step import step_between, step_tasks
from .recurrent.systems import solve_tokens

ALL = forward, backward, reverse, step_tasks


def groups() -> dict[str, tuple[tuple[Any, ...], str]]:
    """(kernels, words of calls)."""
    return {
        "chunks": ((forward,), ""), "gradients": ((backward, reverse), ""), "few tokens": ((step_tasks,), ""),
        "delta rule": (ALL, "delta"), "free erase": (ALL, "free"), "vector decay": (ALL, "vector channels"),
        "decay on the value axis": (ALL, "value_decay channels"), "bonus": (ALL, "bonus"), "feature maps": (ALL, "map"),
        "averages": (ALL, "averaged"), "rotated states": (ALL, "rotates"), "l2 norms": ((divided, divided_vjp), ""),
        "conjugate gradients": ((forward, solve_tokens), "solved"), "array calls": ((array_calls, step_between), ""),
        "other dtypes of inputs": (ALL, "converted"), "16-bit results": ((rounded,), ""),
    }  # fmt: skip
