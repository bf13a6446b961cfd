"""Rotations by position or by content: rotary embeddings and xPos."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np

from ..ops import pairs
from ..ops.sequences import table
from ..runtime.arrays import Array, cast, constant, device
from ..runtime.constants import constant_array
from ..runtime.values import is_finite, is_real, is_whole, shown
from . import doubts
from .declaration import Call, Kind, Pullback, always, piece

Computed = tuple[Any, Pullback]
STORED = Kind(stored=always)


@piece(Kind(doubts=doubts.of_rows, stored=always), x="... T H K", angle="...?")
def rotary(c: Call, x: Any, angle: Any = None, *, base: float = 10000.0, dims: int | None = None,
           interleaved: bool = False, offset: int = 0, cumulative: bool = False,
           cu_seqlens: Any = None) -> Computed:  # fmt: skip
    """Rotary position embedding: pairs of channels of queries and keys rotated by angles of the token.

        (a, b) -> (a cos - b sin, b cos + a sin)
        angle_tp = (offset + t) base^{-p / P},  p < P = dims / 2

    x            (..., T, H, K)
    angle        (..., T, P), or (..., T, H, P) of each head: angles that depend on the content
    dims         channels that are rotated, the first ones; K, or 2 P of the angles, by default
    interleaved  pairs (2 p, 2 p + 1); by default (p, P + p)
    offset       position of the first token, as in decoding
    cumulative   each token is rotated by the sum of the angles up to its own, as in Mamba-3
    cu_seqlens   positions, and sums, begin in each sequence

    Returns y (..., T, H, K) in x's dtype. Raises ValueError for an odd or too large number of dims.
    Su et al., RoFormer, arXiv 2104.09864.
    """
    xp, K = c.xp, c.sizes["K"]
    if angle is not None:
        _check_angle(c, x, angle, dims, offset, base)
    elif cumulative:
        raise ValueError("rotary: cumulative=True was given without angles, expected both")
    P = _pairs(c, K, dims) if angle is None else angle.shape[-1]
    if angle is None:
        return _rotated(c, x, _angles(c, x, P, offset, (_positive(c, "base", base),)), interleaved)
    shared, angle = angle.ndim == x.ndim - 1, cast(xp, angle, c.dtype)
    theta = _summed(c, angle, shared, reverse=False) if cumulative else angle
    c_s = _cos_sin(c, theta[..., None, :] if shared else theta)
    y, pull = _rotated(c, x, c_s, interleaved)

    def pullback(dy: Array) -> dict[str, Any]:
        d = _angles_vjp(c, x, c_s, interleaved, dy)
        d = d[..., 0, :] if shared else d
        return {**pull(dy), "angle": _summed(c, d, shared, reverse=True) if cumulative else d}

    return y, pullback


def _cos_sin(c: Call, theta: Array) -> list[Array]:
    """(cos, sin) of angles."""
    if c.compiled and theta.size:
        from ..ops.cpu.pairs import cos_sin_of

        return cos_sin_of(theta)
    return [c.xp.cos(theta), c.xp.sin(theta)]


def _angles_vjp(c: Call, x: Array, cos_sin: list[Array], interleaved: bool, dy: Array) -> Array:
    """dangle, in the shape of (cos, sin)."""
    cos, sin = cos_sin
    if c.on_device:
        from ..ops.cuda.rotary import angles_vjp as launched

        return launched(x, cos, sin, interleaved, dy)
    rotated, shape = _rotated(c, x, cos_sin, interleaved)[0], tuple(cos.shape)
    if c.compiled and cos.size:
        from ..ops.cpu.pairs import angles_vjp

        return angles_vjp(rotated, dy, shape, interleaved)
    d = pairs.angles_vjp(rotated, dy, shape[-1], interleaved)
    return d if tuple(d.shape) == shape else c.xp.sum(d, axis=-2, keepdims=True)


@piece(Kind(doubts=doubts.of_xpos, stored=always), x="... T H K")
def xpos(c: Call, x: Any, *, inverse: bool = False, base: float = 10000.0, scale_base: float = 512.0,
         gamma: float = 0.4, dims: int | None = None, interleaved: bool = False, offset: int = 0,
         cu_seqlens: Any = None) -> Computed:  # fmt: skip
    """Rotary embedding with a decay in the distance: queries grow with their position, keys shrink.

        y = zeta_p^{n / scale_base} rotary(x),   zeta_p = (p / P + gamma) / (1 + gamma),   n = offset + t
        inverse=True, for keys:  y = zeta_p^{-n / scale_base} rotary(x)

    A query at n and a key at m have the share zeta_p^{(n - m) / scale_base}.

    x  (..., T, H, K); other options as in rotary. Sizes are out of range for |n| beyond about 70 scale_base in
    float32: offset=-T // 2 halves them.

    Returns y (..., T, H, K) in x's dtype. Sun et al., arXiv 2212.10554; RetNet.
    """
    given = {"base": base, "scale_base": scale_base, "gamma": gamma}
    numbers = tuple(_positive(c, name, y) for name, y in given.items())
    return _rotated(c, x, _angles(c, x, _pairs(c, c.sizes["K"], dims), offset, (*numbers, inverse)), interleaved)


def _rotated(c: Call, x: Array, cos_sin: list[Array], interleaved: bool) -> Computed:
    """x rotated by (cos, sin) (T, P), or (..., T, H or 1, P)."""
    cos, sin = cos_sin
    P, H = cos.shape[-1], x.shape[-2]
    if c.on_device:
        from ..ops.cuda.rotary import rotate as launched

        return launched(x, cos, sin, interleaved, False), lambda dy: {"x": launched(dy, cos, sin, interleaved, True)}
    if c.compiled and P:
        from ..ops.cpu.pairs import rotate

        share = 1 if cos.ndim > 2 and cos.shape[-2] == H else H
        loops = functools.partial(rotate, c=cos, s=sin, share=share, interleaved=interleaved)
        return loops(x, back=False), lambda dy: {"x": loops(dy, back=True)}
    cos, sin = (y[:, None, :] if y.ndim == 2 else y for y in cos_sin)
    return pairs.rotate(c.xp, x, cos, sin, interleaved), lambda dy: {
        "x": pairs.rotate(c.xp, dy, cos, -sin, interleaved)
    }


def _angles(c: Call, x: Array, P: int, offset: Any, numbers: tuple[Any, ...]) -> list[Array]:
    """(cos, sin) (T, P) of the tokens' positions, computed once; numbers: base, and those of xPos."""
    base, *more = numbers
    place = _place(c, offset)

    def table_of(f: Any) -> np.ndarray:
        angles = f(pairs.positions(place, base, P))
        if not more:
            return angles
        scale_base, gamma, inverse = more
        size = pairs.sizes(place, scale_base, gamma, P)
        return angles / size if inverse else angles * size

    def one(f: Any) -> Array:
        key = ("rotary", f.__name__, c.sizes["T"], c.offsets and tuple(c.offsets), offset, P, numbers, str(c.dtype))
        return constant_array(c.xp, key, device(x), lambda: constant(c.xp, table_of(f), c.dtype, device(x)))

    return [one(np.cos), one(np.sin)]


