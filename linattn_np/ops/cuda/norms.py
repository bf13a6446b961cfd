"""Norms of rows of CuPy arrays, with weights, biases and gates, and their gradients (cuda_src/nn/norm.cu)."""

from __future__ import annotations

from math import sqrt
from typing import Any, NamedTuple

from ...runtime.arrays import Array
from ...runtime.cuda import record
from .arguments import NORM, address
from .row_arrays import (
    WARP,
    Grid,
    dense,
    is_narrow,
    kind_of,
    launched,
    rows_of,
    spread_of,
    strided,
    strides_of,
    working_dtype,
)
from .sums import each_over_middle

SOURCE = "nn/norm.cu"
TOGETHER = 4  # rows that a lane computes together, of one piece each
GATED, GATED_BACK = 2, 1  # and with gates: forward, backward
PARTS = 1056  # of a sum over rows, at most: the same on every device, so that bits are
WIDE = 264 * 256  # lanes of all blocks, at most, where a row has more lanes than a warp


class Norm(NamedTuple):
    """eps inside the root, whether the mean is taken off, whether a mean of squares is rooted; the gate."""

    eps: float
    centred: bool = False
    mean: bool = True
    sigmoid: bool = False  # of the gate; silu
    gate_first: bool = False


class NormGrads(NamedTuple):
    """None for arrays that were not given."""

    x: Array
    gate: Array | None
    weight: Array | None
    bias: Array | None


def forward(
    x: Array, norm: Norm, D: int, gate: Array | None = None, weight: Array | None = None, bias: Array | None = None
) -> Array:
    """y, dense; rows of D numbers; weight and bias (groups, D) of row n are those of n mod groups."""
    y, rows = record.empty(tuple(x.shape), x.dtype), rows_of(x, D)
    inner, (x, gate) = strided(D, x, gate)
    weight, bias = dense(weight), dense(bias)
    grid = spread_of(D, x, gate, weight, bias)
    constants = _constants(grid, norm, D, x, gate, weight, bias, x) | {"LA_NARROW": int(is_narrow(y))}
    each = grid.beside * constants["LA_ROWS"]
    packed = _packed(x, gate, None, weight, bias, norm, D, inner, y=address(y), rows=rows)
    launched(SOURCE, "row_norm", constants, -(-rows // each), grid.threads, packed, x, gate, weight, bias, y)
    return y


def backward(
    x: Array,
    norm: Norm,
    D: int,
    dy: Array,
    gate: Array | None = None,
    weight: Array | None = None,
    bias: Array | None = None,
) -> NormGrads:
    """Gradients, dense, in the dtypes of their arrays."""
    dx, rows = record.empty(tuple(x.shape), x.dtype), rows_of(x, D)
    dgate = None if gate is None else record.empty(tuple(gate.shape), gate.dtype)
    inner, (x, gate, dy) = strided(D, x, gate, dy)
    weight, bias = dense(weight), dense(bias)
    grid, wide = spread_of(D, x, gate, dy, weight, bias), working_dtype(x, gate, dy, weight, bias)
    constants = _constants(grid, norm, D, x, gate, weight, bias, dy) | {"LA_NARROW": int(is_narrow(dx, dgate))}
    if gate is not None:
        constants["LA_ROWS"] = GATED_BACK
    groups = max((y.size // D for y in (weight, bias) if y is not None), default=1)
    each, count = grid.beside * constants["LA_ROWS"], rows // groups
    block = each
    if weight is not None or bias is not None:
        most = max((PARTS if grid.lanes <= WARP else WIDE // grid.lanes) // groups, 1)
        block = -(-count // (most * each)) * each
    parts = -(-count // block)
    sums = [None if y is None else record.empty((1, parts, groups * D), wide) for y in (weight, bias)]
    packed = _packed(x, gate, dy, weight, bias, norm, D, inner, y=address(dx), dgate=address(dgate), rows=rows,
                     dweight=address(sums[0]), dbias=address(sums[1]), groups=groups, block=block)  # fmt: skip
    arrays = (x, gate, dy, weight, bias, dx, dgate, *sums)
    launched(SOURCE, "row_norm_vjp", constants, parts * groups, grid.threads, packed, *arrays)
    found = each_over_middle(sums, [None if y is None else y.dtype for y in (weight, bias)])
    found = [None if y is None else d.reshape(y.shape) for y, d in zip((weight, bias), found, strict=True)]
    return NormGrads(dx, dgate, *found)


def _constants(
    grid: Grid, norm: Norm, D: int, x: Array, gate: Any, weight: Any, bias: Any, dy: Array
) -> dict[str, int]:
    together = TOGETHER if gate is None else GATED
    one_piece = grid.lanes <= WARP and grid.lanes * grid.per >= D
    return {
        "LA_D": D, "LA_PER": grid.per, "LA_LANES": grid.lanes, "LA_ROWS": together if one_piece else 1,
        "LA_DOUBLE": int(working_dtype(x, gate, weight, bias, dy).itemsize == 8), "LA_DTYPE": kind_of(x),
        "LA_GATE": kind_of(gate), "LA_WEIGHT": kind_of(weight), "LA_BIAS": kind_of(bias), "LA_GRAD": kind_of(dy),
        "LA_MEAN": int(norm.mean), "LA_CENTRED": int(norm.centred), "LA_ACT": int(norm.sigmoid),
        "LA_FIRST": int(norm.gate_first),
    }  # fmt: skip


def _packed(x: Array, gate: Any, dy: Any, weight: Any, bias: Any, norm: Norm, D: int, inner: int, **own: Any) -> bytes:
    """The arguments; own: fields that differ from those of a forward."""
    groups = max((y.size // D for y in (weight, bias) if y is not None), default=1)
    fields: dict[str, Any] = {"dgate": 0, "dweight": 0, "dbias": 0, "groups": groups, "block": 0}
    for name, y in (("x", x), ("gate", gate), ("dy", dy)):
        fields[name] = strides_of(y, D, inner)
    fields |= {"weight": address(weight), "bias": address(bias), "inner": inner}
    fields["root"] = sqrt(norm.eps * (D if norm.mean else 1))
    return NORM.pack(**(fields | own))
