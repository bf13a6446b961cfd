"""Checks of option values, their text in error messages, and numerical ranges of dtypes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Container, Iterable
from typing import Any

LARGEST = (1 << 31) - 1  # largest count that an option may give


def shown(value: Any) -> str:
    """A value in an error message: one line, at most 120 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a number of thousands of digits, a broken __repr__
        text = f"a {type(value).__qualname__}"
    return text if len(text) <= 120 else f"{text[:100]}... ({type(value).__qualname__})"


def is_word(value: Any, words: Container[str]) -> bool:
    """Whether an option is a string among `words`; arrays are not compared."""
    return isinstance(value, str) and value in words


def check_word(fn: str, name: str, given: Any, words: Iterable[str]) -> None:
    """Raise ValueError unless an option is None or one of `words`."""
    words = tuple(words)
    if given is not None and not is_word(given, words):
        raise ValueError(f"{fn}: {name} is {shown(given)}, expected None or one of {', '.join(map(repr, words))}")


def is_whole(value: Any, least: int = 1, most: float = math.inf) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) <= most


def is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a float can hold."""
    try:
        return is_real(value) and math.isfinite(float(value))
    except OverflowError:
        return False


def range_factors(bits: int) -> tuple[float, float, float]:
    """(limit, up, down): rows of a size below 1 / limit are scaled by up, above limit by down.

    Powers of 2: the scaling is exact, and squares of the scaled entries neither vanish nor overflow.
    """
    return (2.0**50, 2.0**100, 2.0**-75) if bits == 32 else (2.0**400, 2.0**700, 2.0**-600)