def _place(c: Call, offset: Any) -> np.ndarray:
    """The position of each token."""
    if not is_whole(offset, -(1 << 53), 1 << 53):
        raise ValueError(f"{c.fn}: offset is {shown(offset)}, expected a whole number")
    offsets = c.sequences.offsets
    return int(offset) + (np.arange(c.sizes["T"]) if offsets is None else table(offsets).place)


def _pairs(c: Call, K: int, dims: Any) -> int:
    """P of the rotated channels."""
    given = K if dims is None else dims
    if not is_whole(given, 0, K) or given % 2:
        raise ValueError(f"{c.fn}: dims is {shown(given)}, expected an even number up to K = {K}")
    return int(given) // 2


def _positive(c: Call, name: str, x: Any) -> float:
    if not is_finite(x) or x <= 0:
        raise ValueError(f"{c.fn}: {name} is {shown(x)}, expected a finite number > 0")
    return float(x)


def _check_angle(c: Call, x: Array, angle: Array, dims: Any, offset: Any, base: Any) -> None:
    """Raise ValueError unless angles are (..., T, P) or (..., T, H, P) of x, dims None or 2 P, offset and base none."""
    leads = (tuple(x.shape[:-2]), tuple(x.shape[:-1]))
    if not angle.ndim or tuple(angle.shape[:-1]) not in leads or 2 * angle.shape[-1] > x.shape[-1]:
        raise ValueError(f"rotary: angle has shape {tuple(angle.shape)}, expected (..., T, P) = {(*leads[0], 'P')} or "
                         f"(..., T, H, P) = {(*leads[1], 'P')} with 2 P <= K = {x.shape[-1]}")  # fmt: skip
    for name, given, default in (("offset", offset, 0), ("base", base, 10000.0)):
        if not is_real(given) or given != default:
            raise ValueError(f"rotary: {name} is {shown(given)}, expected none with angles, which say all")
    if dims is not None and not is_whole(dims, 2 * angle.shape[-1], 2 * angle.shape[-1]):
        raise ValueError(f"rotary: dims is {shown(dims)}, expected 2 P = {2 * angle.shape[-1]} of the angles")


def _summed(c: Call, angle: Array, shared: bool, reverse: bool) -> Array:
    """Sums over the tokens of a sequence up to each one, or from each one on."""
    if c.compiled and angle.size:
        from ..ops.cpu.running import over_tokens

        return over_tokens(c.sequences, angle, 1 if shared else 2, reverse)
    xp, axis = c.xp, angle.ndim - (2 if shared else 3)
    edges = c.offsets or [0, angle.shape[axis]]

    def part(first: int, last: int) -> Array:
        here = angle[(*(slice(None),) * axis, slice(first, last), ...)]
        if not reverse:
            return xp.cumulative_sum(here, axis=axis)
        return xp.flip(xp.cumulative_sum(xp.flip(here, axis=axis), axis=axis), axis=axis)

    parts = [part(a, b) for a, b in itertools.pairwise(edges) if b > a]
    return xp.concat(parts, axis=axis) if parts else angle
