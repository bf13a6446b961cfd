"""Products of two dense CuPy arrays in 16 bits, and their gradients."""

from __future__ import annotations

from typing import Any

from ...runtime.arrays import Array, dtype_name
from ...runtime.cuda import launch
from ...runtime.cuda.elements import ELEMENTS, Constants
from .arguments import PRODUCT, address
from .complement import PER
from .unit_rows import THREADS

SOURCE = "ops/product.cu"


def takes(*arrays: Array) -> bool:
    """Whether the kernels support these arrays: dense, of one shape and one dtype of 16 bits."""
    first = arrays[0]
    same = all(y.shape == first.shape and y.dtype == first.dtype for y in arrays)
    dense = same and all(y.flags.c_contiguous and y.data.ptr % 16 == 0 for y in arrays)
    sized = first.size > 0 and first.size % PER == 0 and first.dtype.itemsize == 2
    return dense and sized and dtype_name(first) in ELEMENTS and launch.unusable() is None


def constants(element: str) -> Constants:
    """The constants for arrays of this dtype."""
    return (("LA_DTYPE", ELEMENTS[element]),)


def product(xp: Any, x: Array, y: Array) -> Array:
    """x y, rounded once."""
    z = xp.empty(x.shape, dtype=x.dtype)
    _launch("product", x=x, y=y, z=z)
    return z


def product_vjp(xp: Any, x: Array, y: Array, dz: Array, add: Array | None) -> tuple[Array, Array]:
    """(gradient of x, added to `add`, gradient of y), each rounded once."""
    dx, dy = xp.empty(x.shape, dtype=x.dtype), xp.empty(x.shape, dtype=x.dtype)
    _launch("product_vjp", x=x, y=y, z=dz, add=add, dx=dx, dy=dy)
    return dx, dy


def _launch(entry: str, x: Array, **given: Array | None) -> None:
    fields = dict.fromkeys(("y", "z", "add", "dx", "dy"), 0) | {n: address(y) for n, y in given.items()}
    packed = PRODUCT.pack(x=address(x), **fields, size=x.size)
    launch.launch(
        SOURCE,
        entry,
        constants(dtype_name(x)),
        -(-x.size // (PER * THREADS)),
        THREADS,
        0,
        packed,
        (x, *(y for y in given.values() if y is not None)),
    )
