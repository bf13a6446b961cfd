"""States in 16, 12 or 8 bits: whole numbers and one scale for each value channel.

    S[:, e] = scale[e] codes[:, e],   scale[e] = max |S[:, e]| / (2^(bits - 1) - 1)

A value channel is a column of the state, and what is read of it is its own: a channel of large values costs the others
nothing. Channels of keys meet in a sum, where the largest one counts.

codes are rounded to the nearest; int12 stores the upper eight bits and two lower fours in a byte. An 8-bit state with a
residual of 4 bits is an int12 state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..runtime.arrays import cast, enter
from ..runtime.shapes import check_dtype
from ..runtime.values import is_word, shown

BITS = {"int16": 16, "int12": 12, "int8": 8}


class SmallState(NamedTuple):
    """States (..., H, K, V) as whole numbers.

    kind: "int16", "int12" or "int8". codes (..., H, K, V), int16 or int8; scale (..., H, 1, V), float32, may be 0.
    low (..., H, K, ceil(V / 2)), of int12: the lower four bits of two neighbouring codes in a byte, the even one below.
    """

    kind: str
    codes: Any
    scale: Any
    low: Any = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        return (self.codes, self.scale) if self.low is None else (self.codes, self.scale, self.low)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the states."""
        return tuple(self.codes.shape)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    def mapped(self, f: Callable[[Any], Any]) -> SmallState:
        """f of every array."""
        return SmallState(self.kind, f(self.codes), f(self.scale), None if self.low is None else f(self.low))


def pack_state(state: Any, kind: str) -> SmallState:
    """A state (..., H, K, V) rounded to "int16", "int12" or "int8", with a scale for each value channel.

    Each number changes by half of scale at most, and once more by float32. NumPy or CuPy arrays. Raises TypeError for
    other arrays, ValueError for another kind and for states with inf or NaN.
    """
    if not is_word(kind, BITS):
        raise ValueError(f"pack_state: kind is {shown(kind)}, expected one of {', '.join(map(repr, BITS))}")
    library, entered = enter("pack_state", {"state": state})
    xp, state = library.xp, entered["state"]
    if library.name not in ("numpy", "cupy"):
        raise TypeError(f"pack_state: state is an array of {library.name}, expected a NumPy or CuPy array")
    check_dtype("pack_state", "state", state)
    if state.ndim < 2:
        raise ValueError(f"pack_state: state has shape {state.shape}, expected (..., H, K, V)")
    S = cast(xp, state, xp.float32)
    zeros = xp.zeros((*S.shape[:-2], 1, S.shape[-1]), dtype=S.dtype)
    largest = xp.max(xp.abs(S), axis=-2, keepdims=True) if S.size else zeros
    if not bool(xp.all(xp.isfinite(largest))):
        raise ValueError("pack_state: state has inf or NaN, expected finite numbers")
    most = np.float32(2 ** (BITS[kind] - 1) - 1)
    codes = xp.rint(S / xp.where(largest == 0, xp.ones_like(largest), largest) * most)
    scale = largest / most
    if kind != "int12":
        return SmallState(kind, codes.astype(kind), scale)
    whole = codes.astype(np.int16)
    four = (whole & 15).astype(np.uint8)
    if four.shape[-1] % 2:
        four = xp.concat([four, xp.zeros((*four.shape[:-1], 1), dtype=np.uint8)], axis=-1)
    return SmallState(kind, (whole >> 4).astype(np.int8), scale, four[..., ::2] | four[..., 1::2] << 4)


def unpack_state(small: SmallState) -> Any:
    """The states (..., H, K, V) in float32."""
    codes = small.codes
    if small.low is not None:
        xp = enter("unpack_state", {"small": small.low})[0].xp
        four = xp.stack([small.low & 15, small.low >> 4], axis=-1).reshape(
            *small.low.shape[:-1], 2 * small.low.shape[-1]
        )
        codes = (codes.astype(np.int16) << 4) | four[..., : codes.shape[-1]]
    S = codes.astype(np.float32)
    S *= small.scale
    return S
