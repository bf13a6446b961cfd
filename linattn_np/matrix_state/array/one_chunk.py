"""The algebra of one chunk of C tokens, forward and adjoint; arrays are (..., G, R, C, D).

The incoming state enters through a function `read`: x^ -> x^ S_in, and the gradient of the outgoing state through
`reverse_carry`: y^ -> y^ dS_out. running.py, scan.py and parallel.py provide these functions, each with its own
representation of the states. x^ = from_start(x) is a decayed reader, y^ = to_end(y) a decayed writer (decay.py):

    out = scale (read(q^) + sum over writes gram(q, y) w)          S_out = carry(S_in) + sum over writes (y^)^T w
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...ops.triangular import forward_part as forward_part_of_lower
from ...runtime.arrays import Array, Namespace, add_to, sum_to
from ..types import Erase, Inputs, Plan, ReadState
from .cumulative import list_chunks
from .decay import NoDecay, decay_of
from .erase import erase, erase_vjp, system


class GradientSums(dict[str, Array]):
    """Gradients of a chunk's inputs by name, each summed over the heads and batch rows that share the input."""

    def __init__(self, xp: Namespace, x: Inputs):
        super().__init__()
        self.xp, self.x = xp, x

    def add(self, name: str, d: Array | None) -> None:
        if d is not None:
            d = sum_to(self.xp, d, getattr(self.x, name).shape)
            self[name] = self[name] + d if name in self else d


class Reader(NamedTuple):
    """An input x that reads the state: x^ = from_start(x) and, in the adjoint, the cotangent c of x^ S_in."""

    name: str
    reads: ReadState
    x: Array
    decayed: Array
    c: Array | None = None


class Writer(NamedTuple):
    """An input y that writes to the state: y^ = to_end(y), and its values w decayed to the end of the chunk."""

    name: str
    y: Array
    decayed: Array
    w: Array


class Factors(NamedTuple):
    """Intra-chunk factors of one chunk or of N chunks (..., N, C, D): everything that does not depend on the state."""

    x: Inputs
    D: Any  # decay on the key axis
    Dv: Any  # decay on the value axis
    system: Any  # System of the erase, or None
    erase_reader: Any  # Reader of r or a, or None
    query_reader: Any  # Reader of q, or None
    grams: list[Array]  # gram(q, y) for each write
    decayed_writes: list[Array]  # y^ for each write
    bonus: Array | None


def forward_part(factors: Factors) -> Factors:
    """The factors that a forward without residuals needs; views of the others would keep all chunks in memory."""
    x, lower, query_reader = factors.x, factors.system, factors.query_reader
    return factors._replace(
        x=x._replace(q=None, k=None, g=None, r=None, u=None), D=factors.D.carry_part(),
        system=None if lower is None else lower._replace(gram=None, lower=forward_part_of_lower(lower.lower)),
        erase_reader=None if factors.erase_reader is None else factors.erase_reader._replace(x=None),
        query_reader=None if query_reader is None else query_reader._replace(x=None),
    )  # fmt: skip


def unstack(xp: Namespace, y: Any, N: int) -> list[Any]:
    """N chunks (..., N, C, D) as a list of N: of arrays, decays, and of tuples and lists of them."""
    if y is None or isinstance(y, str | ReadState):
        return [y] * N
    if isinstance(y, tuple):
        kind: Any = type(y)  # a named tuple
        return [kind(*parts) for parts in zip(*(unstack(xp, part, N) for part in y), strict=True)]
    if isinstance(y, list):
        return [list(parts) for parts in zip(*(unstack(xp, part, N) for part in y), strict=True)] or [[]] * N
    return y.unstack(N) if isinstance(y, NoDecay) else list_chunks(xp, y)


class OneChunk(NamedTuple):
    """One chunk forward: the output, the writes, and the residuals of the adjoint."""

    out: Array | None
    writers: list[Writer]
    x: Inputs
    D: Any  # decay on the key axis
    Dv: Any  # decay on the value axis
    erased: Any  # Erased
    erase_reader: Any  # Reader of r or a, or None
    query_reader: Any  # Reader of q, or None
    grams: list[Array]  # gram(q, y) for each write
    read: Array | None  # q^ S_in


def chunk_factors(xp: Namespace, x: Inputs, plan: Plan) -> Factors:
    """The factors of a chunk: gram matrices, the triangular system, decayed readers and writers."""
    D, Dv = decay_of(xp, x.g, plan.dtype), decay_of(xp, x.gv, plan.dtype)
    D.weight()  # the table of `carry`, computed here for all chunks
    erase_reader, query_reader, grams, bonus = None, None, [], None
    if x.erase is not Erase.NONE:
        delta = x.erase is Erase.DELTA
        name, vectors, reads = ("r", x.r, plan.erase_reads) if delta else ("a", x.a, ReadState.PREVIOUS)
        erase_reader = Reader(name, reads, vectors, D.from_start(vectors, reads))
    writes = [x.k] if x.erase is not Erase.FREE else [x.k, x.b]
    lower = system(xp, x, D, erase_reader.reads if erase_reader else ReadState.UPDATED)
    if x.q is not None:
        query_reader = Reader("q", plan.query_reads, x.q, D.from_start(x.q, plan.query_reads))
        grams = [D.gram(x.q, y, query_reader.reads) for y in writes]
        if x.u is not None:
            bonus = xp.sum(x.q * x.u * x.k, axis=-1, keepdims=True) * x.v  # ((q_i (.) u) . k_i) v_i
    return Factors(x, D, Dv, lower, erase_reader, query_reader, grams, [D.to_end(y) for y in writes], bonus)


