"""Conversion between the public layout (..., T, H, D) and the core's (..., G, R, T, D): H = G groups of R heads.

An array with fewer heads has R = 1 and is broadcast over its group; nothing is copied.
"""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, Namespace, cast, device, is_mutable, sum_to, swap
from ..runtime.recorder import refuse
from .blocks import WHOLE, Block
from .types import Inputs, Plan


def groups(x: Inputs) -> int:
    """G: the fewest heads of any array that has tokens."""
    return min(y.shape[-2] for y in (x.q, x.k, x.v) if y is not None)


def split(xp: Namespace, y: Array, G: int) -> Array:
    """(..., T, H, D) as a view (..., G, H / G, T, D)."""
    y = swap(xp, y, -3)
    return xp.reshape(y, (*y.shape[:-3], G, y.shape[-3] // max(G, 1), *y.shape[-2:]))


def split_all(xp: Namespace, x: Inputs, G: int) -> Inputs:
    """Every array of x in the core's layout; the bonus u (H, K) becomes (G, R, 1, K)."""
    u = None if x.u is None else xp.reshape(x.u, (G, x.u.shape[0] // max(G, 1), 1, x.u.shape[1]))
    return x.mapped(lambda y: split(xp, y, G), u)


def split_state(xp: Namespace, S: Array, G: int) -> Array:
    """(..., H, K, V) as (..., G, R, K, V)."""
    return xp.reshape(S, (*S.shape[:-3], G, S.shape[-3] // max(G, 1), *S.shape[-2:]))


def join_state(xp: Namespace, S: Array) -> Array:
    """(..., G, R, K, V) as (..., H, K, V)."""
    return xp.reshape(S, (*S.shape[:-4], S.shape[-4] * S.shape[-3], *S.shape[-2:]))


def initial_state(core: Inputs, plan: Plan, state: Array | None, index: int | None, G: int) -> Array:
    """S_0 of one sequence as (..., G, R, K, V) in the dtype of the computation; zeros if None."""
    xp = plan.xp
    if state is None:
        shape = (*core.v.shape[:-2], core.k.shape[-1], core.v.shape[-1])
        return xp.zeros(shape, dtype=plan.dtype, device=device(core.v))
    if index is not None:
        state = xp.reshape(state[index, ...], (*core.v.shape[:-4], *state.shape[1:]))
    return cast(xp, split_state(xp, state, G), plan.dtype)


def gather_states(plan: Plan, states: list[Array]) -> Array:
    """Core-layout states as one public array: (..., H, K, V), or (N, H, K, V) of a ragged batch of N > 0."""
    xp = plan.xp
    joined = [join_state(xp, S) for S in states]
    if plan.sequences and plan.sequences[0].row is None:
        return joined[0]
    return xp.stack([xp.reshape(S, S.shape[-3:]) for S in joined], axis=0)


def take(xp: Namespace, x: Inputs, start: int, stop: int, dtype: Any) -> Inputs:
    """Tokens start..stop of core-layout arrays, in `dtype`."""
    return x.mapped(lambda y: cast(xp, y[..., start:stop, :], dtype), None if x.u is None else cast(xp, x.u, dtype))


def fold(xp: Namespace, x: Inputs, N: int, C: int) -> Inputs:
    """Arrays (..., N C, D) as N chunks (..., N, C, D); the bonus gets an axis of chunks."""
    u = None if x.u is None else x.u[..., None, :, :]
    u = None if u is None else xp.broadcast_to(u, (*u.shape[:-3], N, *u.shape[-2:]))
    return x.mapped(lambda y: fold_tokens(xp, y, N, C), u)


def fold_tokens(xp: Namespace, y: Array, N: int, C: int) -> Array:
    """(..., N C, D) as (..., N, C, D)."""
    return xp.reshape(y, (*y.shape[:-2], N, C, y.shape[-1]))


class TokenBuffer:
    """An array (..., T, H, D), assembled from core-layout token ranges."""

    def __init__(self, xp: Namespace, shape: tuple[int, ...], dtype: Any, where: Any):
        self.xp, self.shape, self.dtype, self.where = xp, shape, dtype, where
        self.pieces: dict[int, Array] = {}
        self.whole: Array | None = None
        self.parts: list[TokenBuffer] = []
        self.filled = False

    def part(self, block: Block, G: int) -> TokenBuffer:
        """The buffer of a block of heads: a view of this buffer's array."""
        if block is WHOLE:
            return self
        if self.whole is None:
            self.whole = self.xp.empty(self.shape, dtype=self.dtype, device=self.where)
        *lead, _, H, _ = self.shape
        each = H // max(G, 1)
        heads = slice(block.groups.start * each, block.groups.stop * each)
        view = self.whole[(*block.batch[len(block.batch) - len(lead) :], ..., heads, slice(None))]
        part = TokenBuffer(self.xp, tuple(view.shape), self.dtype, self.where)
        part.whole = view
        self.parts.append(part)
        return part

    def put(self, start: int, piece: Array) -> None:
        """Store tokens start.. from (..., G, R, C, D), summed over the heads and batch rows that share the array."""
        xp, (*lead, _, H, D) = self.xp, self.shape
        G, C = piece.shape[-4], piece.shape[-2]
        piece = sum_to(xp, piece, (*lead, G, H // max(G, 1), C, D))
        piece = cast(xp, swap(xp, xp.reshape(piece, (*lead, H, C, D)), -3), self.dtype)
        if not is_mutable(xp):
            self.pieces[start] = piece
            return
        if self.whole is None:
            self.whole = xp.empty(self.shape, dtype=self.dtype, device=self.where)
        refuse("an array call writes into an array of tokens")
        self.whole[..., start : start + C, :, :] = piece
        self.filled = True

    def done(self) -> Array:
        """The array; zeros if nothing was stored."""
        if self.filled or any(part.filled for part in self.parts):
            return self.whole
        if not self.pieces:
            return self.xp.zeros(self.shape, dtype=self.dtype, device=self.where)
        return self.xp.concat([self.pieces[s] for s in sorted(self.pieces)], axis=-3)


def gradient_buffers(x: Inputs, plan: Plan) -> dict[str, TokenBuffer]:
    """A buffer for the gradient of every input but the bonus, by name."""
    inputs = {name: y for name, y in x._asdict().items() if y is not None and name != "u"}
    return {name: TokenBuffer(plan.xp, tuple(y.shape), plan.dtype, device(x.v)) for name, y in inputs.items()}
