"""How the kernels of the recurrence are cut: tokens and channels of a tile, by the bytes of an element.

Bits depend on the tokens of a warp and the warps of a tile alone; shorter sequences take as much of one tile as they
need, which leaves their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

from ...runtime.arrays import name_of
from ...runtime.cuda.elements import Constants

SOURCE = "elementwise/scan.cu"
OF_AVERAGES = "elementwise/average.cu"
KINDS = {"bfloat16": 0, "float16": 1, "float32": 2, "float64": 3, "complex64": 2, "complex128": 3}


class Cut(NamedTuple):
    """Of a block: channels of a lane, tokens of a warp, warps; blocks of a multiprocessor."""

    V: int
    R: int
    warps: int
    blocks: int

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return self.R * self.warps

    @property
    def channels(self) -> int:
        """Channels of a tile."""
        return 32 * self.V

    def tiles(self, T: int) -> int:
        """Tiles of a sequence; an empty one has one, which hands its state on."""
        return max(-(-T // self.tokens), 1)


class Pass(NamedTuple):
    """The properties of a pass, besides its cut, that its kernel is compiled for."""

    is_back: bool
    x: str  # dtypes
    gate: str
    dout: str
    is_log: bool = False  # the kernel takes the exponential of the gate
    is_constant: bool = False
    is_linked: bool = True  # sequences have several tiles
    is_double: bool = False
    is_complex: bool = False
    mark: int = 0  # tokens from one kept state to the next, 0: none is
    formula: int = 0  # of factors and inputs, by number; 0: they are given
    write: str | None = None  # dtype of the input gate
    is_real: bool = False  # x is, of complex states


# by the bytes of an element: of a forward, which keeps two arrays in registers, of a backward, which keeps three; the
# tokens of a forward's tile are a multiple of those of a backward's
FORWARD = {2: Cut(2, 16, 16, 2), 4: Cut(2, 16, 8, 2), 8: Cut(1, 16, 8, 2), 16: Cut(1, 8, 8, 2)}
BACKWARD = {2: Cut(2, 16, 8, 2), 4: Cut(2, 8, 8, 3), 8: Cut(1, 8, 8, 2), 16: Cut(1, 4, 8, 2)}
# of formulas, by the dtype of the numbers that are held; float64 and complex128 as above
MADE_FORWARD = {"float32": Cut(4, 8, 8, 2), "complex64": Cut(1, 16, 8, 3)}
MADE_BACKWARD = {"float32": Cut(4, 4, 8, 2), "complex64": Cut(2, 8, 8, 2)}
# of averages, which hold their rows as they lie and backwards a state and its gradient of every token
AVERAGE_FORWARD = {"float32": Cut(1, 16, 8, 3), "float64": Cut(1, 8, 8, 2)}
AVERAGE_BACKWARD = {"float32": Cut(1, 8, 8, 2), "float64": Cut(1, 4, 8, 1)}
WIDEST, WORDS = 16, 16  # bytes that a lane moves together, where it has few tokens: words of an array
AHEAD = {
    2: 264
}  # by the bytes of an element: how many blocks ahead lines are prefetched, all that an H200 runs at once


def cut_of(size: int, longest: int, is_back: bool) -> Cut:
    """The cut of sequences of up to `longest` tokens of elements of so many bytes."""
    return _shortened((BACKWARD if is_back else FORWARD)[size], size, longest)


def made_cut(kind: Any, longest: int, is_back: bool) -> Cut:
    """Likewise, of a formula: `kind` is the dtype of the numbers that are held."""
    given = (MADE_BACKWARD if is_back else MADE_FORWARD).get(name_of(kind))
    return cut_of(kind.itemsize, longest, is_back) if given is None else _shortened(given, kind.itemsize, longest)


def average_cut(kind: Any, longest: int, is_back: bool) -> Cut:
    """Likewise, of an average."""
    return _shortened((AVERAGE_BACKWARD if is_back else AVERAGE_FORWARD)[name_of(kind)], kind.itemsize, longest)


def _shortened(cut: Cut, size: int, longest: int) -> Cut:
    if longest >= cut.tokens:
        return cut
    R = min(cut.R, _power(longest))
    warps = min(cut.warps, _power(-(-longest // R)))
    V = min(WIDEST // size, max(cut.V, WORDS * 4 // (R * size)))
    return Cut(V, R, warps, 1 if R < cut.R or V > cut.V else cut.blocks)


def _power(n: int) -> int:
    """The least power of two from n on."""
    return 1 << max(n - 1, 0).bit_length()


def aligned(cut: Cut, D: int, arrays: Sequence[tuple[int, tuple[int, ...]]]) -> Cut:
    """The cut with as many channels of a lane as lie together in arrays: (bytes of an element, address and strides)."""
    V = gcd(cut.V, D)
    while V > 1 and any(at % (V * size) for size, places in arrays for at in places):
        V //= 2
    return cut._replace(V=V)


def constants(cut: Cut, one: Pass, size: int) -> Constants:
    """The constants of a pass over elements of so many bytes."""
    own = {} if not one.formula else {"LA_FORMULA": one.formula, "LA_REAL": int(one.is_real),
                                      "LA_NARROW": int(KINDS[one.x] < 2)}  # fmt: skip
    own |= {} if one.write is None else {"LA_WRITE": KINDS[one.write]}
    return tuple(sorted((own | {
        "LA_V": cut.V, "LA_R": cut.R, "LA_WARPS": cut.warps, "LA_BLOCKS": cut.blocks, "LA_BACK": int(one.is_back),
        "LA_DOUBLE": int(one.is_double), "LA_COMPLEX": int(one.is_complex),
        "LA_DTYPE": KINDS[one.x], "LA_GATE": KINDS[one.gate], "LA_DOUT": KINDS[one.dout], "LA_LOG": int(one.is_log),
        "LA_CONSTANT": int(one.is_constant), "LA_LINKED": int(one.is_linked), "LA_MARK": one.mark,
        "LA_AHEAD": AHEAD.get(size, 0) if one.is_linked else 0,
    }).items()))  # fmt: skip
