"""Rotated keys and weighted values that come one token late, and their transpose: one pass each (ops/trapezoid.py).

A task is a sequence, or some of its heads: its tokens in turn forward; backward the angles in turn, then the tokens
from the last to the first, since an angle turns all later ones. Rows are the tokens of the batch, one after the other.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ...runtime import threads
from ...runtime.arrays import name_of
from ...runtime.constants import host_constants
from ...runtime.pieces.memory import working
from ...runtime.pieces.piece import Double, Number, Vector, Whole, Wide, piece, workspace_kind
from ...runtime.pieces.registers import fma, load_part, store_part
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import dot, sum_of
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import columns, row, rows
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from .formulas import dense
from .numbers import OPTIONS, exp, number, sigmoid, sine_cosine, tanh
from .rowwise import rotated

ROWS = {"H": ("dt", "trap", "g", "shares", "ddt", "dtrap", "dA", "written"), "HP": ("angle", "dangle"),
        "HK": ("q", "k", "dq", "dk", "dB", "dC"), "HV": ("x", "v", "dv", "dout", "dx"), "HkK": ("B",),
        "HqK": ("C",), "HPP": ("turns",)}  # fmt: skip
ENDS = {"H": ("end_own",), "HK": ("past_k", "end_k", "dpast_k"), "HV": ("past_v", "end_v", "dpast_v"),
        "HPP": ("end_turn",)}  # fmt: skip
SCRATCH = {"theta": "P", "turn": "PP", "near": "P", "late": "K", "own": "two"}  # of each head of each sequence
TRAPEZOID = Workspace(
    "trapezoid", ("T", "H", "Hk", "Hq", "K", "V", "P", "blocks", "each", "reads", "begun", "skips", "shifts"),
    ("scale",), (), {"given": {
        **{name: Field("count", width) for width, names in ROWS.items() for name in names},
        **{name: Field("states", width) for width, names in ENDS.items() for name in names},
        "A": Field("rates", "H"), "D": Field("one", "H"), "none": Field("one", "widest"),
        **{name: Field("all", width, dtype="float64" if name == "theta" else "") for name, width in SCRATCH.items()},
        "cuts": Field("sequences", "four", dtype="int64"),
    }})  # fmt: skip
Work = workspace_kind(TRAPEZOID)


@njit(**OPTIONS)
def tangents(x: Any, out: Any) -> None:
    """tanh x"""
    for j in range(len(out)):
        out[j] = tanh(x[j])


@njit(**OPTIONS)
def add_angles(x: Any, dt: Any, theta: Any, out: Any) -> None:
    """theta += pi x dt; out = theta less whole turns."""
    for p in range(len(out)):
        total = theta[p] + math.pi * dt * np.float64(x[p])
        theta[p] = total
        out[p] = total - 2 * math.pi * np.rint(total * (0.5 / math.pi))


@njit(**OPTIONS)
def cosines_and_sines(x: Any, cosines: Any, sines: Any) -> None:
    for p in range(len(x)):
        sines[p], cosines[p] = sine_cosine(x[p])


@njit(**OPTIONS)
def turned(angle: Any, dt: Any, theta: Any, own: Any, turn: Any) -> None:
    """theta += pi tanh(angle) dt; its cosines, then its sines.   own: scratch memory of P numbers"""
    n = len(angle)
    tangents(angle, own)
    add_angles(own, np.float64(dt), theta, own)
    cosines_and_sines(own, rows(turn, 0, n), rows(turn, n, n))


@njit(**OPTIONS)
def copied(x: Any, a: Any, out: Any) -> None:
    """a x"""
    for j in range(0, len(out), BYTES // out.itemsize):
        store_part(a * load_part(x, j), out, j)


@njit(**OPTIONS)
def add(x: Any, a: Any, out: Any) -> None:
    """out += a x"""
    for j in range(0, len(out), BYTES // out.itemsize):
        store_part(fma(a, load_part(x, j), load_part(out, j)), out, j)


@piece
def rotate(x: Vector, turn: Vector, back: Whole, out: Vector):
    """The pairs of a row by the angles of a token; the other channels as they are."""
    n, rest = len(turn) // 2, len(out) - len(turn)
    rotated(rows(x, 0, 2 * n), rows(turn, 0, n), rows(turn, n, n), back, rows(out, 0, 2 * n))
    copied(rows(x, 2 * n, rest), number(out, 1), rows(out, 2 * n, rest))


@piece
def begin(w: Work, n: Whole, h: Whole):
    """The state of head h before the first token of sequence n: no angle, the last key, its gamma in the state."""
    at, none = n * w.H + h, row(w.none, 0)
    theta, one = row(w.theta, at), number(none, 1)
    for p in range(len(theta)):
        theta[p] = 0
    w.own[at, 0] = 0
    copied(row(columns(w.past_k, h * w.K, w.K), n) if w.begun else rows(none, 0, w.K), one, row(w.late, at))


@piece
def token(w: Work, n: Whole, i: Whole, h: Whole, is_first: Whole):
    """q, k, v, g and shares of head h of row i."""
    at, K, V, P, one = n * w.H + h, w.K, w.V, w.P, number(row(w.none, 0), 1)
    B, turn, late = row(columns(w.B, h * w.Hk // w.H * K, K), i), row(w.turn, at), row(w.late, at)
    dt, before, value = w.dt[i, h], w.own[at, 0], rows(row(w.none, 0), 0, V)
    if is_first == 0:
        value = row(columns(w.x, h * V, V), i - 1)
    elif w.begun:
        value = row(columns(w.past_v, h * V, V), n)
    turned(row(columns(w.angle, h * P, P), i), dt, row(w.theta, at), row(w.near, at), turn)
    own, g = dt * sigmoid(w.trap[i, h]), dt * w.A[i if w.shifts else 0, h]
    w.g[i, h], w.own[at, 0] = g, own
    copied(late, one, row(columns(w.k, h * K, K), i))
    copied(value, exp(g) * ((dt - own) + before), row(columns(w.v, h * V, V), i))
    rotate(B, turn, 0, late)
    if w.reads:
        C = row(columns(w.C, h * w.Hq // w.H * K, K), i)
        rotate(C, turn, 0, row(columns(w.q, h * K, K), i))
        share = w.scale * own * dot(C, B, K)
        w.shares[i, h] = share + w.D[0, h] if w.skips else share


@piece
def end(w: Work, n: Whole, h: Whole, first: Whole, stop: Whole):
    """Key, value, gamma and rotation of the last token, or of the state if there is none."""
    at, K, V, P, none = n * w.H + h, w.K, w.V, w.P, row(w.none, 0)
    key, value, turn, one = row(w.late, at), rows(none, 0, V), row(w.turn, at), number(none, 1)
    if w.begun:
        value = row(columns(w.past_v, h * V, V), n)
    if stop > first:
        key = row(columns(w.B, h * w.Hk // w.H * K, K), stop - 1)
        value = row(columns(w.x, h * V, V), stop - 1)
    else:
        for p in range(P):
            turn[p], turn[P + p] = 1, 0
    w.end_own[n, h] = w.own[at, 0]
    copied(key, one, row(columns(w.end_k, h * K, K), n))
    copied(value, one, row(columns(w.end_v, h * V, V), n))
    copied(turn, one, row(columns(w.end_turn, 2 * h * P, 2 * P), n))


@piece
def forward(w: Work, first: Whole, last: Whole):
    """q, k, v, g, shares and the last tokens of tasks first..last: a sequence, and `each` of its heads."""
    for task in range(first, last):
        cut, low = row(w.cuts, task // w.blocks), task % w.blocks * w.each  # batch row, state, first token, last + 1
        high, start, stop = min(low + w.each, w.H), cut[0] * w.T + cut[2], cut[0] * w.T + cut[3]
        for h in range(low, high):
            begin(w, cut[1], h)
        for i in range(start, stop):
            for h in range(low, high):
                token(w, cut[1], i, h, 1 if i == start else 0)
        for h in range(low, high):
            end(w, cut[1], h, start, stop)


@njit(**OPTIONS)
def crossed(x: Any, d: Any, total: Any) -> None:
    """total += the gradient of an angle, x_even d_odd - x_odd d_even."""
    for p in range(len(total)):
        total[p] += (np.float64(x[2 * p]) * np.float64(d[2 * p + 1])
                     - np.float64(x[2 * p + 1]) * np.float64(d[2 * p]))  # fmt: skip


@piece
def angle_vjp(dt: Double, total: Wide, own: Vector, dangle: Vector) -> Number:
    """dangle = pi (1 - own^2) dt total, own = tanh angle; returns the part of ddt, pi <own, total>."""
    for p in range(len(dangle)):
        slope = np.float64(own[p])
        dangle[p] = math.pi * dt * (1 - slope * slope) * total[p]
        own[p] = math.pi * slope * total[p]
    return sum_of(own, len(dangle))


@piece
def token_vjp(w: Work, n: Whole, i: Whole, h: Whole, start: Whole, stop: Whole):
    """Gradients of row i of head h, after those of all later rows."""
    at, K, V, P, none = n * w.H + h, w.K, w.V, w.P, row(w.none, 0)
    one, nothing, total, near = number(none, 1), number(none, 0), row(w.theta, at), row(w.near, at)
    B, C = row(columns(w.B, h * w.Hk // w.H * K, K), i), row(columns(w.C, h * w.Hq // w.H * K, K), i)
    x, turn = row(columns(w.x, h * V, V), i), row(columns(w.turns, 2 * h * P, 2 * P), i)
    dB, dx, dv = row(columns(w.dB, h * K, K), i), row(columns(w.dx, h * V, V), i), columns(w.dv, h * V, V)
    dt, lam, later, weight = (
        w.dt[i, h],
        sigmoid(w.trap[i, h]),
        w.own[at, 0],
        w.own[at, 1],
    )  # of the token after: e^g dw, w
    own, down, before, value = lam * dt, later, nothing, rows(none, 0, V)
    if i + 1 < stop:
        rotate(row(columns(w.dk, h * K, K), i + 1), turn, 1, dB)
        crossed(B, dB, total)
        copied(row(dv, i + 1), weight, dx)
    else:
        copied(rows(none, 0, K), one, dB)
        copied(rows(none, 0, V), one, dx)
    if i > start:
        before, value = w.dt[i - 1, h] * sigmoid(w.trap[i - 1, h]), row(columns(w.x, h * V, V), i - 1)
    elif w.begun:
        value = row(columns(w.past_v, h * V, V), n)
    if w.reads:
        dC, dout = row(columns(w.dC, h * K, K), i), row(columns(w.dout, h * V, V), i)
        rotate(row(columns(w.dq, h * K, K), i), turn, 1, dC)
        crossed(C, dC, total)
        written, overlap = dot(dout, x, V), w.scale * dot(C, B, K)
        down += overlap * written
        share = overlap * own
        add(dout, share + w.D[0, h] if w.skips else share, dx)
        w.written[i, h] = written
        add(C, w.scale * own * written, dB)
        add(B, w.scale * own * written, dC)
    rate = w.A[i if w.shifts else 0, h]
    fade, dw = exp(dt * rate), dot(row(dv, i), value, V)
    weight, later = fade * ((dt - own) + before), fade * dw
    w.own[at, 0], w.own[at, 1] = later, weight
    dg = w.g[i, h] + weight * dw
    tangents(row(columns(w.angle, h * P, P), i), near)
    ddt = angle_vjp(np.float64(dt), total, near, row(columns(w.dangle, h * P, P), i))
    w.ddt[i, h] = ddt + lam * down + (one - lam) * later + rate * dg
    w.dtrap[i, h] = lam * (one - lam) * dt * (down - later)
    w.dA[i, h] = dt * dg


@piece
def begin_vjp(w: Work, n: Whole, h: Whole, start: Whole, stop: Whole):
    """Gradients of the last key and value before the first token."""
    at, K, V, none = n * w.H + h, w.K, w.V, row(w.none, 0)
    dk, dv, by = rows(none, 0, K), rows(none, 0, V), number(none, 1)
    if stop > start:
        dk, dv, by = row(columns(w.dk, h * K, K), start), row(columns(w.dv, h * V, V), start), w.own[at, 1]
    copied(dk, number(none, 1), row(columns(w.dpast_k, h * K, K), n))
    copied(dv, by, row(columns(w.dpast_v, h * V, V), n))


@piece
def backward(w: Work, first: Whole, last: Whole):
    """Gradients of the tokens, and of the last key and value before them, of tasks first..last."""
    for task in range(first, last):
        cut, low = row(w.cuts, task // w.blocks), task % w.blocks * w.each
        high, start, stop = min(low + w.each, w.H), cut[0] * w.T + cut[2], cut[0] * w.T + cut[3]
        for h in range(low, high):
            begin(w, cut[1], h)
        for i in range(start, stop):
            for h in range(low, high):
                at = cut[1] * w.H + h
                turned(row(columns(w.angle, h * w.P, w.P), i), w.dt[i, h], row(w.theta, at), row(w.near, at),
                       row(columns(w.turns, 2 * h * w.P, 2 * w.P), i))  # fmt: skip
        for h in range(low, high):
            begin(w, cut[1], h)  # the theta of a head is now the sum of the gradients of later angles
            w.own[cut[1] * w.H + h, 1] = 0
        for i in range(stop - 1, start - 1, -1):
            for h in range(low, high):
                token_vjp(w, cut[1], i, h, start, stop)
        if w.begun:
            for h in range(low, high):
                begin_vjp(w, cut[1], h, start, stop)


# Python


class Call(NamedTuple):
    """The arrays of a call and their sizes: (..., T, heads, width), states (..., heads, width) or ragged (N, ..)."""

    given: dict[str, Any]
    sizes: dict[str, int]
    lead: tuple[int, ...]  # batch axes of tokens
    owners: tuple[int, ...]  # those of states
    dtype: np.dtype

    def tokens(self, name: str) -> np.ndarray:
        """A new array of tokens."""
        H, width = self.sizes["H"], self.sizes[TRAPEZOID.matrices[name].columns]
        return working((*self.lead, self.sizes["T"], H, width // H), self.dtype)

    def states(self, name: str) -> np.ndarray:
        """A new array of the ends of sequences."""
        H, width = self.sizes["H"], self.sizes[TRAPEZOID.matrices[name].columns]
        return working((*self.owners, H, width // H), self.dtype)

    def run(self, kernel: Any, made: dict[str, np.ndarray]) -> None:
        """Heads are shared out where there are fewer sequences than threads; a head has the same bits in any share."""
        count, H, s = self.sizes["states"], self.sizes["H"], self.sizes
        each = -(-H // min(H, -(-threads.num_threads() // count)))
        sizes = s | {"each": each, "blocks": -(-H // each)}
        scratch = {n: working((s["all"], s[width]), np.dtype(np.float64) if n == "theta" else self.dtype)
                   for n, width in SCRATCH.items()}  # fmt: skip
        arrays = {n: y.reshape(self._shape(n)) for n, y in (self.given | made).items()}
        over_matrices(kernel, TRAPEZOID, sizes | arrays | scratch, count * sizes["blocks"], name_of(self.dtype))

    def _shape(self, name: str) -> tuple[int, int]:
        m = TRAPEZOID.matrices[name]
        return self.sizes[m.rows], self.sizes[m.columns]


def call_of(x: Any, last: Any, D: Any, scale: float, sequences: Any, dtype: Any, more: dict[str, Any] = {}) -> Call:  # noqa: B006
    """The call of tokens x, the last key and value before them, and a skip connection D (H,); None: there are none."""
    *lead, T, H, V = x.x.shape
    K, P, batch, dtype = x.B.shape[-1], x.angle.shape[-1], math.prod(lead), np.dtype(dtype)
    ragged = sequences[0].row is not None if sequences else True
    owners = (len(sequences),) if ragged else tuple(lead)

    def cuts() -> np.ndarray:
        if not ragged:
            return np.array([(n, n, 0, T) for n in range(batch)], np.int64).reshape(-1, 4)
        return np.array([(0, s.row, s.start, s.stop) for s in sequences], np.int64).reshape(-1, 4)

    cut = host_constants.once(("cuts", batch, T, tuple(sequences)), cuts)
    zeros = host_constants.once(("zeros", max(K, V), dtype.name), lambda: np.zeros((1, max(K, V)), dtype))
    given = {"x": x.x, "dt": x.dt, "A": x.A, "B": x.B, "trap": x.trap, "angle": x.angle} | more
    given |= {} if x.C is None else {"C": x.C}
    given |= {} if D is None else {"D": D}
    given |= {} if last is None else {"past_k": last[0], "past_v": last[1]}
    given = {n: dense(y, dtype) for n, y in given.items()} | {"cuts": cut, "none": zeros}
    Hk, Hq, states = x.B.shape[-2], 1 if x.C is None else x.C.shape[-2], math.prod(owners)
    sizes = {"T": T, "H": H, "Hk": Hk, "Hq": Hq, "K": K, "V": V, "P": P, "count": batch * T, "states": states,
             "sequences": states, "four": 4, "one": 1, "widest": max(K, V), "all": states * H, "two": 2, "PP": 2 * P,
             "HK": H * K, "HV": H * V, "HP": H * P, "HPP": 2 * H * P, "HkK": Hk * K, "HqK": Hq * K,
             "rates": x.A.size // max(H, 1), "shifts": int(x.A.ndim > 1), "reads": int(x.C is not None),
             "begun": int(last is not None), "skips": int(D is not None), "scale": scale}  # fmt: skip
    return Call(given, sizes, tuple(lead), owners, dtype)


def late_writes(x: Any, last: Any, D: Any, scale: float, sequences: Any, dtype: Any) -> tuple[Any, ...]:
    """As ops/trapezoid.py: q, k, v, g, shares, and of the last token key, value, gamma and rotation."""
    call = call_of(x, last, D, scale, sequences, dtype)
    names = ("k", "v", "g") if x.C is None else ("q", "k", "v", "g", "shares")
    made = {n: call.tokens(n) for n in names} | {n: call.states(n) for n in ("end_k", "end_v", "end_own", "end_turn")}
    call.run(forward, made)
    turn = made["end_turn"].reshape((*call.owners, call.sizes["H"], 2, call.sizes["P"]))
    return (made.get("q"), made["k"], made["v"], made["g"][..., 0], made.get("shares"), made["end_k"], made["end_v"],
            made["end_own"], np.moveaxis(turn, -2, 0))  # fmt: skip


def late_writes_vjp(x: Any, last: Any, D: Any, scale: float, sequences: Any, dtype: Any, d: Any, dout: Any) -> Any:
    """Gradients (of the tokens by name; of the last key and value before them) from those of q, k, v, g and outputs.

    d: of the core's inputs. dout: of (out + shares x), None without queries.
    """
    more = {"dk": d.k, "dv": d.v, "g": d.g} | ({} if x.C is None else {"dq": d.q, "dout": dout})
    call = call_of(x, last, D, scale, sequences, dtype, more)
    names = ("dx", "dB", "ddt", "dtrap", "dA", "dangle", *(() if x.C is None else ("dC", "written")))
    made = {n: call.tokens(n) for n in names}
    made |= {} if last is None else {n: call.states(n) for n in ("dpast_k", "dpast_v")}
    call.run(backward, made | {"turns": call.tokens("turns")})
    return {n: y[..., 0] if n in ("ddt", "dtrap", "dA", "written") else y for n, y in made.items()}
