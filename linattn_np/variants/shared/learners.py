"""Arrays, options and the change of variables that learners share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...call.options import Options
from ...fast_weights.types import COEFFICIENTS, Inputs, Rates
from ...ops.gates import exponential
from ...ops.product import multiple, product
from ...runtime.arrays import Array, cast
from ...runtime.values import is_whole, is_word, shown
from ...spec import ArgSpec, Call, ChangeOfVariables
from .arguments import LOG_DECAY, POSITIVE

RATE = ArgSpec("T H", "step size of the token, >= 0", limits=POSITIVE)
MOMENTUM = ArgSpec("T H", "what remains of the momentum, in [0, 1]", limits=(0.0, 1.0))
DECAY = ArgSpec("T H", "log decay of the weights, <= 0", limits=LOG_DECAY)
GAIN = ArgSpec("T H", "part of the mini-batch's steps that is read; None: 1", True)
NORM = {"weight": ArgSpec("H K", "weight of the norm"), "shift": ArgSpec("H K", "shift of the norm")}


MILD = ((1.875, -1.25, 0.375),)  # for tests: the slope of published iterations is in the hundreds


class LearnerOptions(Options, total=False):
    """The common options, the tokens of a mini-batch, and whether a query reads before or after its token's step."""

    mini_batch: int
    read: str


def learns(*weights: str, slow: tuple[str, ...] = (), etas: tuple[str, ...] = ("eta",), factor: float = 1.0) -> Any:
    """The change of variables of a learner: q, k, v, its initial arrays and its rates.

    etas: the step sizes, for all matrices or for each; the core gets `factor` times them. g, mu and gain are the log
    decay, momentum and gain of the variant, where it has them.
    """

    def rate(c: Call, name: str) -> Any:
        return None if getattr(c, name, None) is None else cast(c.xp, getattr(c, name), c.dtype)[..., None]

    def to_core(c: Call) -> Inputs:
        """Rates get an axis of one channel; alpha = e^g."""
        g = rate(c, "g")
        eta = tuple(rate(c, n) if factor == 1 else multiple(c.xp, factor, rate(c, n), c.dtype) for n in etas)
        others = (rate(c, n) for n in ("mu", "gain", "beta", "share"))
        rates = Rates(eta, None if g is None else exponential(c.xp, g, c.dtype), *others)
        return Inputs(c.q, c.k, c.v, rates, tuple(getattr(c, n) for n in weights), tuple(getattr(c, n) for n in slow))

    def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
        """dg = e^g dalpha."""
        found = dict(zip(("q", "k", "v"), d[:3], strict=True))
        found |= dict(zip(weights, d.weights, strict=True)) | dict(zip(slow, d.slow, strict=True))
        for n, y in zip(etas, d.rates.eta, strict=True):
            found[n] = (y if factor == 1 else multiple(c.xp, factor, y, c.dtype))[..., 0]
        if (alpha := d.rates.alpha) is not None:
            found["g"] = product(c.xp, alpha, exponential(c.xp, rate(c, "g"), c.dtype), dtype=c.dtype)[..., 0]
        more = {n: getattr(d.rates, n) for n in ("mu", "gain", "beta", "share")}
        return found | {n: y[..., 0] for n, y in more.items() if y is not None}

    return ChangeOfVariables(to_core, to_core_vjp, linear=False)


def check_learner(fn: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a mini-batch or a read that there is not."""
    if not is_whole(options["mini_batch"]):
        raise ValueError(f"{fn}: mini_batch is {shown(options['mini_batch'])}, expected a whole number from 1")
    if "read" in options and not is_word(options["read"], ("before", "after")):
        raise ValueError(f"{fn}: read is {shown(options['read'])}, expected 'before' or 'after'")


def check_muon(fn: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for coefficients of Newton-Schulz that there are not."""
    muon = options["muon"]
    rows = muon if isinstance(muon, tuple | list) else [None]
    is_list = all(isinstance(x, tuple | list) and len(x) == 3 for x in rows)
    if muon is not None and not is_list and not is_word(muon, tuple(COEFFICIENTS)):
        words = ", ".join(map(repr, COEFFICIENTS))
        raise ValueError(f"{fn}: muon is {shown(muon)}, expected {words}, triples (a, b, c), or None")
