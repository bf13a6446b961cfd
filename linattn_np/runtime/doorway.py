"""The doorway to compiled code: an entry checks its arguments before a loop or a kernel gets an address.

    expect("short_conv", x=(x, "... T D"), taps=(taps, "W D"), bias=(bias, "D?"))

binds each letter to a size, and "..." to any number of axes; a later array with another size is an error. Compiled code
trusts its sizes, so every entry that hands it arrays calls `expect`; the calls of variants are checked
by call/binding.py. `check_fields` is the last check, of a table of matrices against its own declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from .arrays import STORAGE, dtype_name
from .values import is_whole, shown

Sizes = dict[str, Any]  # by letter; "..." has a tuple
WHOLE = ("int32", "int64")  # dtypes of offsets, rows, numbers of sequences


def expect(
    fn: str, known: Mapping[str, int] | None = None, dtypes: tuple[str, ...] = STORAGE, **given: tuple[Any, str]
) -> Sizes:
    """The sizes of arrays, given as name=(array, axes); None is skipped where the axes end with "?".

    fn: the entry, which errors name. known: letters whose sizes are known. dtypes: the names of those allowed.
    Raises TypeError for an object that is no array, another dtype or another device, ValueError for another shape.
    """
    sizes: Sizes = dict(known or {})
    where: tuple[str, Any] | None = None
    for name, (x, axes) in given.items():
        if x is None and axes.endswith("?"):
            continue
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"{fn}: {name} is {shown(x)}, expected an array")
        if (kind := dtype_name(x)) not in dtypes:
            raise TypeError(f"{fn}: {name} has dtype {kind}, expected one of {', '.join(dtypes)}")
        if where is None:
            where = name, getattr(x, "device", "cpu")
        elif getattr(x, "device", "cpu") != where[1]:
            raise TypeError(
                f"{fn}: {name} is on device {x.device} and {where[0]} on {where[1]}, expected all arrays on one device"
            )
        _bind(fn, name, tuple(x.shape), axes.removesuffix("?"), sizes)
    return sizes


def expect_one_dtype(fn: str, **given: Any) -> None:
    """Raise TypeError unless all arrays, None aside, have the dtype of the first one."""
    (first, like), *others = ((name, x) for name, x in given.items() if x is not None)
    for name, x in others:
        if x.dtype != like.dtype:
            raise TypeError(f"{fn}: {name} has dtype {dtype_name(x)}, expected that of {first}: {dtype_name(like)}")


def expect_whole(fn: str, name: str, x: Any, least: int = 1) -> None:
    """Raise ValueError unless a size is a whole number from `least` on."""
    if not is_whole(x, least):
        raise ValueError(f"{fn}: {name} is {shown(x)}, expected a whole number from {least}")


def _bind(fn: str, name: str, shape: tuple[int, ...], axes: str, sizes: Sizes) -> None:
    """Check a shape against its axes and bind new letters."""
    letters = axes.split()
    count = len(letters) - ("..." in letters)
    lead = len(shape) - count
    parts: dict[str, Any] = {}
    if lead == 0 or (lead > 0 and "..." in letters):
        tail = iter(shape[lead:])
        parts = {n: shape[:lead] if n == "..." else next(tail) for n in letters}
    if (not parts and letters) or any(sizes.get(n, own) != own for n, own in parts.items()):
        wanted = ", ".join(letters) + "," * (len(letters) == 1)
        bound = [str(m) for n in letters for m in (sizes.get(n, (n,)) if n == "..." else (sizes.get(n, n),))]
        numbers = ", ".join(bound) + "," * (len(bound) == 1)
        known = f" = ({numbers})" if any(n in sizes for n in letters) else ""
        raise ValueError(f"{fn}: {name} has shape {shape}, expected ({wanted}){known}")
    sizes.update(parts)


def check_fields(declaration: Any, values: Mapping[str, Any], dtype: str) -> None:
    """Raise unless each array of `values` has the numbers that a workspace declares, each row side by side.

    The rows of an array have one stride. Sizes are not negative.
    """
    fn = declaration.name
    for name, y in values.items():
        if not isinstance(y, np.ndarray) or name in declaration.arrays:
            continue
        m = declaration.matrices[name]
        wanted = tuple(values[size] for size in (m.rows, m.columns) if size)
        if y.dtype != (m.dtype or dtype):
            raise TypeError(f"{fn}: {name} has dtype {dtype_name(y)}, expected {m.dtype or dtype}")
        if y.size != prod(wanted) or min(wanted) < 0 or (m.columns and y.shape[-1:] != wanted[1:]):
            raise ValueError(f"{fn}: {name} has shape {y.shape}, expected {wanted}")
        if not y.flags.c_contiguous and not (m.columns and _is_of_rows(y)):
            raise ValueError(f"{fn}: {name} has strides {y.strides}, expected rows of numbers side by side")


def _is_of_rows(y: np.ndarray) -> bool:
    """Whether rows are numbers side by side, and lie at one distance."""
    even = all(y.strides[n] == y.shape[n + 1] * y.strides[n + 1] for n in range(y.ndim - 2))
    return even and (y.strides[-1] == y.itemsize or y.shape[-1] == 1)
