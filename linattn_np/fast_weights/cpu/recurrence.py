"""The coefficients of all tiles (../masks.py) and their transpose, in compiled loops token by token.

A tile is n tokens of a head, of which the spans tell the first one. Its rows of coefficients are `size` of queries,
those of the last w and of the last s, and where gradients are exact `size` of theirs.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...ops.cpu.formulas import dense
from ...runtime.arrays import name_of
from ...runtime.constants import host_constants
from ...runtime.pieces.memory import working
from ...runtime.pieces.piece import Number, Vector, Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace

RATES = ("alpha", "mu", "beta", "eta", "gain")
SIZES = ("size", "B", "tiles", "T", "H", "block", "has_masks", "before", "decayed", "exact",
         *(f"has_{name}" for name in RATES[:3]), "has_gain")  # fmt: skip
TILES = {"spans": Field("tiles", "span", dtype="int64"), "masks": Field("rows", "size"), "c": Field("rows", "B")}
RECURRENCE = Workspace("recurrence", SIZES, (), (), {"given": {
    **TILES, **{name: Field("tokens") for name in RATES}, "gains": Field("places"),
    **{name: Field("states", "width") for name in ("w", "s")}}})  # fmt: skip
TRANSPOSE = Workspace("recurrence_vjp", (*SIZES, "last_w", "last_s", "points"), (), (), {"given": {
    **{f"d{name}" if name != "spans" else name: field for name, field in TILES.items()},
    **{name: Field("tokens") for rate in RATES for name in (rate, f"d{rate}")}, "dgains": Field("places"),
    **{name: Field("states", "width") for name in ("w", "s")}, "dread": Field("reads", "width"),
    "d": Field("gradients", "width"), **{name: Field("places", "width") for name in ("dw", "ds")}}})  # fmt: skip
Work, Transpose = workspace_kind(RECURRENCE), workspace_kind(TRANSPOSE)


@piece
def fill(work: Work, at: Whole, own: Vector, factor: Number, begin: Whole, n: Whole):
    """A row of c and of the masks from its coefficients."""
    c, m = row(work.c, at), row(work.masks, at)
    for j in range(len(c)):
        c[j] = factor * own[j]
    for j in range(n):
        m[j] = -work.eta[begin + j * work.H] * (factor * own[work.B + j])


@piece
def fill_tile(work: Work, tile: Whole, begin: Whole, n: Whole):
    """The rows of a tile, others 0."""
    base, at = tile * work.block, tile * (work.size + 1)
    for i in range(work.block):
        c, m = row(work.c, base + i), row(work.masks, base + i)
        for j in range(len(c)):
            c[j] = 0
        for j in range(len(m)):
            m[j] = 0
    for t in range(n):
        i = begin + t * work.H
        to, own = base + t, row(work.w, at + t + 1 - work.before)
        fill(work, to, own, work.gain[i] if work.has_gain else 1.0, begin, n)
        if work.has_gain:
            row(work.c, to)[work.B - 1] += 1 - work.gain[i]
        if work.exact:
            decay = work.alpha[i] if work.has_alpha and work.decayed else 1.0
            fill(work, base + work.size + 2 + t, row(work.w, at + t), decay, begin, n)
    fill(work, base + work.size, row(work.w, at + n), 1.0, begin, n)
    if work.has_mu:
        fill(work, base + work.size + 1, row(work.s, at + n), 1.0, begin, n)
    if work.has_gain:
        work.gains[tile] = work.gain[begin + (n - 1) * work.H]


@piece
def forward(work: Work, first: Whole, last: Whole):
    """w_t = alpha_t w_{t-1} + beta_t s_t and s_t = mu_t s_{t-1} + e_t, t = 0 .. n, of the tiles first..last."""
    for tile in range(first, last):
        span, head = row(work.spans, tile % work.tiles), tile // work.tiles
        n, begin = span[1], (head // work.H * work.T + span[0]) * work.H + head % work.H
        at = tile * (work.size + 1)
        w, s = row(work.w, at), row(work.s, at)
        for j in range(len(w)):
            w[j], s[j] = 0, 0
        w[0], s[1] = 1, 1
        for t in range(n):
            i = begin + t * work.H
            before, w, earlier, s = (
                row(work.w, at + t),
                row(work.w, at + t + 1),
                row(work.s, at + t),
                row(work.s, at + t + 1),
            )
            for j in range(len(s)):
                s[j] = work.mu[i] * earlier[j] if work.has_mu else 0
            s[work.B + t] += 1
            for j in range(len(w)):
                own = work.beta[i] * s[j] if work.has_beta else s[j]
                w[j] = own + (work.alpha[i] * before[j] if work.has_alpha else before[j])
        if work.has_masks:
            fill_tile(work, tile, begin, n)


@piece
def add(x: Vector, y: Vector):
    for j in range(len(y)):
        y[j] += x[j]


@piece
def taken(work: Transpose, at: Whole, own: Vector, factor: Number, begin: Whole, n: Whole, out: Vector):
    """The transpose of `fill`: adds to deta; out: the gradient of factor times the coefficients."""
    c, m, B = row(work.dc, at), row(work.dmasks, at), work.B
    for j in range(len(out)):
        out[j] = c[j] if j < B else 0
    for j in range(n):
        i = begin + j * work.H
        work.deta[i] -= m[j] * (factor * own[B + j])
        out[B + j] = -m[j] * work.eta[i]


@piece
def take_tile(work: Transpose, tile: Whole, begin: Whole, n: Whole):
    """The transpose of `fill_tile`: deta, dgain, and the gradients of the coefficients."""
    base, at = tile * work.block, tile * (work.size + 1)
    for t in range(n):
        work.deta[begin + t * work.H] = 0
    for t in range(n):
        i = begin + t * work.H
        to, own = row(work.dread, tile * work.size + t), row(work.w, at + t + 1 - work.before)
        taken(work, base + t, own, work.gain[i] if work.has_gain else 1.0, begin, n, to)
        if work.has_gain:
            work.dgain[i] = dot(to, own, len(to)) - to[work.B - 1]
            for j in range(len(to)):
                to[j] *= work.gain[i]
        if work.exact:
            point = base + work.size + 2 + t
            decay = work.alpha[i] if work.has_alpha and work.decayed else 1.0
            taken(work, point, row(work.w, at + t), decay, begin, n, row(work.d, point))
    taken(work, base + work.size, row(work.w, at + n), 1.0, begin, n, row(work.d, base + work.size))
    if work.has_mu:
        taken(work, base + work.size + 1, row(work.s, at + n), 1.0, begin, n, row(work.d, base + work.size + 1))
    if work.has_gain:
        work.dgain[begin + (n - 1) * work.H] += work.dgains[tile]


@piece
def step_back(work: Transpose, i: Whole, read: Whole, at: Whole, point: Whole, w: Vector, s: Vector):
    """Through token i, whose states before it are the rows at, and its gradients the rows `read` and `point`."""
    width = len(w)
    if not work.before:
        add(row(work.dread, read), w)
    if work.has_beta:
        work.dbeta[i] = dot(w, row(work.s, at + 1), width)
    for j in range(width):
        s[j] += work.beta[i] * w[j] if work.has_beta else w[j]
    if work.has_alpha:
        work.dalpha[i] = dot(w, row(work.w, at), width)
        for j in range(width):
            w[j] *= work.alpha[i]
    if work.has_mu:
        work.dmu[i] = dot(s, row(work.s, at), width)
    for j in range(width):
        s[j] = work.mu[i] * s[j] if work.has_mu else 0
    if work.before:
        add(row(work.dread, read), w)
    if work.exact:
        d = row(work.d, point)
        if work.decayed and work.has_alpha:
            work.dalpha[i] += dot(d, row(work.w, at), width)
        for j in range(width):
            w[j] += work.alpha[i] * d[j] if work.decayed and work.has_alpha else d[j]


@piece
def backward(work: Transpose, first: Whole, last: Whole):
    """Gradients of the rates of the tiles first..last."""
    for tile in range(first, last):
        span, head = row(work.spans, tile % work.tiles), tile // work.tiles
        n, start = span[1], (head // work.H * work.T + span[0]) * work.H + head % work.H
        if work.has_masks:
            take_tile(work, tile, start, n)
        w, s, begin, at = row(work.dw, tile), row(work.ds, tile), tile * work.block, tile * (work.size + 1)
        last_w, last_s = row(work.d, begin + work.last_w), row(work.d, begin + work.last_s)
        for j in range(len(w)):
            w[j] = last_w[j]
            s[j] = last_s[j] if work.has_mu else 0
        for back in range(n):
            t = n - 1 - back
            step_back(work, start + t * work.H, tile * work.size + t, at + t, begin + work.points + t, w, s)


def rates_in_order(rates: Any) -> dict[str, np.ndarray]:
    """Rates (N, H, T, 1) that are there, by name, as vectors of tokens before heads."""
    given = {"alpha": rates.alpha, "mu": rates.mu, "beta": rates.beta, "eta": rates.eta[0], "gain": rates.gain}
    return {name: dense(y.swapaxes(1, 2), y.dtype).reshape(-1) for name, y in given.items() if y is not None}


def coefficients(
    rates: dict[str, np.ndarray], spans: np.ndarray, sizes: dict[str, int]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(masks, c and the gains of the last tokens, w and s), of all tiles; sizes: fields of the kernel, and places."""
    dtype, places, block, n, B = rates["eta"].dtype, sizes["places"], sizes["block"], sizes["size"], sizes["B"]
    found = {"masks": working((places * block, n), dtype), "c": working((places * block, B), dtype)}
    found |= {"gains": working((places,), dtype)} if "gain" in rates else {}
    states = {name: working((places * (n + 1), B + n), dtype) for name in ("w", "s")}
    more = {"rows": places * block, "states": len(states["w"]), "width": B + n, "tokens": rates["eta"].size,
            "span": spans.shape[1]}  # fmt: skip
    fields = sizes | more | {f"has_{name}": int(name in rates) for name in RATES if name != "eta"}
    over_matrices(forward, RECURRENCE, fields | {"spans": spans} | rates | found | states, places, name_of(dtype))
    return found, states


