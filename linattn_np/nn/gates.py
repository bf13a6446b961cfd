"""Log decays from the projections of a layer: the formulas of the variants."""

from __future__ import annotations

import functools
from typing import Any

from ..ops import gates
from ..runtime.arrays import Array, sum_to
from ..runtime.values import is_finite, is_word, shown
from . import doubts
from .declaration import Call, Kind, Pullback, always, piece

FUNCTIONS = ("softplus", "sigmoid", "log_sigmoid")
FORMULAS = ("softplus", "bounded", "log_sigmoid", "lower_bound", "exp")


@piece(Kind(doubts=doubts.of_log_decay, infinite=("a",), stored=always), a="...", A_log="...?", bias="...?")
def log_decay(c: Call, a: Any, A_log: Any = None, bias: Any = None, *, formula: str = "softplus",
              bound: float = -5.0, divisor: float = 1.0) -> tuple[Any, Pullback]:  # fmt: skip
    """The log decay g <= 0 of a token from its projection a; b = a + bias, rate = e^{A_log}, or 1 without A_log.

        "softplus"     g = -rate softplus(b)               Mamba-2, Gated DeltaNet, KDA
        "bounded"      g = bound sigmoid(rate b)           KDA with a lower bound; RWKV-7: bound=-e^{-1/2}
        "log_sigmoid"  g = log(sigmoid(b)) / divisor       GLA: divisor=16; mLSTM, forgetting attention: 1
        "lower_bound"  g = log(m + (1 - m) sigmoid(b))     HGRN-2: m = bound in [0, 1), no decay is below it
        "exp"          g = -rate e^b                       RWKV-6

    a            (..., T, H), or (..., T, H, K) with one decay a channel
    A_log, bias  broadcast to the last axes of a: (H,), or (H, 1) for (..., T, H, K)

    Returns g in a's dtype; it is what `g` of the variants is. Raises ValueError for another formula or a bound out of
    range.
    """
    xp = c.xp
    _check(c, formula, bound, divisor, A_log)
    for name, y in (("A_log", A_log), ("bias", bias)):
        if y is not None and not _fits(tuple(y.shape), tuple(a.shape)):
            raise ValueError(f"log_decay: {name} has shape {tuple(y.shape)}, expected the last axes of a, or 1: "
                             f"{tuple(a.shape)}")  # fmt: skip
    if c.on_device:
        return _launched(c, a, A_log, bias, (formula, bound, divisor))
    if c.compiled:
        return _by_loops(a, A_log, bias, (formula, bound, divisor))
    rate = 1.0 if A_log is None else xp.exp(A_log)
    softplus, sigmoid, log_sigmoid = (functools.partial(getattr(gates, n), xp) for n in FUNCTIONS)

    def parts() -> tuple[Array, Array, Array | None]:
        """(g, dg/db, dg/dA_log or None)."""
        b = a if bias is None else a + bias
        if formula == "softplus":
            g = -rate * softplus(b)
            return g, -rate * sigmoid(b), g
        if formula == "exp":
            g = -rate * xp.exp(b)
            return g, g, g
        if formula == "log_sigmoid":
            return log_sigmoid(b) / divisor, sigmoid(-b) / divisor, None
        if formula == "lower_bound":
            s = sigmoid(b)
            decay = bound + (1 - bound) * s
            return xp.log(decay), (1 - bound) * s * (1 - s) / decay, None
        y = rate * b
        slope = bound * gates.sigmoid_vjp(xp, y, xp.ones_like(y))
        return bound * sigmoid(y), slope * rate, slope * y

    def pullback(dg: Array) -> dict[str, Any]:
        _, slope, of_rate = parts()
        da = dg * slope
        return {"a": da, "bias": None if bias is None else sum_to(xp, da, tuple(bias.shape)),
                "A_log": None if A_log is None else sum_to(xp, dg * of_rate, tuple(A_log.shape))}  # fmt: skip

    return parts()[0], pullback


def _by_loops(a: Any, A_log: Any, bias: Any, how: tuple[str, float, float]) -> tuple[Any, Pullback]:
    from ..ops.cpu import formulas, sums
    from ..ops.cpu.elementwise import EXPONENTIAL, LOG_SIGMOID, LOWER_BOUND
    from ..runtime.pieces.memory import empty

    (word, bound, divisor), dtype, rate = how, a.dtype, A_log
    name, number, kind = {
        "softplus": ("log_decay", 0.0, 0), "bounded": ("bounded", bound, 0),
        "log_sigmoid": ("decay", divisor, LOG_SIGMOID), "lower_bound": ("decay", bound, LOWER_BOUND),
        "exp": ("decay", 0.0, EXPONENTIAL)}[word]  # fmt: skip
    if A_log is None and word == "softplus":
        rate = formulas.constant_of(0.0, dtype)
    g = formulas.compiled(name, (a, bias, rate), empty(a.shape, dtype), dtype, number, how=kind)

    def pullback(dg: Array) -> dict[str, Any]:
        arrays, where = (a, bias, rate, dg), (a.shape, dtype)
        if name == "decay":
            da = of_rate = formulas.compiled("decay_vjp", arrays, where, dtype, number, how=kind)
        else:
            da, of_rate = formulas.both(f"{name}_vjp", arrays, where, dtype, number, more=A_log is not None)
        return {"a": da, "bias": None if bias is None else sums.sum_to(da, tuple(bias.shape)),
                "A_log": None if A_log is None else sums.sum_to(of_rate, tuple(A_log.shape))}  # fmt: skip

    return g, pullback


def _launched(c: Call, a: Any, A_log: Any, bias: Any, how: tuple[str, float, float]) -> tuple[Any, Pullback]:
    from ..ops import sums
    from ..ops.cuda.activations import log_decay, log_decay_vjp

    def pullback(dg: Array) -> dict[str, Any]:
        da, rate = log_decay_vjp(a, A_log, bias, *how, dg)
        return {"a": da, "bias": None if bias is None else sums.sum_to(c.xp, da, tuple(bias.shape)),
                "A_log": None if A_log is None else sums.sum_to(c.xp, rate, tuple(A_log.shape))}  # fmt: skip

    return log_decay(a, A_log, bias, *how), pullback


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array is broadcast to the last axes of a whole one."""
    tail = whole[len(whole) - len(shape) :]
    return len(shape) <= len(whole) and all(n in (1, m) for n, m in zip(shape, tail, strict=True))


def _check(c: Call, formula: Any, bound: Any, divisor: Any, A_log: Any) -> None:
    """Raise ValueError for an unknown formula and for numbers out of range."""
    if not is_word(formula, FORMULAS):
        raise ValueError(f"{c.fn}: formula is {shown(formula)}, expected one of {', '.join(FORMULAS)}")
    if A_log is not None and formula in ("log_sigmoid", "lower_bound"):
        raise ValueError(f"{c.fn}: A_log was given with formula={formula!r}, expected None")
    if not is_finite(divisor) or divisor <= 0:
        raise ValueError(f"{c.fn}: divisor is {shown(divisor)}, expected a finite number > 0")
    if formula == "bounded" and (not is_finite(bound) or bound > 0):
        raise ValueError(f"{c.fn}: bound is {shown(bound)}, expected a finite number <= 0")
    if formula == "lower_bound" and (not is_finite(bound) or not 0 <= bound < 1):
        raise ValueError(f"{c.fn}: bound is {shown(bound)}, expected a number in [0, 1)")
