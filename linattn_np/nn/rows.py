"""Norms and the softmax of rows: the last axis, or groups of its channels."""

from __future__ import annotations

import functools
from typing import Any

from ..ops import norms, softmax_rows
from ..ops.gated_norm import GatedNorm, check_how, gated_rms_norm, gated_rms_norm_vjp
from ..runtime.arrays import Array, sum_to
from ..runtime.values import is_finite, is_whole, is_word, shown
from . import doubts
from .declaration import Call, Kind, Pullback, always, piece

Computed = tuple[Any, Pullback]


def _why_array_calls(given: Any) -> str:
    """Why loops do not compute a norm."""
    weight, bias = given["weight"], given["bias"]
    return "" if _is_one_row(weight, bias) else "weight and bias have two shapes"


def _is_one_row(weight: Any, bias: Any) -> bool:
    return weight is None or bias is None or tuple(weight.shape) == tuple(bias.shape)


NORM = Kind(
    doubts=doubts.of_norm,
    array_calls=_why_array_calls,
    stored=lambda given: _is_one_row(given["weight"], given["bias"]),
)


@piece(Kind(doubts=doubts.of_norm, stored=always), x="... D")
def l2_norm(c: Call, x: Any, *, eps: float = 1e-6) -> Computed:
    """Rows divided by their length.

        y = x / n,   n = sqrt(|x|^2 + eps),   dx = (dy - y <y, dy>) / n

    x (..., D). Returns y (..., D) in x's dtype; 0 for 0, also with eps=0. No row overflows.
    """
    _check_eps(c, eps)
    if c.on_device:
        return _by_launches(x, {"eps": eps, "mean": False}, c.sizes["D"])
    if c.compiled:
        return _by_loops(c, x, None, None, {"eps": eps, "mean": False}, c.sizes["D"])

    def pullback(dy: Any) -> dict[str, Any]:
        return {"x": norms.unit_vjp(c.xp, x, dy, eps)}

    return norms.unit(c.xp, x, eps), pullback


@piece(NORM, x="... D", weight="...?", bias="...?")
def rms_norm(c: Call, x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-6) -> Computed:
    """Rows divided by the root of their mean square.

        y = f x weight + bias,   f = 1 / sqrt(mean x^2 + eps),   dx = f (d - n mean(n d)),  n = f x, d = dy weight

    x             (..., D)
    weight, bias  (D,), or (H, D) where each head has its own

    Returns y (..., D) in x's dtype. No row overflows. Zhang and Sennrich, arXiv 1910.07467.
    """
    return _normed(c, x, weight, bias, eps, c.sizes["D"], centred=False)


