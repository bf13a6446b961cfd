"""Tables and kernels of a call."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...runtime.held import cached
from ...runtime.pieces.memory import up
from ...runtime.pieces.run import conversions, launch_of, stored_array
from ...runtime.pieces.vectors import lane
from ...runtime.pieces.workspace import ARRAY, SHARED, Layout
from .. import policy
from . import delta, stick
from .append import append
from .backward import backward
from .forward import forward
from .path_backward import path_backward
from .workspace import ARRAYS, ATTENTION, TASK

KERNELS = {"forward": forward, "append": append, "backward": backward, "path_vjp": path_backward,
           "delta": delta.forward, "delta_vjp": delta.backward,
           "stick": stick.forward, "stick_vjp": stick.backward}  # fmt: skip


def groups() -> dict[str, tuple[tuple[Any, ...], str]]:
    """All kernels by purpose, without the words of a call; warmup compiles them."""
    each = {"softmax attention": forward, "its gradients": backward, "a cache in place": append,
            "deltaformer": delta.forward, "deltaformer, gradients": delta.backward, "PaTH, gradients": path_backward,
            "stick-breaking attention": stick.forward,
            "stick-breaking attention, gradients": stick.backward}  # fmt: skip
    return {purpose: ((kernel,), "") for purpose, kernel in each.items()}


class ArrayTable:
    """The arrays of a call as rows of a workspace's table; keeps them alive."""

    def __init__(self, heads: int):
        self.heads, self.owned = heads, list[np.ndarray]()
        self.numbers = np.zeros((len(ARRAYS), ARRAY), np.int64)
        self.numbers[:, SHARED] = 1

    def put(self, name: str, y: np.ndarray | None) -> None:
        """An array (..., T, H, D) whose heads are shared."""
        if y is None:
            return
        y = y.reshape((prod(y.shape[:-3]), *y.shape[-3:])) if y.ndim != 4 else y
        self.owned.append(y)
        self.numbers[ARRAYS.index(name)] = stored_array(y, y.strides, max(self.heads // max(y.shape[-2], 1), 1))


@cached
def layout(dtype: str, sizes: tuple[tuple[str, int], ...], words: frozenset[str]) -> Layout:
    """The table of a kind of call."""
    given, W = dict(sizes), lane(dtype)
    given |= {"c": given["C"], "n": given["N"], "K_lanes": up(given["K"], W), "V_lanes": up(given["V"], W),
              "task_fields": len(TASK)}  # fmt: skip
    return ATTENTION.layout(given, dtype, words, dict.fromkeys(("S", "complement", "G"), given["tiles"]))


def run(name: str, dtype: str, sizes: dict[str, int], numbers: dict[str, float], table: ArrayTable, tasks: np.ndarray,
        operations: float) -> None:  # fmt: skip
    """A kernel for all tasks of a call, on the arrays of its table."""
    is_so = {"gated": sizes["gated"], "mapped": sizes["mapped"], "biased": sizes["biased"],
             "strict": name.startswith("delta"), "stick": name.startswith("stick"),
             "adjoint": name == "backward" or name.endswith("_vjp")}  # fmt: skip
    words = frozenset(word for word, is_true in is_so.items() if is_true)
    bounds = [0, len(tasks)] if operations < policy.FEW_OPERATIONS else list(range(len(tasks) + 1))
    values = numbers | {"tasks": tasks, "tasks_count": len(tasks)}
    launch = launch_of(KERNELS[name], ATTENTION, dtype, layout(dtype, tuple(sizes.items()), words), values,
                       conversions(table.numbers, dtype), bounds, 1)  # fmt: skip
    launch.with_arrays(ATTENTION, table.numbers, table).run()