def coefficients_vjp(
    rates: dict[str, np.ndarray], states: dict[str, np.ndarray], spans: np.ndarray, sizes: dict[str, int],
    given: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:  # fmt: skip
    """Gradients of the rates, as vectors, by name; given: dmasks, dc and with gains dgains."""
    dtype, places, n, width = rates["eta"].dtype, sizes["places"], sizes["size"], sizes["size"] + sizes["B"]
    found = {f"d{name}": working(y.shape, y.dtype) for name, y in rates.items()}
    own = {"dread": working((places * n, width), dtype), "d": working((places * sizes["block"], width), dtype),
           **{name: working((places, width), dtype) for name in ("dw", "ds")}}  # fmt: skip
    more = {"rows": len(given["dc"]), "states": len(states["w"]), "width": width, "tokens": rates["eta"].size,
            "span": spans.shape[1], "reads": places * n, "gradients": len(own["d"]), "last_w": n, "last_s": n + 1,
            "points": n + 2}  # fmt: skip
    fields = sizes | more | {f"has_{name}": int(name in rates) for name in RATES if name != "eta"}
    over_matrices(backward, TRANSPOSE, fields | {"spans": spans} | rates | states | given | found | own, places,
                  name_of(dtype))  # fmt: skip
    return {name: found[f"d{name}"] for name in rates}


def _one_tile(lead: list[int], n: int, B: int) -> dict[str, int]:
    """Sizes where every row of the leading axes is a tile of n tokens."""
    return {"size": n, "B": B, "tiles": 1, "T": n, "H": 1, "span": 2, "has_masks": 0, "has_gain": 0, "width": B + n,
            "states": prod(lead) * (n + 1), "places": prod(lead), "rows": 0}  # fmt: skip


def _whole(n: int) -> np.ndarray:
    return host_constants.once(("span", n), lambda: np.array([[0, n]], np.int64))


def recurrence(alpha: Any, mu: Any, beta: Any, n: int, B: int) -> tuple[np.ndarray, np.ndarray]:
    """(w, s), (..., n + 1, B + n), from rates (..., n, 1); None: 1, without mu s_t is the step alone."""
    given = {"alpha": alpha, "mu": mu, "beta": beta}
    like = next(y for y in given.values() if y is not None)
    *lead, _, _ = like.shape
    outputs = {name: working((*lead, n + 1, B + n), like.dtype) for name in ("w", "s")}
    rates = {name: np.ascontiguousarray(y).reshape(-1) for name, y in given.items() if y is not None}
    matrices = {name: y.reshape(-1, B + n) for name, y in outputs.items()} | {"spans": _whole(n)}
    sizes = _one_tile(lead, n, B) | {"tokens": like.size, "block": 0, "before": 0, "decayed": 0, "exact": 0}
    flags = {f"has_{name}": int(name in rates) for name in given}
    over_matrices(forward, RECURRENCE, sizes | flags | rates | matrices, prod(lead), name_of(like.dtype))
    return outputs["w"], outputs["s"]


def recurrence_vjp(
    rates: dict[str, Any], residuals: tuple[np.ndarray, np.ndarray], dread: Any, d: Any, flags: dict[str, bool]
) -> dict[str, np.ndarray]:
    """Gradients of the rates that there are, by name: alpha, mu, beta (..., n, 1).

    dread (..., n, B + n) are gradients of w_1 .. w_n, or with `before` of w_0 .. w_{n-1}; those of the last w, with mu
    of the last s, and with `exact` of the n rows of gradients follow behind n rows of d. `decayed`: those have alpha.
    """
    given = {name: y for name, y in rates.items() if y is not None}
    like = next(iter(given.values()))
    *lead, n, width = dread.shape
    outputs = {f"d{name}": working(like.shape, like.dtype) for name in given}
    flat = {name: np.ascontiguousarray(y).reshape(-1) for name, y in (given | outputs).items()}
    scratch = {name: working((prod(lead), width), like.dtype) for name in ("dw", "ds")}
    arrays = dict(zip(("w", "s"), residuals, strict=True)) | {"dread": dread, "d": d}
    matrices = {name: np.ascontiguousarray(y).reshape(-1, width) for name, y in arrays.items()} | scratch
    matrices["spans"] = _whole(n)
    rows = d.shape[-2]
    sizes = _one_tile(lead, n, width - n) | {
        "block": rows, "tokens": like.size, "reads": prod(lead) * n, "gradients": len(matrices["d"]), "last_w": n,
        "last_s": n + int("mu" in given), "points": rows - n}  # fmt: skip
    words = {f"has_{name}": int(name in given) for name in rates} | {name: int(y) for name, y in flags.items()}
    over_matrices(backward, TRANSPOSE, sizes | words | flat | matrices, prod(lead), name_of(like.dtype))
    return {name: outputs[f"d{name}"] for name in given}