def chunk_fwd(xp: Namespace, factors: Factors, plan: Plan, read: Callable[[Array], Array]) -> OneChunk:
    """One chunk forward."""
    x, D, Dv, _, erase_reader, query_reader, grams, decayed_writes, bonus = factors
    erased = erase(xp, x, factors.system, None if erase_reader is None else read(erase_reader.decayed))
    writers = [
        Writer(name, y, decayed, Dv.to_end(w))
        for decayed, (name, y, w) in zip(decayed_writes, erased.writes, strict=True)
    ]
    if query_reader is None:
        return OneChunk(None, writers, x, D, Dv, erased, erase_reader, None, [], None)
    from_state = read(query_reader.decayed)
    out = Dv.from_start(from_state, query_reader.reads)
    for gram, write in zip(grams, erased.writes, strict=True):
        out = add_to(Dv.rows(gram, write.w, query_reader.reads), out)
    if bonus is not None:
        out = out + bonus
    return OneChunk(plan.scale * out, writers, x, D, Dv, erased, erase_reader, query_reader, grams, from_state)


def chunk_state(xp: Namespace, f: OneChunk, S: Array) -> Array:
    """S_out = carry(S_in) + sum over writes (y^)^T w."""
    S = _carry(xp, f, S)
    for w in f.writers:
        S = add_to(sum_to(xp, xp.matrix_transpose(w.decayed) @ w.w, S.shape), S)
    return S


def _carry(xp: Namespace, f: OneChunk, S: Array) -> Array:
    S = f.D.carry(S)
    return S if f.x.gv is None else xp.matrix_transpose(f.Dv.carry(xp.matrix_transpose(S)))


def chunk_cotangents(
    xp: Namespace, f: OneChunk, plan: Plan, dout: Array | None, reverse_carry: Callable[[Array], Array]
) -> tuple[list[Reader], GradientSums]:
    """First half of the adjoint: the readers with their cotangents c, and the gradients that do not depend on S_in."""
    x, grads, readers = f.x, GradientSums(xp, f.x), []
    c = None if dout is None or f.query_reader is None else plan.scale * dout
    dw = []
    for n, (writer, write) in enumerate(zip(f.writers, f.erased.writes, strict=True)):
        shape = write.w.shape
        d, dgv = f.Dv.to_end_vjp(write.w, reverse_carry(writer.decayed))
        d = sum_to(xp, d, shape)
        grads.add("gv", dgv)
        if c is not None and x.gv is None:
            d = d + sum_to(xp, xp.matrix_transpose(f.grams[n]) @ c, shape)
        elif c is not None:
            _, cols, dgv = f.Dv.gram_vjp(f.grams[n], c, write.w, f.query_reader.reads)
            d = d + sum_to(xp, cols, shape)
            grads.add("gv", dgv)
        dw.append(d)
    more, c_erase = erase_vjp(xp, x, f.D, f.erase_reader.reads if f.erase_reader else ReadState.UPDATED, f.erased, dw)
    for name, d in more.items():
        grads.add(name, d)
    if f.erase_reader is not None:
        readers.append(f.erase_reader._replace(c=c_erase))
    if c is not None:
        reads = f.query_reader.reads
        for n, write in enumerate(f.erased.writes):
            dq, dy, dg = f.D.gram_vjp(f.Dv.gram(c, write.w, reads), x.q, write.y, reads, f.grams[n])
            grads.add("q", dq)
            grads.add(write.name, dy)
            grads.add("g", dg)
        c_state, dgv = f.Dv.from_start_vjp(f.read, c, reads)
        grads.add("gv", dgv)
        readers.append(f.query_reader._replace(c=c_state))
        if x.u is not None:
            _bonus_vjp(xp, x, c, grads)
    return readers, grads


def _bonus_vjp(xp: Namespace, x: Inputs, c: Array, grads: GradientSums) -> None:
    """Adjoint of sum_d q_id u_d k_id v_i."""
    cv = xp.sum(c * x.v, axis=-1, keepdims=True)
    grads.add("q", cv * x.u * x.k)
    grads.add("k", cv * x.u * x.q)
    grads.add("v", xp.sum(x.q * x.u * x.k, axis=-1, keepdims=True) * c)
    grads.add("u", xp.sum(cv * x.q * x.k, axis=-2, keepdims=True))


def chunk_gradients(
    xp: Namespace, f: OneChunk, readers: list[Reader], grads: GradientSums, dread: list[Array], dwrite: list[Array]
) -> GradientSums:
    """Second half: dread_n = c S_in^T of each reader and dwrite_n = w dS_out^T of each writer, to input gradients."""
    for reader, d in zip(readers, dread, strict=True):
        dx, dg = f.D.from_start_vjp(reader.x, d, reader.reads)
        grads.add(reader.name, dx)
        grads.add("g", dg)
    for writer, d in zip(f.writers, dwrite, strict=True):
        dy, dg = f.D.to_end_vjp(writer.y, d)
        grads.add(writer.name, dy)
        grads.add("g", dg)
    return grads


def chunk_state_vjp(
    xp: Namespace, f: OneChunk, readers: list[Reader], grads: GradientSums, S: Array, dS: Array
) -> Array:
    """dS_in = carry(dS_out) + sum over readers (x^)^T c; adds the carried state's part of dg and dgv."""
    if f.x.gv is None:
        dS_in, dg = f.D.carry_vjp(S, dS)
    else:
        T = xp.matrix_transpose
        mid, dgv = f.Dv.carry_vjp(T(f.D.carry(S)), T(dS))
        dS_in, dg = f.D.carry_vjp(S, T(mid))
        grads.add("gv", dgv)
    grads.add("g", dg)
    for reader in readers:
        dS_in = dS_in + sum_to(xp, xp.matrix_transpose(reader.decayed) @ reader.c, S.shape)
    return dS_in
