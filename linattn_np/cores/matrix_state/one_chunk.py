"""The algebra of one chunk of C tokens, forward and adjoint; arrays are (..., G, R, C, D).

The incoming state is seen only through a function `read`: x^ -> x^ S_in, and the gradient of the outgoing state only
through `future`: y^ -> y^ dS_out. Who holds those states, and how, is the business of chunks.py, scan.py and
parallel.py. With x^ = from_start(x) for readers and y^ = to_end(y) for writers (decay.py):

    out = scale (read(q^) + sum over writes gram(q, y) w)          S_out = carry(S_in) + sum over writes y^^T w
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...ground.namespace import Array, Namespace, add_to, sum_to
from ...pieces.triangular import slim as slim_lower
from ..decay import NoDecay, decay_of
from ..erase import erase, erase_vjp, system
from ..kinds import Erase, Row
from ..sums import list_chunks
from .inputs import Inputs, Plan


class Gradients(dict[str, Array]):
    """Gradients of a chunk's inputs by name, each summed over the heads and rows that share the input."""

    def __init__(self, xp: Namespace, x: Inputs):
        super().__init__()
        self.xp, self.x = xp, x

    def add(self, name: str, d: Array | None) -> None:
        if d is not None:
            d = sum_to(self.xp, d, getattr(self.x, name).shape)
            self[name] = self[name] + d if name in self else d


class Reader(NamedTuple):
    """An input x that reads the state: its hat x^ and, in the adjoint, the cotangent c of x^ S_in."""

    name: str
    row: Row
    x: Array
    hat: Array
    c: Array | None = None


class Writer(NamedTuple):
    """An input y that writes to the state: its hat y^, and its values as they stand at the end of the chunk."""

    name: str
    y: Array
    hat: Array
    w: Array


class Ready(NamedTuple):
    """What a chunk, or N chunks (..., N, C, D) at once, can compute before it sees a state."""

    x: Inputs
    D: Any  # decay on the key axis
    Dv: Any  # decay on the value axis
    system: Any  # what the erase solves, or None
    recall: Any  # Reader of r or a, or None
    query: Any  # Reader of q, or None
    grams: list[Array]  # gram(q, y), a write each
    hats: list[Array]  # y^, a write each
    bonus: Array | None


def slim(ready: Ready) -> Ready:
    """What a chunk that is not walked back needs: views of the rest would keep all chunks in memory."""
    x, found, query = ready.x, ready.system, ready.query
    return ready._replace(
        x=x._replace(q=None, k=None, g=None, r=None, u=None), D=ready.D.carrier(),
        system=None if found is None else found._replace(N=None, lower=slim_lower(found.lower)),
        recall=None if ready.recall is None else ready.recall._replace(x=None),
        query=None if query is None else query._replace(x=None),
    )  # fmt: skip


def apart(xp: Namespace, y: Any, N: int) -> list[Any]:
    """What N chunks (..., N, C, D) know, as a list of N: arrays, decays, and whatever is made of them."""
    if y is None or isinstance(y, str | Row):
        return [y] * N
    if isinstance(y, tuple):
        make: Any = type(y)  # a named tuple
        return [make(*parts) for parts in zip(*(apart(xp, part, N) for part in y), strict=True)]
    if isinstance(y, list):
        return [list(parts) for parts in zip(*(apart(xp, part, N) for part in y), strict=True)] or [[]] * N
    return y.apart(N) if isinstance(y, NoDecay) else list_chunks(xp, y)


class Forward(NamedTuple):
    """One chunk, computed: the output, the writes, and what the adjoint needs again."""

    out: Array | None
    writers: list[Writer]
    x: Inputs
    D: Any  # decay on the key axis
    Dv: Any  # decay on the value axis
    erased: Any  # Erased
    recall: Any  # Reader of r or a, or None
    query: Any  # Reader of q, or None
    grams: list[Array]  # gram(q, y), a write each
    read: Array | None  # q^ S_in


def chunk_ready(xp: Namespace, x: Inputs, plan: Plan) -> Ready:
    """All that needs no state: grams, the triangular system, hats."""
    D, Dv = decay_of(xp, x.g, plan.dtype), decay_of(xp, x.gv, plan.dtype)
    D.weight()  # carry's, for all chunks
    recall, query, grams, bonus = None, None, [], None
    if x.erase is not Erase.NONE:
        name, vectors, row = ("r", x.r, plan.erase_row) if x.erase is Erase.DELTA else ("a", x.a, Row.BEFORE)
        recall = Reader(name, row, vectors, D.from_start(vectors, row))
    writes = [x.k] if x.erase is not Erase.FREE else [x.k, x.b]
    found = system(xp, x, D, recall.row if recall else Row.AFTER)
    if x.q is not None:
        query = Reader("q", plan.query_row, x.q, D.from_start(x.q, plan.query_row))
        grams = [D.gram(x.q, y, query.row) for y in writes]
        if x.u is not None:
            bonus = xp.sum(x.q * x.u * x.k, axis=-1, keepdims=True) * x.v  # ((q_i (.) u) . k_i) v_i
    return Ready(x, D, Dv, found, recall, query, grams, [D.to_end(y) for y in writes], bonus)


