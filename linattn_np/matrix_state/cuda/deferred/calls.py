"""Kernels on deferred arrays (runtime/cuda/deferred.py): what they read is computed by one launch."""

from __future__ import annotations

from typing import Any

from ....runtime.arrays import Array
from ....runtime.cuda.deferred import Deferred, given
from ....runtime.cuda.fusion import materialise
from ...types import Inputs, Plan, Saved
from ..token import calls as step
from . import adjoint
from .token import Token, as_rows, by_tokens


def forward(module: Any, x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Any]:
    """(out, final state, saved); the final state is `state` itself if it has been overwritten."""
    xp = plan.xp
    if module is step and x.q is not None:
        return by_tokens(x, plan, state)
    known = in_memory(Token(*as_rows(xp, x, state), plan))
    start = known.state
    out, end, saved = module.forward(known.x, known.plan, start)
    end = state if state is not None and end is state.real else given(xp, end)
    return None if out is None else given(xp, out), end, saved


def backward(run: Any, saved: Any, dout: Any, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state; run: a backward on arrays in memory."""
    given_ones = [d for d in (dout, dstate) if d is not None]
    xp = given_ones[0].xp
    if isinstance(saved, Saved) and isinstance(saved.x.k, Deferred):
        saved = Token(*as_rows(xp, saved.x, saved.state), saved.plan)
    if isinstance(saved, Token):
        if adjoint.takes(saved):
            return adjoint.backward(saved, dout, dstate)
        saved = in_memory(saved)
    if dout is not None:  # the kernels' backward would cast it by an array call
        dout = xp.astype(dout, saved.x.v.dtype)
        given_ones[0] = dout
    known = iter(materialise(given_ones))
    d, dstate0 = run(saved, *(None if y is None else next(known) for y in (dout, dstate)))
    return Inputs(*(None if y is None else given(xp, y) for y in d)), given(xp, dstate0)


def in_memory(token: Token) -> Saved:
    """The arrays of a call as the kernels take them: vectors of one dtype, rows without gaps."""
    x, state, plan = token
    each = {name: y for name, y in x._asdict().items() if y is not None}
    found = materialise([*each.values(), *([] if state is None else [state])])
    start = None if state is None else found.pop()
    known = Inputs(**dict.fromkeys(Inputs._fields) | dict(zip(each, found, strict=True)))
    return Saved(known, plan._replace(xp=plan.xp.library), start, None)
