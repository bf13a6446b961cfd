"""Kernels on deferred arrays (runtime/cuda/deferred.py): what they read is computed by one launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....runtime.arrays import Array, cast, dtype_name
from ....runtime.cuda.deferred import Deferred, Node, Pending, given
from ....runtime.cuda.deferred_namespace import Namespace
from ....runtime.cuda.elements import ELEMENTS
from ....runtime.cuda.fusion import materialise
from ...types import Inputs, Plan, Saved
from .. import step

VECTORS = ("q", "k", "v", "r", "a", "b")  # of one dtype


def forward(module: Any, x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Any]:
    """(out, final state, saved); the final state is `state` itself if it has been overwritten."""
    xp = plan.xp
    known, start = in_memory(xp, x, state)
    if module is step and known.q is not None:
        return _later(xp, known, plan, (state, start))
    out, end, saved = module.forward(known, plan._replace(xp=xp.library), start)
    end = state if state is not None and end is state.real else given(xp, end)
    return None if out is None else given(xp, out), end, saved


def _later(xp: Namespace, x: Inputs, plan: Plan, states: tuple[Any, Any]) -> tuple[Array, Array, Any]:
    """The kernel of a few tokens, launched when its results are needed: it rounds an output that is only cast."""
    (state, start), plan = states, plan._replace(xp=xp.library)
    heads = max(x.v.shape[-2], x.q.shape[-2])
    shape = (*x.v.shape[:-2], heads, x.v.shape[-1])
    out = Node("pending", shape, x.v.dtype)
    end = Node("pending", (*x.v.shape[:-3], x.v.shape[-2], x.k.shape[-1], x.v.shape[-1]), np.float32)
    mine = plan.overwrite and start is not None
    if mine:
        end = Node("pending", start.shape, start.dtype)

    def launch(stored: Any) -> None:
        made, last, _ = step.forward(x, plan, start, stored)
        out.become(made)
        end.become(last)

    xp.pending.append(Pending(launch, out, end))
    if mine:
        xp.overwritten.append(start)
    last = state if mine and start is state.real else Deferred(xp, end)
    return Deferred(xp, out), last, Saved(x, plan, start, None)


def backward(run: Any, saved: Any, dout: Any, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state; run: a backward on arrays in memory."""
    given_ones = [d for d in (dout, dstate) if d is not None]
    xp = given_ones[0].xp
    known = iter(materialise(given_ones))
    d, dstate0 = run(saved, *(None if y is None else next(known) for y in (dout, dstate)))
    return Inputs(*(None if y is None else given(xp, y) for y in d)), given(xp, dstate0)


def in_memory(xp: Namespace, x: Inputs, state: Deferred | None) -> tuple[Inputs, Array | None]:
    """The arrays of a call as the kernels take them: vectors of one dtype, rows without gaps."""
    element, each = step.element_of(x), dict[str, Deferred]()
    for name, y in x._asdict().items():
        if y is not None:
            each[name] = each["k"] if y is x.k and name == "r" else _rows(xp, y, element if name in VECTORS else None)
    if state is not None:
        state = _rows(xp, state, None)
    wanted = [*each.values(), *([] if state is None else [state])]
    found = materialise(wanted)
    start = None if state is None else found.pop()
    return Inputs(**dict.fromkeys(Inputs._fields) | dict(zip(each, found, strict=True))), start


def _rows(xp: Namespace, y: Deferred, element: str | None) -> Deferred:
    """y in a dtype, or in one that the kernels read, with contiguous rows."""
    if element is not None:
        y = cast(xp, y, y.dtype if dtype_name(y) == element else xp.float32)
    elif dtype_name(y) not in ELEMENTS:
        y = cast(xp, y, xp.float32)
    if y.real is not None and y.shape[-1] > 1 and y.real.strides[-1] != y.dtype.itemsize:
        return xp.copy(y)
    return y