@piece(NORM, x="... D", weight="...?", bias="...?")
def layer_norm(c: Call, x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Computed:
    """Rows with mean 0 and variance 1.

        y = f (x - mean x) weight + bias,   f = 1 / sqrt(var x + eps)

    x             (..., D)
    weight, bias  (D,), or (H, D) where each head has its own

    Returns y (..., D) in x's dtype. Ba et al., arXiv 1607.06450.
    """
    return _normed(c, x, weight, bias, eps, c.sizes["D"], centred=True)


@piece(NORM, x="... D", weight="D?", bias="D?")
def group_norm(c: Call, x: Any, weight: Any = None, bias: Any = None, *, groups: int, eps: float = 1e-5,
               centred: bool = True) -> Computed:  # fmt: skip
    """layer_norm of each of `groups` equal parts of a row.

    With groups=H these are the heads of (..., T, H V), as in RetNet and RWKV.

    x             (..., D), D a multiple of groups
    weight, bias  (D,)
    centred       False: the root mean square of each group, as in Mamba-2

    Returns y (..., D) in x's dtype. Wu and He, arXiv 1803.08494.
    """
    D = c.sizes["D"]
    if not is_whole(groups) or D % groups:
        raise ValueError(f"group_norm: groups is {shown(groups)}, expected a divisor of D = {D}")
    return _normed(c, x, weight, bias, eps, D // groups, centred)


@piece(Kind(doubts=doubts.of_norm, stored=always), x="... D", gate="... D", weight="D?")
def gated_norm(c: Call, x: Any, gate: Any, weight: Any = None, *, eps: float = 1e-6, activation: str = "silu",
               gate_first: bool = False, group: int | None = None) -> Computed:  # fmt: skip
    """rms_norm and an output gate, in one pass.

        y = norm(x) weight act(gate)        Gated DeltaNet, KDA
        y = norm(x act(gate)) weight        gate_first=True: Mamba-2

    x, gate     (..., D)
    weight      (D,)
    activation  "silu" (or "swish"), "sigmoid"
    group       channels that are normed together, a divisor of D; None: all

    Returns y (..., D) in x's dtype. Raises ValueError for another activation or group. Dao and Gu, arXiv 2405.21060.
    """
    _check_eps(c, eps)
    how = GatedNorm(eps, "silu" if is_word(activation, ("swish",)) else activation, gate_first, group)
    check_how(c.fn, how, c.sizes["D"])
    if c.on_device:
        first = {"sigmoid": how.activation == "sigmoid", "gate_first": gate_first}
        return _by_launches(x, {"eps": eps} | first, group or c.sizes["D"], gate, weight)
    if c.compiled:
        from ..ops.cpu import gated_norm as loops

        out, f_vjp = loops.gated_rms_norm(x, gate, weight, how), loops.gated_rms_norm_vjp
    else:
        out, f_vjp = gated_rms_norm(c.xp, x, gate, weight, how), functools.partial(gated_rms_norm_vjp, c.xp)
    return out, lambda dy: dict(zip(("x", "gate", "weight"), f_vjp(x, gate, weight, how, dy), strict=True))


@piece(Kind(infinite=("x",), stored=always), x="... D")
def softmax(c: Call, x: Any) -> Computed:
    """Shares of a row that add up to 1.

        y = e^{x - m} / sum e^{x - m},   m = max x,   dx = y (dy - <y, dy>)

    x (..., D); -inf has the share 0, and a row of nothing but -inf is 0. Returns y (..., D) in x's dtype.
    """
    if c.on_device:
        from ..ops.cuda import softmax_rows as launched

        return launched.softmax(x), lambda dy: {"x": launched.softmax_vjp(x, dy)}
    if c.compiled:
        from ..ops.cpu import softmax_rows as loops

        return loops.softmax(x), lambda dy: {"x": loops.softmax_vjp(x, dy)}
    return softmax_rows.softmax(c.xp, x), lambda dy: {"x": softmax_rows.softmax_vjp(c.xp, x, dy)}


def _normed(c: Call, x: Any, weight: Any, bias: Any, eps: float, D: int, centred: bool) -> Computed:
    """f (x - m) weight + bias of rows of D channels."""
    _check_eps(c, eps)
    for name, y in (("weight", weight), ("bias", bias)):
        if y is not None and (not y.ndim or tuple(y.shape) != tuple(x.shape[max(x.ndim - y.ndim, 0) :])):
            raise ValueError(f"{c.fn}: {name} has shape {tuple(y.shape)}, expected the last axes of x: (D,) = "
                             f"({x.shape[-1]},)")  # fmt: skip
    if c.on_device and _is_one_row(weight, bias):
        return _by_launches(x, {"eps": eps, "centred": centred}, D, None, weight, bias)
    if c.compiled and _is_one_row(weight, bias):
        return _by_loops(c, x, weight, bias, {"eps": eps, "centred": centred}, D)
    xp, rows = c.xp, (*x.shape[:-1], x.shape[-1] // max(D, 1), D)
    f, f_vjp = (norms.layer_norm, norms.layer_norm_vjp) if centred else (norms.rms_norm, norms.rms_norm_vjp)
    n = xp.reshape(f(xp, xp.reshape(x, rows), eps), x.shape)
    y = n if weight is None else n * weight

    def pullback(dy: Array) -> dict[str, Any]:
        d = dy if weight is None else dy * weight
        dx = xp.reshape(f_vjp(xp, xp.reshape(x, rows), xp.reshape(d, rows), eps), x.shape)
        return {"x": dx, "weight": None if weight is None else sum_to(xp, dy * n, tuple(weight.shape)),
                "bias": None if bias is None else sum_to(xp, dy, tuple(bias.shape))}  # fmt: skip

    return y if bias is None else y + bias, pullback


def _by_loops(c: Call, x: Any, weight: Any, bias: Any, how: dict[str, Any], D: int) -> Computed:
    from ..ops.cpu import row_norms as loops

    norm = loops.Norm(**how)

    def pullback(dy: Any) -> dict[str, Any]:
        dx, *more = loops.backward(x, weight, bias, norm, dy, D)
        named = zip(("weight", "bias"), more, (weight, bias), strict=True)
        return {"x": dx} | {n: d.reshape(y.shape) for n, d, y in named if d is not None and y is not None}

    return loops.forward(x, weight, bias, norm, D), pullback


def _by_launches(
    x: Any, how: dict[str, Any], D: int, gate: Any = None, weight: Any = None, bias: Any = None
) -> Computed:
    from ..ops.cuda import norms as launched

    norm = launched.Norm(**how)

    def pullback(dy: Any) -> dict[str, Any]:
        return launched.backward(x, norm, D, dy, gate, weight, bias)._asdict()

    return launched.forward(x, norm, D, gate, weight, bias), pullback


def _check_eps(c: Call, eps: Any) -> None:
    if not is_finite(eps) or eps < 0:
        raise ValueError(f"{c.fn}: eps is {shown(eps)}, expected a finite number >= 0")
