"""Prefixes of an associative operation, in a number of steps that grows with the logarithm of the length.

    y_0 = x_0,   y_t = op(y_{t-1}, x_t)

Neighbours are combined, the prefixes of their half as many results are those of the odd places, and one more operation
each gives the even ones. Places of a prefix are combined in an order of their own, whatever comes after them: an item
never changes the result of an earlier place, not in the last bit.

An affine map h -> a h + x is the pair (a, x); first f, then g is (a_g a_f, a_g x_f + x_g).
"""

from __future__ import annotations

from collections.abc import Callable

from ..runtime.arrays import Array, Namespace

Items = tuple[Array, ...]  # arrays of one length along the axis of the scan, which is the first
Operation = Callable[[Items, Items], Items]


def prefixes(xp: Namespace, op: Operation, x: Items) -> Items:
    """op over x_0..x_t for every t."""
    n = x[0].shape[0]
    if n < 2:
        return x
    even, odd = (tuple(y[first:last:2, ...] for y in x) for first, last in ((0, n - 1), (1, n)))
    of_odd = prefixes(xp, op, op(even, odd))
    later = tuple(y[2::2, ...] for y in x)
    if not later[0].shape[0]:
        return tuple(xp.concat([y[:1, ...], z], axis=0) for y, z in zip(x, of_odd, strict=True))
    count = later[0].shape[0]
    of_even = op(tuple(y[:count, ...] for y in of_odd), later)
    first = tuple(y[:1, ...] for y in x)
    return tuple(_interleaved(xp, xp.concat([a, b], axis=0), c) for a, b, c in zip(first, of_even, of_odd, strict=True))


def _interleaved(xp: Namespace, even: Array, odd: Array) -> Array:
    """even_0, odd_0, even_1, ...; even may have one more."""
    count = odd.shape[0]
    both = xp.reshape(xp.stack([even[:count, ...], odd], axis=1), (2 * count, *odd.shape[1:]))
    return both if even.shape[0] == count else xp.concat([both, even[count:, ...]], axis=0)


def affine(first: Items, second: Items) -> Items:
    """Of h -> a h + x: the first map, then the second."""
    (a, x), (b, y) = first, second
    return b * a, b * x + y
