"""The first steps of preprocessing, where they change nothing but inputs, as a change of variables: a vjp records both.

    to_core      x <- steps(to_core(c))
    to_core_vjp  d <- to_core_vjp(c, transposes of the steps, the last one first, of d)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .core import Path, Residuals
from .types import Inputs


def joined(change: Any, residuals: Any) -> tuple[Any, Any]:
    """(the change of variables with the first steps of a computed call, the residuals of what comes after them)."""
    if not isinstance(residuals, Residuals):
        return change, residuals
    (backend, steps, plan), saved = residuals
    count = next((n for n, step in enumerate(steps) if step.inputs_vjp is None), len(steps))
    made = _with_steps(change, steps[:count], backend.module, plan)
    for step in steps[:count]:
        _, plan = step.inputs(backend.module, saved.x, plan)
        saved = saved.rest
    return (made if count else change), Residuals(Path(backend, steps[count:], plan), saved)


def _with_steps(change: Any, steps: Any, module: Any, plan: Any) -> Any:
    def to_core(c: Any) -> Inputs:
        x, own, c.before_steps = change.to_core(c), plan, []
        for step in steps:
            c.before_steps.append((x, own))
            x, own = step.inputs(module, x, own)
        return x

    def to_core_vjp(c: Any, d: Inputs) -> Any:
        for step, before in zip(steps[::-1], c.before_steps[::-1], strict=True):
            d = step.inputs_vjp(module, *before, d)
        return change.to_core_vjp(c, d)

    return replace(change, to_core=to_core, to_core_vjp=to_core_vjp)
