"""A constant diagonal system of CuPy arrays by the kernels of cuda_src/elementwise/diagonal.cu: the skip too.

It has the arguments of the selective scan, whose numbers are the parts of complex ones; D channels have an a, B and C.
A forward that a backward follows keeps the states before every tile of tokens; the backward computes the others again.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ...ops.cuda.formulas import KINDS, compiled
from ...ops.cuda.row_arrays import dense
from ...ops.cuda.sums import each_over_middle
from ...runtime.arrays import Array, Namespace, as_computed, cast, complex_of, dtype_name, is_cupy
from ...runtime.cuda import launch, record
from ..types import Plan, Raw, SelectiveInputs, SystemInputs
from . import selective_plan
from .selective import Call

SOURCE = "elementwise/diagonal.cu"


def unsupported_reason(x: SystemInputs, xp: Namespace, dtype: Any) -> str | None:
    """Why the kernels do not compute a call; None if they do."""
    if not is_cupy(xp):
        return "it takes CuPy arrays"
    if x.held is None:
        return "its kernels make factors and weights of the inputs themselves"
    if any(y is not None and dtype_name(y) not in KINDS for y in (x.x, x.D, *x.held)):
        return "an array has a dtype that its kernels do not read"
    most = (selective_plan.MOST_DOUBLE if dtype == xp.float64 else selective_plan.MOST) // 2
    if (N := x.C.shape[1]) > most:
        return f"a state has {N} numbers a channel, the kernels take up to {most}"
    if not prod(x.x.shape) * N:
        return "there is nothing to compute"
    return launch.unusable()


def forward(plan: Plan, x: SystemInputs, state: Array | None) -> tuple[Array, Array, Array | None]:
    """(out, the final states, the states before every tile of tokens if a backward follows)."""
    call = System(plan, x)
    start, shape = call.complex(state), call.state_shape
    out = record.empty(tuple(x.x.shape), x.x.dtype)
    end = start if plan.overwrite and start is state and start is not None else record.empty(shape, call.kind)
    marks = record.empty((call.marks(call.grid.tile), call.D, call.N), call.dtype) if plan.gradients else None
    call.run("diagonal", start, {"out": out, "end": end, "marks": marks})
    return out, end, marks


def backward(
    plan: Plan, x: SystemInputs, marks: Array, dout: Array | None, dstate: Array | None
) -> tuple[SystemInputs, Array]:
    """(gradients of the inputs, of the initial states)."""
    call = System(plan, x)
    if dout is None:
        dout = compiled("filled", (), (tuple(x.x.shape), x.x.dtype), call.dtype)
    dx, begin = record.empty(tuple(x.x.shape), x.x.dtype), record.empty(call.state_shape, call.kind)
    each = call.D * call.N // 2
    widths = {"dbias": call.D, "dA": each, "dB": each, "dC": 2 * each, "dskip": call.D}
    sums = {n: record.empty((1, call.sequences, width), call.dtype) for n, width in widths.items()}
    call.run("diagonal_vjp", call.complex(dstate), {"dx": dx, "end": begin, "marks": marks} | sums, dout)
    dC = record.empty(tuple(x.C.shape), call.kind)
    assert x.held is not None, "kernels make factors and weights of the inputs"
    given = dict(zip(("dbias", "dA", "dB", "dskip"), (*x.held, x.D), strict=True))
    parts = [sums["dC"], *(None if y is None else sums[n] for n, y in given.items())]
    outs = [dC.view(call.dtype), *(None if y is None else y.dtype for y in given.values())]
    _, *found = each_over_middle(parts, outs)
    *held, dD = (None if y is None else d.reshape(y.shape) for d, y in zip(found, given.values(), strict=True))
    return x._replace(x=dx, C=dC, D=dD, held=tuple(held)), begin


class System(Call):
    """The call of a selective scan that has the arrays of a system."""

    def __init__(self, plan: Plan, x: SystemInputs):
        assert x.held is not None, "kernels make factors and weights of the inputs"
        self.kind, (log_dt, log_rates, angles) = complex_of(plan.xp, plan.dtype), x.held
        C = self.parts(x.C, plan)
        super().__init__(plan, SelectiveInputs(x.x, None, log_rates, dense(angles), C, Raw(D=x.D, dt_bias=log_dt)))
        self.N *= 2
        self.grid = selective_plan.system(self.N, self.double)

    def complex(self, y: Array | None) -> Array | None:
        """Dense states, or their gradients, in the complex dtype."""
        return (
            None if y is None else dense(cast(self.plan.xp, as_computed(self.plan.xp, y, self.plan.dtype), self.kind))
        )

    def parts(self, y: Array, plan: Plan) -> Array:
        """A complex array (D, N) as real numbers (D, 2 N)."""
        xp = plan.xp
        return dense(cast(xp, as_computed(xp, y, plan.dtype), self.kind)).view(plan.dtype)

    def run(self, entry: str, start: Array | None, outputs: dict[str, Array | None], dout: Array | None = None) -> None:
        """The pass over all tokens of every sequence; start: complex."""
        start = None if start is None else start.view(self.dtype)
        self.launch(SOURCE, entry, self.grid, start, outputs, dout, (1, max(self.longest, 1)))
