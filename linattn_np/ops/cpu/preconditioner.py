"""Preconditioned keys and their transpose: one pass each over the tokens of a head (ops/preconditioner.py)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...runtime import threads
from ...runtime.arrays import name_of
from ...runtime.pieces.memory import working
from ...runtime.pieces.piece import Number, Vector, Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import dot, sum_of
from ...runtime.pieces.views import columns, row
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from ..sums import over_tokens, sum_of_groups
from .formulas import dense, zeros
from .numbers import exp, log, number
from .stabiliser import cuts

ROWS = {"HkK": ("k",), "H": ("a", "b", "da", "db", "dcenter"), "HK": ("w", "A", "dw", "dk")}
ENDS = ("begin", "end", "dend", "dbegin")
PRECONDITIONER = Workspace("preconditioner", ("T", "H", "Hk", "K", "blocks", "each", "stores"), ("eps", "rate"), (), {
    "given": {**{name: Field("count", width) for width, names in ROWS.items() for name in names},
              **{name: Field("states", "HK") for name in ENDS}, "own": Field("states", "HK"),
              "center": Field("one", "H"), "cuts": Field("sequences", "four", dtype="int64")}})  # fmt: skip
Work = workspace_kind(PRECONDITIONER)


@piece
def copy(x: Vector, out: Vector):
    for j in range(len(out)):
        out[j] = x[j]


@piece
def add_squares(k: Vector, fade: Number, b: Number, A: Vector):
    """A = fade A + b k * k"""
    for j in range(len(A)):
        A[j] = fade * A[j] + b * k[j] * k[j]


@piece
def multiply(k: Vector, A: Vector, eps: Number, center: Number, rate: Number, w: Vector):
    """w = m * k"""
    one = number(A, 1)
    for j in range(len(w)):
        r = log(A[j] + eps) - center
        w[j] = k[j] * exp(-rate * r / (one + abs(r)))


@piece
def multiply_back(dw: Vector, A: Vector, eps: Number, center: Number, rate: Number, k: Vector, dk: Vector, own: Vector):
    """dk = dw * m; own = dw * k * dm / dcenter"""
    one = number(A, 1)
    for j in range(len(dk)):
        r = log(A[j] + eps) - center
        over = one / (one + abs(r))
        m = exp(-rate * r * over)
        dk[j] = dw[j] * m
        own[j] = dw[j] * k[j] * (rate * m * over * over)


@piece
def squares_back(k: Vector, A: Vector, eps: Number, b: Number, c: Vector, dk: Vector, own: Vector):
    """c -= own / (A + eps), dk += 2 b k * c, own = k * c"""
    twice = b + b
    for j in range(len(c)):
        c[j] -= own[j] / (A[j] + eps)
        own[j] = k[j] * c[j]
        dk[j] += twice * own[j]


@piece
def scale(a: Number, x: Vector):
    for j in range(len(x)):
        x[j] *= a


@piece
def sums(w: Work, n: Whole, h: Whole, start: Whole, stop: Whole):
    """A of head h after each token of sequence n, and w where it is stored."""
    K = w.K
    k, out, A = columns(w.k, h * w.Hk // w.H * K, K), columns(w.w, h * K, K), row(columns(w.end, h * K, K), n)
    copy(row(columns(w.begin, h * K, K), n), A)
    center, eps, rate = w.center[0, h], number(A, w.eps), number(A, w.rate)
    for i in range(start, stop):
        add_squares(row(k, i), exp(w.a[i, h]), w.b[i, h], A)
        if w.stores:
            copy(A, row(columns(w.A, h * K, K), i))
        else:
            multiply(row(k, i), A, eps, center, rate, row(out, i))


@piece
def forward(w: Work, first: Whole, last: Whole):
    """Tasks first..last: a sequence and `each` of its heads."""
    for task in range(first, last):
        cut, low = row(w.cuts, task // w.blocks), task % w.blocks * w.each  # batch row, state, first token, last + 1
        for h in range(low, min(low + w.each, w.H)):
            sums(w, cut[1], h, cut[0] * w.T + cut[2], cut[0] * w.T + cut[3])


@piece
def head_back(w: Work, n: Whole, h: Whole, start: Whole, stop: Whole):
    """Gradients of the tokens of head h of sequence n, from the last one on."""
    K = w.K
    k, A = columns(w.k, h * w.Hk // w.H * K, K), columns(w.A, h * K, K)
    c, own = row(columns(w.dbegin, h * K, K), n), row(columns(w.own, h * K, K), n)
    copy(row(columns(w.dend, h * K, K), n), c)
    center, eps, rate = w.center[0, h], number(c, w.eps), number(c, w.rate)
    for t in range(stop - start):
        i = stop - 1 - t
        now, key, dk = row(A, i), row(k, i), row(columns(w.dk, h * K, K), i)
        before = row(columns(w.begin, h * K, K), n)
        if i > start:
            before = row(A, i - 1)
        multiply_back(row(columns(w.dw, h * K, K), i), now, eps, center, rate, key, dk, own)
        w.dcenter[i, h] = sum_of(own, K)
        squares_back(key, now, eps, w.b[i, h], c, dk, own)
        w.db[i, h] = dot(own, key, K)
        fade = exp(w.a[i, h])
        w.da[i, h] = fade * dot(before, c, K)
        scale(fade, c)


@piece
def backward(w: Work, first: Whole, last: Whole):
    """Tasks first..last."""
    for task in range(first, last):
        cut, low = row(w.cuts, task // w.blocks), task % w.blocks * w.each
        start, stop = cut[0] * w.T + cut[2], cut[0] * w.T + cut[3]
        for h in range(low, min(low + w.each, w.H)):
            sums(w, cut[1], h, start, stop)
            head_back(w, cut[1], h, start, stop)


# Python


class Call:
    """The arrays of a call: tokens (..., T, heads, K), states (..., H, K) or ragged (N, H, K)."""

    def __init__(self, how: Any, x: Any, begin: Any) -> None:
        *lead, T, H = x.b.shape
        Hk, K = x.k.shape[-2:]
        self.dtype, batch = np.dtype(how.dtype), math.prod(lead)
        ragged = not how.sequences or how.sequences[0].row is not None
        self.tokens, self.owners = (*lead, T, H), (*((len(how.sequences),) if ragged else lead), H, K)

        begin = zeros(self.owners, self.dtype) if begin is None else dense(begin, self.dtype)
        self.given = {n: dense(y, self.dtype) for n, y in x._asdict().items()} | {"begin": begin}
        self.given["cuts"] = cuts(batch, T, how.sequences)
        states = math.prod(self.owners[:-2])
        self.sizes = {"T": T, "H": H, "Hk": Hk, "K": K, "count": batch * T, "states": states, "sequences": states,
                      "four": 4, "one": 1, "HK": H * K, "HkK": Hk * K, "eps": how.eps,
                      "rate": math.log(how.span)}  # fmt: skip

    def outputs(self, *names: str) -> dict[str, np.ndarray]:
        """New arrays by name."""
        shapes = {**dict.fromkeys(ROWS["H"], self.tokens), **dict.fromkeys((*ENDS, "own"), self.owners)}
        return {n: working(shapes.get(n, (*self.tokens, self.sizes["K"])), self.dtype) for n in names}

    def run(self, kernel: Any, arrays: dict[str, np.ndarray], stores: int) -> None:
        """Heads are shared out where there are fewer sequences than threads."""
        s, count = self.sizes, self.sizes["states"]
        each = -(-s["H"] // min(s["H"], -(-threads.num_threads() // max(count, 1))))
        blocks = -(-s["H"] // each)
        fields = {n: y.reshape(self._shape(n)) for n, y in (self.given | arrays).items()}
        values = s | fields | {"each": each, "blocks": blocks, "stores": stores}
        over_matrices(kernel, PRECONDITIONER, values, count * blocks, name_of(self.dtype))

    def _shape(self, name: str) -> tuple[int, int]:
        m = PRECONDITIONER.matrices[name]
        return self.sizes[m.rows], self.sizes[m.columns]


def preconditioned(how: Any, x: Any, begin: Any) -> tuple[np.ndarray, np.ndarray]:
    """As ops/preconditioner.py."""
    call = Call(how, x, begin)
    outputs = call.outputs("w", "end")
    call.run(forward, outputs, 0)
    return outputs["w"], outputs["end"]


def preconditioned_vjp(how: Any, x: Any, begin: Any, dw: Any, dend: Any) -> tuple[Any, np.ndarray]:
    """As ops/preconditioner.py."""
    call = Call(how, x, begin)
    dw = zeros((*call.tokens, call.sizes["K"]), call.dtype) if dw is None else dense(dw, call.dtype)
    dend = zeros(call.owners, call.dtype) if dend is None else dense(dend, call.dtype)
    outputs = call.outputs("A", "end", "own", "dk", "da", "db", "dcenter", "dbegin")
    call.run(backward, outputs | {"dw": dw, "dend": dend}, 1)
    dk = sum_of_groups(np, outputs["dk"], call.sizes["Hk"])
    return type(x)(dk, outputs["da"], outputs["db"], over_tokens(np, outputs["dcenter"])), outputs["dbegin"]