def chunk_fwd(xp: Namespace, ready: Ready, plan: Plan, read: Callable[[Array], Array]) -> Forward:
    """One chunk forward."""
    x, D, Dv, _, recall, query, grams, hats, bonus = ready
    erased = erase(xp, x, ready.system, None if recall is None else read(recall.hat))
    writers = [Writer(n, y, hat, Dv.to_end(w)) for hat, (n, y, w) in zip(hats, erased.writes, strict=True)]
    if query is None:
        return Forward(None, writers, x, D, Dv, erased, recall, None, [], None)
    found = read(query.hat)
    out = Dv.from_start(found, query.row)
    for A, write in zip(grams, erased.writes, strict=True):
        out = add_to(Dv.rows(A, write.w, query.row), out)
    if bonus is not None:
        out = out + bonus
    return Forward(plan.scale * out, writers, x, D, Dv, erased, recall, query, grams, found)


def chunk_state(xp: Namespace, f: Forward, S: Array) -> Array:
    """S_out = carry(S_in) + sum over writes y^^T w."""
    S = _carry(xp, f, S)
    for w in f.writers:
        S = add_to(sum_to(xp, xp.matrix_transpose(w.hat) @ w.w, S.shape), S)
    return S


def _carry(xp: Namespace, f: Forward, S: Array) -> Array:
    S = f.D.carry(S)
    return S if f.x.gv is None else xp.matrix_transpose(f.Dv.carry(xp.matrix_transpose(S)))


def chunk_cotangents(
    xp: Namespace, f: Forward, plan: Plan, dout: Array | None, future: Callable[[Array], Array]
) -> tuple[list[Reader], Gradients]:
    """First half of the adjoint: the readers with their cotangents c, and the gradients that need no state."""
    x, grads, readers = f.x, Gradients(xp, f.x), []
    c = None if dout is None or f.query is None else plan.scale * dout
    dw = []
    for n, (writer, write) in enumerate(zip(f.writers, f.erased.writes, strict=True)):
        shape = write.w.shape
        d, dgv = f.Dv.to_end_vjp(write.w, future(writer.hat))
        d = sum_to(xp, d, shape)
        grads.add("gv", dgv)
        if c is not None and x.gv is None:
            d = d + sum_to(xp, xp.matrix_transpose(f.grams[n]) @ c, shape)
        elif c is not None:
            _, cols, dgv = f.Dv.gram_vjp(f.grams[n], c, write.w, f.query.row)
            d = d + sum_to(xp, cols, shape)
            grads.add("gv", dgv)
        dw.append(d)
    more, c_recall = erase_vjp(xp, x, f.D, f.recall.row if f.recall else Row.AFTER, f.erased, dw)
    for name, d in more.items():
        grads.add(name, d)
    if f.recall is not None:
        readers.append(f.recall._replace(c=c_recall))
    if c is not None:
        row = f.query.row
        for n, write in enumerate(f.erased.writes):
            dq, dy, dg = f.D.gram_vjp(f.Dv.gram(c, write.w, row), x.q, write.y, row, f.grams[n])
            grads.add("q", dq)
            grads.add(write.name, dy)
            grads.add("g", dg)
        c_state, dgv = f.Dv.from_start_vjp(f.read, c, row)
        grads.add("gv", dgv)
        readers.append(f.query._replace(c=c_state))
        if x.u is not None:
            _bonus_vjp(xp, x, c, grads)
    return readers, grads


def _bonus_vjp(xp: Namespace, x: Inputs, c: Array, grads: Gradients) -> None:
    """Adjoint of sum_d q_id u_d k_id v_i."""
    cv = xp.sum(c * x.v, axis=-1, keepdims=True)
    grads.add("q", cv * x.u * x.k)
    grads.add("k", cv * x.u * x.q)
    grads.add("v", xp.sum(x.q * x.u * x.k, axis=-1, keepdims=True) * c)
    grads.add("u", xp.sum(cv * x.q * x.k, axis=-2, keepdims=True))


def chunk_gradients(
    xp: Namespace, f: Forward, readers: list[Reader], grads: Gradients, dread: list[Array], dwrite: list[Array]
) -> Gradients:
    """Second half: dread_n = c S_in^T of each reader and dwrite_n = w dS_out^T of each writer, to input gradients."""
    for reader, d in zip(readers, dread, strict=True):
        dx, dg = f.D.from_start_vjp(reader.x, d, reader.row)
        grads.add(reader.name, dx)
        grads.add("g", dg)
    for writer, d in zip(f.writers, dwrite, strict=True):
        dy, dg = f.D.to_end_vjp(writer.y, d)
        grads.add(writer.name, dy)
        grads.add("g", dg)
    return grads


def chunk_state_vjp(
    xp: Namespace, f: Forward, readers: list[Reader], grads: Gradients, S: Array, dS: Array
) -> Array:
    """dS_in = carry(dS_out) + sum over readers x^^T c; adds what the gates get from the carried state."""
    if f.x.gv is None:
        dS_in, dg = f.D.carry_vjp(S, dS)
    else:
        T = xp.matrix_transpose
        mid, dgv = f.Dv.carry_vjp(T(f.D.carry(S)), T(dS))
        dS_in, dg = f.D.carry_vjp(S, T(mid))
        grads.add("gv", dgv)
    grads.add("g", dg)
    for reader in readers:
        dS_in = dS_in + sum_to(xp, xp.matrix_transpose(reader.hat) @ reader.c, S.shape)
    return dS_in

