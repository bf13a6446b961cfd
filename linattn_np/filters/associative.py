"""associative_scan: prefixes of an associative operation, the caller's own or the composition of affine maps.

    y_1 = x_1,   y_t = op(y_{t-1}, x_t)

Of affine maps h -> A h + x the prefixes are P_t = A_t P_{t-1} and h_t = A_t h_{t-1} + x_t, P_0 = 1. With Z = [P, h],
* the conjugate transpose and R_t the gradient of Z_t through itself and all later ones,

    R_t = dZ_t + A*_{t+1} R_{t+1},   dA_t = R_t Z*_{t-1},   dx_t = the last column of R_t,   dh_0 = that of A*_1 R_1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..ops.associative import prefixes
from ..runtime.arrays import Array, Library, Namespace, conjugate, enter, is_complex
from ..runtime.shapes import check_dtype
from ..runtime.values import is_whole, shown

FN = "associative_scan"
Items = tuple[Array, ...]


class AffineMaps(NamedTuple):
    """Affine maps h -> A h + x, or their gradients; state: h_0."""

    A: Any
    x: Any
    state: Any = None


def associative_scan(op: Any, items: Any, *, state: Any = None, axis: int = 0, reverse: bool = False) -> Any:
    """The prefixes of an associative operation along an axis, in a number of steps like the logarithm of its length.

        y_1 = x_1
        y_t = op(y_{t-1}, x_t)

    op       a function of two tuples of arrays, the earlier items and the later ones, that returns a tuple of arrays of
             the same shapes; it is called with many items at once, along their first axis. Or "affine": items are
             (A, x), the maps h -> A h + x, with A (..., n, n) and x (..., n), or both of one shape
    items    a tuple of arrays of one length along the axis
    state    of affine maps: h_0, the shape of x without the axis; None is 0
    axis     of items, counted from 0
    reverse  from the last item to the first

    Returns a tuple of arrays with the shapes of the items; of affine maps (A_t ... A_1, h_t). `la.vjp` of affine maps
    gives (result, pullback): pullback(dP, dh), one of which may be None, returns the gradients as an
    AffineMaps(A, x, state). Other operations are differentiated by the library of their arrays, PyTorch or JAX.
    No later item changes an earlier result, not in the last bit. The items' own library computes.
    Raises TypeError or ValueError for an op, items, an axis or a state that do not fit.
    Blelloch, Prefix sums and their applications, CMU-CS-90-190.
    """
    library, given, start = _entered(op, items, state, axis, reverse)
    xp = library.xp
    found = prefixes(xp, _checked(op), given) if callable(op) else _affine(xp, given, start)
    found = tuple(xp.asarray(y, copy=True) if y is x else y for y, x in zip(found, given, strict=True))  # of one item
    return tuple(library.give_back(_axis_first(xp, y, axis, reverse, back=True)) for y in found)


def associative_scan_vjp(arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Callable[..., AffineMaps]]:
    """(result, pullback) of affine maps."""
    named = dict(zip(("op", "items"), arrays, strict=False)) | options
    if callable(named.get("op")):
        raise TypeError(f"{FN}: op is a function, expected 'affine' for vjp: other operations have no adjoint here")
    state, axis, reverse = named.get("state"), named.get("axis", 0), named.get("reverse", False)
    library, (A, x), start = _entered(named.get("op"), named.get("items"), state, axis, reverse)
    xp = library.xp
    P, h = (xp.asarray(y, copy=True) if y is z else y for y, z in zip(_affine(xp, (A, x), start), (A, x), strict=True))
    result = tuple(library.give_back(_axis_first(xp, y, axis, reverse, back=True)) for y in (P, h))

    def pullback(dP: Any = None, dh: Any = None) -> AffineMaps:
        """Gradients of A, x and the state."""
        if dP is None and dh is None:
            raise TypeError(f"{FN}: the pullback got neither dP nor dh, expected at least one")
        _, given = enter(FN, {"dP": dP, "dh": dh}, library)
        for name, like in (("dP", result[0]), ("dh", result[1])):
            if given[name] is None:
                continue
            check_dtype(FN, name, given[name], is_complex(P if name == "dP" else h))
            if tuple(given[name].shape) != tuple(like.shape):
                raise ValueError(f"{FN}: {name} has shape {tuple(given[name].shape)}, expected {tuple(like.shape)}")
        moved = (None if d is None else _axis_first(xp, d, axis, reverse) for d in given.values())
        dA, dx, dstate = _affine_vjp(xp, (A, x, start), (P, h), *moved)
        each = [library.give_back(_axis_first(xp, y, axis, reverse, back=True)) for y in (dA, dx)]
        return AffineMaps(each[0], each[1], None if state is None else library.give_back(dstate))

    return result, pullback


associative_scan.vjp = associative_scan_vjp  # type: ignore[attr-defined]


def _affine(xp: Namespace, items: Items, start: Array | None) -> Items:
    """(P_t, h_t)"""
    A, x = items
    if start is not None and x.shape[0]:
        x = xp.concat([x[:1, ...] + act(xp, A[:1, ...], start[None, ...], x.ndim), x[1:, ...]], axis=0)

    def composed(first: Items, second: Items) -> Items:
        (B, y), (C, z) = first, second
        return C @ B if A.ndim > x.ndim else C * B, act(xp, C, y, x.ndim) + z

    return prefixes(xp, composed, (A, x))


def act(xp: Namespace, A: Array, h: Array, ndim: int) -> Array:
    """A h: a matrix on a vector, or number by number where A has the `ndim` axes of h."""
    return (A @ h[..., None])[..., 0] if A.ndim > ndim else A * h


def _affine_vjp(
    xp: Namespace, given: tuple[Array, Array, Array | None], found: Items, dP: Array | None, dh: Array | None
) -> tuple[Array, Array, Array]:
    """(dA, dx, dh_0), from the last item to the first: columns of Z by themselves, see above."""
    (A, x, start), (P, h) = given, found
    blocks = A.ndim > x.ndim
    start = xp.zeros_like(x[0, ...]) if start is None and x.shape[0] else start
    if not x.shape[0]:
        return xp.zeros_like(A), xp.zeros_like(x), xp.zeros(x.shape[1:], dtype=x.dtype)
    A_h = conjugate(xp, xp.matrix_transpose(A) if blocks else A)
    dA, dx, dstart = xp.zeros_like(P), xp.zeros_like(h), xp.zeros_like(h[0, ...])
    if dP is not None:
        unit = xp.broadcast_to(xp.eye(A.shape[-1], dtype=A.dtype), A.shape[1:]) if blocks else xp.ones_like(A[0, ...])
        R, before = _backwards(xp, A_h, dP, blocks), conjugate(xp, _delayed(xp, P, unit))
        dA = R @ xp.matrix_transpose(before) if blocks else R * before
    if dh is not None:
        dx, before = _backwards(xp, A_h, dh, blocks), conjugate(xp, _delayed(xp, h, start))
        dA = dA + (dx[..., :, None] * before[..., None, :] if blocks else dx * before)
        dstart = act(xp, A_h[:1, ...], dx[:1, ...], x.ndim)[0, ...]
    return _like(xp, dA, A), _like(xp, dx, x), _like(xp, dstart, start)


def _backwards(xp: Namespace, A: Array, d: Array, blocks: bool) -> Array:
    """R_t = d_t + A_{t+1} R_{t+1}, of vectors, or of matrices d."""
    later = xp.concat([A[1:, ...], A[:1, ...]], axis=0)  # the last one meets no item
    is_vector = d.ndim < A.ndim or not blocks

    def step(after: Items, own: Items) -> Items:
        B = own[0]
        composed = B @ after[0] if blocks else B * after[0]
        moved = act(xp, B, after[1], d.ndim) if is_vector else B @ after[1]
        return composed, moved + own[1]

    return xp.flip(prefixes(xp, step, (xp.flip(later, axis=0), xp.flip(d, axis=0)))[1], axis=0)


def _delayed(xp: Namespace, Z: Array, first: Array) -> Array:
    """Z_{t-1}"""
    return xp.concat([xp.astype(first, Z.dtype)[None, ...], Z[:-1, ...]], axis=0)


def _like(xp: Namespace, d: Array, x: Array) -> Array:
    """A gradient in the dtype of x: of real numbers its real part."""
    return xp.astype(xp.real(d) if is_complex(d) and not is_complex(x) else d, x.dtype)


def _checked(op: Callable[[Items, Items], Items]) -> Callable[[Items, Items], Items]:
    """op, whose results must have the shapes of the items."""

    def checked(first: Items, second: Items) -> Items:
        found = op(first, second)
        if not isinstance(found, tuple | list) or len(found) != len(first):
            raise TypeError(f"{FN}: op returned {shown(found)}, expected a tuple of {len(first)} arrays")
        for n, (y, like) in enumerate(zip(found, first, strict=True)):
            if tuple(getattr(y, "shape", ())) != tuple(like.shape):
                raise ValueError(f"{FN}: op returned shape {getattr(y, 'shape', ())} for item {n}, expected "
                                 f"{tuple(like.shape)}")  # fmt: skip
        return tuple(found)

    return checked


def _entered(op: Any, items: Any, state: Any, axis: Any, reverse: Any) -> tuple[Library, Items, Array | None]:
    """The checked items with their axis first, from the item that the scan begins with on; the state."""
    if not callable(op) and op != "affine":
        raise TypeError(f"{FN}: op is {shown(op)}, expected a function of two tuples or 'affine'")
    if not isinstance(items, tuple | list) or not items:
        raise TypeError(f"{FN}: items is {shown(items)}, expected a tuple of arrays")
    if not is_whole(axis, 0):
        raise TypeError(f"{FN}: axis is {shown(axis)}, expected a whole number from 0")
    if not isinstance(reverse, bool):
        raise TypeError(f"{FN}: reverse is {shown(reverse)}, expected True or False")
    library, given = enter(FN, {f"items[{n}]": y for n, y in enumerate(items)} | {"state": state})
    start = given.pop("state")
    lengths = []
    for name, y in given.items():
        if y is None or y.ndim <= axis:
            raise ValueError(f"{FN}: {name} has shape {tuple(getattr(y, 'shape', ()))}, expected an axis {axis}")
        lengths.append(y.shape[axis])
        if lengths[-1] != lengths[0]:
            raise ValueError(f"{FN}: {name} has {lengths[-1]} items along axis {axis}, expected {lengths[0]}")
    moved = tuple(_axis_first(library.xp, y, axis, reverse) for y in given.values())
    if op == "affine":
        _check_affine(moved, start)
    elif state is not None:
        raise ValueError(f"{FN}: state is given, expected None with an op of your own: it is an item before the first")
    return library, moved, start


def _check_affine(items: Items, start: Array | None) -> None:
    """(A, x) and a state that fit."""
    if len(items) != 2:
        raise TypeError(f"{FN}: items has {len(items)} arrays, expected (A, x) of affine maps")
    A, x = (tuple(y.shape) for y in items)
    if A not in (x, (*x, x[-1])) or (len(A) > len(x) and len(x) < 2):
        raise ValueError(f"{FN}: items[0] has shape {A}, axis first, expected {x} or {(*x, x[-1])}")
    if start is not None and tuple(start.shape) != x[1:]:
        raise ValueError(f"{FN}: state has shape {tuple(start.shape)}, expected {x[1:]}")


def _axis_first(xp: Namespace, y: Array, axis: int, reverse: bool, back: bool = False) -> Array:
    """The axis in front, in reverse order if asked; back: the inverse."""
    y = xp.flip(y, axis=0) if back and reverse else y
    y = xp.moveaxis(y, *((0, axis) if back else (axis, 0))) if axis else y
    return xp.flip(y, axis=0) if reverse and not back else y
