"""Changes of variables by declaration: each input of the core is a product of arrays of the variant.

    products("q", "k", "g", v=("w", "v"), r=("b", "k"))        v = w v,  r = b k,  beta = 1
    products("q", "k", "v", r="k", beta=(f, f_vjp))            beta = f(call)

The transpose of y = x_1 ... x_n is dx_i = dy times the other factors, summed over the axes along which x_i is
broadcast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from .matrix_state.types import EraseKey, Inputs
from .ops.product import product, product_of_heads
from .ops.sums import added, over_tokens, sum_of_groups, sum_to
from .runtime.arrays import Array, Namespace, cast, device, dtype_name, is_cupy, shared_heads
from .runtime.constants import constant_array
from .runtime.shapes import HEADS, has_time
from .spec import Call, ChangeOfVariables, Gradients

Factors = tuple[str, ...]
Pair = tuple[Callable[[Call], Any], Callable[[Call, Array], Gradients]]
Given = Mapping[str, Any]  # by input: Factors, or a Pair


def products(*same: str, **inputs: str | Factors | Pair) -> ChangeOfVariables[Inputs]:
    """The change of variables in which each input of the core is one array, a product of arrays, or (f, f_vjp).

    f(c) returns the input with its channel axis; f_vjp(c, dy) the gradients by name from the gradient of the input.
    Such a q, k or v comes from the array of its name; a change from another one names it: replace(products(...),
    key="g"). A call without the array of q computes no q.
    same: inputs that equal the array of the same name. A missing channel axis is added ((..., T, H) is (..., T, H, 1));
    heads are shared by groups; arrays without tokens are the same for every token. One array alone is passed unchanged;
    products have the compute dtype, but kernels get them rounded to bfloat16, as all factors of their products, where
    the rows q, k and v of the call are bfloat16, whatever dtype the other factors have.
    The last factor names the array: an input is None if that is not given, other factors are 1 if they are not given.
    An empty product is 1. Erase vectors r without a beta: beta is 1. Raises TypeError without v, or if v is 1.
    """
    every: dict[str, Any] = {name: (name,) for name in same}
    every |= {name: (x,) if isinstance(x, str) else x for name, x in inputs.items()}
    if "r" in every:
        every.setdefault("beta", ())

    r, k, value = every.get("r"), every.get("k"), _source(every, "v")
    if value is None:
        raise TypeError(f"products: v is {every.get('v')!r}, expected the name of an array, several, or (f, f_vjp)")
    kind = EraseKey.OWN
    if k and r and not is_pair(r) and not is_pair(k):
        kind = EraseKey.KEY if r == k else EraseKey.PRODUCT if set(k) < set(r) else EraseKey.OWN
    return ChangeOfVariables(
        functools.partial(_to_core, every),
        functools.partial(_to_core_vjp, every),
        query=_source(every, "q"),
        key=_source(every, "k"),
        value=value,
        erase_key=kind,
    )


def _source(inputs: Given, name: str) -> str | None:
    """The array that an input comes from; None for a constant."""
    factors = inputs.get(name, ())
    if is_pair(factors):
        return name
    return factors[-1] if factors else None


def is_pair(given: Factors | Pair) -> bool:
    """Whether an input is a function of the call with its transpose."""
    return bool(given) and callable(given[0])


def _to_core(inputs: Given, c: Call) -> Inputs:
    core: dict[str, Array | None] = {}
    for name, factors in inputs.items():
        if is_pair(factors):
            writes_only = name == "q" and getattr(c, str(c.spec.change.query)) is None
            core[name] = None if writes_only else factors[0](c)
        elif name == "r" and factors == inputs.get("k"):
            core[name] = core["k"]
        else:
            core[name] = _product(c, factors, name == "u")
    return Inputs(**core)


def _to_core_vjp(inputs: Given, c: Call, d: Inputs) -> Gradients:
    grads: Gradients = {}
    for name, factors in inputs.items():
        dy = getattr(d, name)
        if dy is None:  # not given, or added to the gradient of k
            continue
        if is_pair(factors):
            _add(c.xp, grads, factors[1](c, dy))
        elif (kernel := _kernels(c, factors, dy)) is not None:
            _add_by_kernel(kernel, c, factors, dy, grads)
        else:
            _add(c.xp, grads, _product_vjp(c, factors, dy))
    return grads


def _add(xp: Namespace, grads: Gradients, more: Gradients) -> None:
    for array, dx in more.items():
        grads[array] = dx if array not in grads else added(xp, grads[array], dx)


def _add_by_kernel(kernel: Any, c: Call, factors: Factors, dy: Array, grads: Gradients) -> None:
    """The gradients of a product of two arrays; one that is known already is added to by the kernel."""
    one, other = sorted(factors, key=lambda name: name not in grads)
    known = grads.get(one)
    add = grads.pop(one) if known is not None and kernel.takes(dy, known) else None
    d_one, d_other = kernel.product_vjp(c.xp, getattr(c, one), getattr(c, other), dy, add)
    _add(c.xp, grads, {one: d_one, other: d_other})


def is_rounded(c: Call, name: str) -> bool:
    """Whether an input that is computed from an array is rounded: for kernels, where rows q, k and v are bfloat16."""
    rows = (x for name in {"q", "k", "v", name} if (x := getattr(c, name, None)) is not None)
    return c.kernels and is_cupy(c.xp) and all(dtype_name(x) == "bfloat16" for x in rows)


def _kernels(c: Call, factors: Factors, *more: Array) -> Any:
    """The module of kernels for a product of two arrays that is rounded; None for others."""
    if len(factors) != 2 or len(_given(c, factors)) != 2 or not is_rounded(c, factors[-1]):
        return None
    from .ops.cuda import product

    return product if product.takes(*(getattr(c, name) for name in factors), *more) else None


def _given(c: Call, factors: Factors) -> list[str]:
    return [name for name in factors if getattr(c, name) is not None]


def _product(c: Call, factors: Factors, of_heads: bool) -> Array | None:
    """The product, (..., T, heads, D); of_heads: (heads, D)."""
    xp = c.xp
    if factors and getattr(c, factors[-1]) is None:
        return None
    given = _given(c, factors)
    if not given:
        like = next(x for name in c.axes if (x := getattr(c, name)) is not None)
        make = functools.partial(xp.ones, (1, 1, 1), dtype=c.dtype, device=device(like))
        one = constant_array(xp, ("ones", (1, 1, 1), str(c.dtype)), device(like), make)
        return xp.broadcast_to(one, (*c.batch, c.sizes["T"], c.sizes["H"], 1))
    if len(given) == 1:
        y = _with_channels(c, given[0])
    else:
        kernel = _kernels(c, factors)
        if kernel is not None:
            return kernel.product(xp, *(getattr(c, name) for name in factors))
        y = product_of_heads(xp, *(_with_channels(c, name) for name in given), dtype=c.dtype)
        y = cast(xp, y, getattr(c, given[-1]).dtype) if is_rounded(c, given[-1]) else y
    if of_heads or any(_kind(c.axes[name])[0] for name in given):
        return y
    return xp.broadcast_to(y, (c.sizes["T"], *y.shape))


def _product_vjp(c: Call, factors: Factors, dy: Array) -> Gradients:
    given = _given(c, factors)
    each = _wide(c, given) if len(given) > 1 else []
    dy = cast(c.xp, dy, c.dtype) if each else dy
    grads: Gradients = {}
    for n, name in enumerate(given):
        others = each[:n] + each[n + 1 :]
        dx = _over_broadcast(c, name, product(c.xp, dy, *others, dtype=c.dtype) if others else dy)
        _add(c.xp, grads, {name: dx})
    return grads


def _wide(c: Call, names: list[str]) -> list[Array]:
    """The factors in the compute dtype, with the heads of the widest one."""
    each = [cast(c.xp, _with_channels(c, name), c.dtype) for name in names]
    heads = max(x.shape[-2] for x in each)
    return [shared_heads(c.xp, x, heads) for x in each]


def _with_channels(c: Call, name: str) -> Array:
    """An array with a channel axis."""
    x = getattr(c, name)
    return x if _kind(c.axes[name])[1] else x[..., None]


def _over_broadcast(c: Call, name: str, dx: Array) -> Array:
    """dx (..., T, heads, D) in the shape of an array: the transpose of broadcasting it."""
    xp, x = c.xp, getattr(c, name)
    has_tokens, has_channels = _kind(c.axes[name])
    heads, D = x.shape[-2:] if has_channels else (x.shape[-1], 1)
    if dx.shape[-1] != D:
        dx = sum_to(xp, dx, (*dx.shape[:-1], 1))
    dx = sum_of_groups(xp, dx, heads)
    if not has_tokens and dx.ndim > 2:
        dx = over_tokens(xp, dx, 2)
    return dx if has_channels else dx[..., 0]


@functools.cache
def _kind(axes: str) -> tuple[bool, bool]:
    """(whether an array has tokens, whether it has channels).   Raises ValueError for axes that no product has."""
    letters: list[Any] = axes.split()
    tokens, rest = has_time(axes), [letter for letter in letters if letter not in ("T", "Tq")]
    if "|" in axes or not rest or rest[0] not in HEADS or len(rest) > 2:
        raise ValueError(
            f"products: an array has the axes {axes!r}, expected heads, with or without T and one channel axis"
        )
    return tokens, len(rest) == 2
