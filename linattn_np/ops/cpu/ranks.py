"""Values spread over the rows of a token, rows gated and summed, and the transposes: one pass each (ops/ranks.py).

A task is a block of tokens: each has sums of its own for the gradients of the vectors of heads. Row r of a token's R,
of head h, is at column (r H + h) of its arrays, at (h R + r) of what is of a head.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from ...runtime.arrays import name_of
from ...runtime.constants import constant_ones
from ...runtime.pieces.memory import empty, working
from ...runtime.pieces.piece import Vector, Whole, piece, workspace_kind
from ...runtime.pieces.registers import fma, load_part, store_part
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import columns, row, rows
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from .formulas import dense
from .numbers import OPTIONS, number, sigmoid
from .sums import over_tokens
from .trapezoid import add

TOKENS = 16  # of a task
ROWS = {"HV": ("z", "y", "dy", "dz", "spread", "dspread"), "RHV": ("out", "late", "x", "du"),
        "HRR": ("later", "shares")}  # fmt: skip
RANKS = Workspace(
    "ranks", ("count", "each", "R", "H", "V", "gated"), (), (), {"given": {
        **{name: Field("count", width) for width, names in ROWS.items() for name in names},
        **{name: Field("one", "HRV") for name in ("gates", "outs")},
        **{name: Field("blocks", "HRV") for name in ("dgates", "douts")},
        "rows": Field("blocks", "RV"), "gate": Field("blocks", "V"), "slope": Field("blocks", "V"),
    }})  # fmt: skip
Work = workspace_kind(RANKS)


@njit(**OPTIONS)
def gated(z: Any, n: Any, gate: Any, slope: Any) -> None:
    """silu(n z) and its derivative."""
    for j in range(len(gate)):
        x = n[j] * z[j]
        s = sigmoid(x)
        gate[j] = x * s
        slope[j] = s * (number(gate, 1) + x * (number(gate, 1) - s))


@njit(**OPTIONS)
def add_product(x: Any, y: Any, z: Any, out: Any) -> None:
    """out += x y z"""
    for j in range(0, len(out), BYTES // out.itemsize):
        store_part(fma(load_part(x, j) * load_part(y, j), load_part(z, j), load_part(out, j)), out, j)


@njit(**OPTIONS)
def add_pair(x: Any, y: Any, out: Any) -> None:
    """out += x y"""
    for j in range(0, len(out), BYTES // out.itemsize):
        store_part(fma(load_part(x, j), load_part(y, j), load_part(out, j)), out, j)


@njit(**OPTIONS)
def put_product(x: Any, y: Any, z: Any, out: Any) -> None:
    """out = x y z"""
    for j in range(0, len(out), BYTES // out.itemsize):
        store_part(load_part(x, j) * load_part(y, j) * load_part(z, j), out, j)


@piece
def clear(x: Vector):
    for j in range(len(x)):
        x[j] = 0


@piece
def ones(x: Vector):
    for j in range(len(x)):
        x[j] = 1


@piece
def read(w: Work, i: Whole, h: Whole, task: Whole):
    """u_r of row i and head h."""
    R, H, V = w.R, w.H, w.V
    for r in range(R):
        u, out, at = rows(row(w.rows, task), r * V, V), row(columns(w.out, (r * H + h) * V, V), i), (h * R + r) * R
        for j in range(0, V, BYTES // u.itemsize):
            total = load_part(out, j)
            for s in range(r + 1, R):
                total = fma(w.later[i, at + s], load_part(row(columns(w.late, (s * H + h) * V, V), i), j), total)
            for s in range(R):
                total = fma(w.shares[i, at + s], load_part(row(columns(w.x, (s * H + h) * V, V), i), j), total)
            store_part(total, u, j)


@piece
def gate_of(w: Work, i: Whole, h: Whole, r: Whole, task: Whole):
    """gate and slope of row r; 1 without a gate."""
    gate, slope = row(w.gate, task), row(w.slope, task)
    if w.gated:
        gated(row(columns(w.z, h * w.V, w.V), i), row(columns(w.gates, (h * w.R + r) * w.V, w.V), 0), gate, slope)
    elif r == 0:
        ones(gate)


@piece
def forward(w: Work, first: Whole, last: Whole):
    """y of the tokens of blocks first..last."""
    R, H, V = w.R, w.H, w.V
    for task in range(first, last):
        for i in range(task * w.each, min((task + 1) * w.each, w.count)):
            for h in range(H):
                read(w, i, h, task)
                y = row(columns(w.y, h * V, V), i)
                clear(y)
                for r in range(R):
                    gate_of(w, i, h, r, task)
                    u, o = rows(row(w.rows, task), r * V, V), row(columns(w.outs, (h * R + r) * V, V), 0)
                    add_product(o, u, row(w.gate, task), y)


@piece
def backward(w: Work, first: Whole, last: Whole):
    """du and dz of the tokens of blocks first..last, and the sums of each block for the vectors."""
    R, H, V = w.R, w.H, w.V
    for task in range(first, last):
        gate, slope = row(w.gate, task), row(w.slope, task)
        clear(row(w.douts, task))
        if w.gated:
            clear(row(w.dgates, task))
        for i in range(task * w.each, min((task + 1) * w.each, w.count)):
            for h in range(H):
                read(w, i, h, task)
                dy = row(columns(w.dy, h * V, V), i)
                if w.gated:
                    clear(row(columns(w.dz, h * V, V), i))
                for r in range(R):
                    at = (h * R + r) * V
                    gate_of(w, i, h, r, task)
                    u, o = rows(row(w.rows, task), r * V, V), row(columns(w.outs, at, V), 0)
                    add_product(dy, u, gate, row(columns(w.douts, at, V), task))
                    put_product(o, dy, gate, row(columns(w.du, (r * H + h) * V, V), i))
                    if w.gated:
                        put_product(o, dy, slope, gate)
                        put_product(gate, u, row(columns(w.gates, at, V), 0), slope)  # dz of this row
                        add(slope, number(gate, 1), row(columns(w.dz, h * V, V), i))
                        add_product(gate, u, row(columns(w.z, h * V, V), i), row(columns(w.dgates, at, V), task))


@piece
def backward_of_spread(w: Work, first: Whole, last: Whole):
    """dspread and the sums of each block for the vectors, from du of the rows; gates: the vectors."""
    R, H, V = w.R, w.H, w.V
    for task in range(first, last):
        clear(row(w.dgates, task))
        for i in range(task * w.each, min((task + 1) * w.each, w.count)):
            for h in range(H):
                x, dx = row(columns(w.spread, h * V, V), i), row(columns(w.dspread, h * V, V), i)
                clear(dx)
                for r in range(R):
                    at, d = (h * R + r) * V, row(columns(w.du, (r * H + h) * V, V), i)
                    add_pair(row(columns(w.gates, at, V), 0), d, dx)
                    add_pair(x, d, row(columns(w.dgates, at, V), task))


# Python


def run(
    kernel: Any, given: dict[str, Any], outputs: dict[str, np.ndarray], sizes: dict[str, int], dtype: np.dtype
) -> None:
    """A kernel on arrays of tokens, vectors of heads, and sums of blocks."""
    given = {n: dense(y, dtype) for n, y in given.items() if y is not None}
    scratch = {n: working((sizes["blocks"], sizes[m]), dtype)
               for n, m in (("rows", "RV"), ("gate", "V"), ("slope", "V"))}  # fmt: skip
    arrays = {n: y.reshape(*(sizes[m] for m in (RANKS.matrices[n].rows, RANKS.matrices[n].columns)))
              for n, y in (given | outputs).items()}  # fmt: skip
    over_matrices(kernel, RANKS, sizes | arrays | scratch, sizes["blocks"], name_of(dtype))


def sizes_of(count: int, R: int, H: int, V: int) -> dict[str, int]:
    return {"count": count, "each": TOKENS, "blocks": -(-count // TOKENS), "R": R, "H": H, "V": V, "one": 1,
            "HV": H * V, "RHV": R * H * V, "HRR": H * R * R, "HRV": H * R * V, "RV": R * V, "gated": 0}  # fmt: skip


def _call(reads: Any, heads: Any, dtype: np.dtype) -> tuple[dict[str, Any], dict[str, int]]:
    """(arrays, sizes) of a read-out."""
    *lead, T, R, H, V = reads.x.shape
    sizes = sizes_of(math.prod(lead) * T, R, H, V) | {"gated": int(heads.z is not None)}
    given = reads._asdict() | heads._asdict()
    if heads.z is not None and heads.gates is None:
        given["gates"] = constant_ones((H, R, V), dtype)
    if reads.later is None:
        given["late"] = None
    return given, sizes


def read_out(reads: Any, heads: Any, dtype: Any) -> np.ndarray:
    """As ops/ranks.py: y."""
    dtype = np.dtype(dtype)
    given, sizes = _call(reads, heads, dtype)
    y = empty((*reads.x.shape[:-3], *reads.x.shape[-2:]), dtype)
    run(forward, given, {"y": y}, sizes, dtype)
    return y


def read_out_vjp(reads: Any, heads: Any, dy: Any, dtype: Any) -> tuple[np.ndarray, Any]:
    """As ops/ranks.py: du, and the gradients of z and of the vectors."""
    dtype = np.dtype(dtype)
    given, sizes = _call(reads, heads, dtype)
    shape = sizes["blocks"], sizes["H"], sizes["R"], sizes["V"]
    outputs = {"du": working(reads.out.shape, dtype), "douts": working(shape, dtype)}
    if heads.z is not None:
        outputs |= {"dz": empty(heads.z.shape, dtype), "dgates": working(shape, dtype)}
    run(backward, given | {"dy": dy}, outputs, sizes, dtype)
    dgates = None if heads.gates is None or heads.z is None else over_tokens(outputs["dgates"], 3)
    return outputs["du"], type(heads)(outputs.get("dz"), dgates, over_tokens(outputs["douts"], 3))


def spread_vjp(x: np.ndarray, m: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As ops/ranks.py: (dx, dm)."""
    *lead, T, R, H, V = d.shape
    sizes = sizes_of(math.prod(lead) * T, R, H, V)
    outputs = {"dspread": empty(x.shape, d.dtype), "dgates": working((sizes["blocks"], H, R, V), d.dtype)}
    run(backward_of_spread, {"spread": x, "gates": m, "du": d}, outputs, sizes, d.dtype)
    return outputs["dspread"], over_tokens(outputs["dgates"], 3)
