"""What kind of value an option is, and how an error message shows one."""

from __future__ import annotations

import math
import numbers
from collections.abc import Container
from typing import Any

LARGEST = (1 << 31) - 1  # of whole numbers that say how many


def shown(value: Any) -> str:
    """A value in an error message: on one line, not longer than a sentence."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a number of thousands of digits, a broken __repr__
        text = f"a {type(value).__qualname__}"
    return text if len(text) <= 120 else f"{text[:100]}... ({type(value).__qualname__})"


def is_word(value: Any, words: Container[str]) -> bool:
    """Whether an option is one of these words: an array never is, not even one that compares equal."""
    return isinstance(value, str) and value in words


def is_whole(value: Any, least: int = 1, most: float = math.inf) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= value <= most


def is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a float can hold."""
    try:
        return is_real(value) and math.isfinite(float(value))
    except OverflowError:
        return False
