"""Optimisers of parameters in one vector; their moments are vectors too. ops/optimisers.py has the equations.

Parameters in 16 bits have masters in float32 among the moments: these are updated, and the parameters are the numbers
nearest to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..ops import optimisers as ops
from ..runtime.arrays import cast, compat, is_cupy
from ..runtime.values import check_word
from .flat import Flat

Chosen = Callable[[str, tuple[int, ...]], bool]  # of a path and a shape


def has_axes(path: str, shape: tuple[int, ...]) -> bool:
    """Whether an array has two axes or more: weights, not gains, biases and rates."""
    return len(shape) > 1


def is_hidden(path: str, shape: tuple[int, ...]) -> bool:
    """Whether an array is a matrix of at least 8 rows and columns, and no embedding or head."""
    return len(shape) == 2 and min(shape) >= 8 and not path.startswith(("embedding/", "head/"))


class AdamW(NamedTuple):
    """p <- (1 - rate decay) p - rate m^ / (v^^{1/2} + eps); Loshchilov and Hutter, arXiv 1711.05101.

    decays(path, shape): which arrays decay; those of two axes or more by default.
    """

    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decays: Chosen = has_axes

    def start(self, params: Mapping[str, Any], dtype: Any = None) -> tuple[Flat, dict[str, Flat]]:
        """(the parameters in a dtype, their moments): vectors in which the arrays that decay come first."""
        P, masters = _with_masters(sorted(params.items(), key=lambda each: not self.decays(*_shape_of(each))), dtype)
        W = masters.get("master", P)
        return P, {"m": W.zeros(), "v": W.zeros()} | masters

    def update(self, P: Flat, G: Flat, moments: Mapping[str, Flat], step: int, rate: float, clip: float = 1.0) -> None:
        """Step number `step`, from 1, in place; clip multiplies the gradients."""
        if (numbers := _numbers(P, moments, self.betas, step, rate, clip)) is not None:
            return self.launch(P, G, moments, numbers)
        count, W = self._decaying(P), moments.get("master", P)
        groups = [(0, count, 1 - rate * self.decay, rate), (count, P.vector.size, 1.0, rate)]
        xp = compat.array_namespace(P.vector)
        each = (W.vector, cast(xp, G.vector, W.vector.dtype), moments["m"].vector, moments["v"].vector)
        ops.adamw(xp, *each, groups, self.betas, self.eps, step, clip)
        _round(xp, P.vector, W.vector)

    def launch(self, P: Flat, G: Flat, moments: Mapping[str, Flat], numbers: Any) -> None:
        """The step of CuPy arrays whose numbers are on the device (ops/cuda/optimisers.py)."""
        from ..ops.cuda import optimisers as launched

        master = moments["master"].vector if "master" in moments else None
        each = launched.Moments(master, moments["m"].vector, moments["v"].vector)
        count = self._decaying(P)
        launched.adamw(P.vector, G.vector, each, numbers, count, self.decay, self.betas, self.eps)

    def _decaying(self, P: Flat) -> int:
        """How many numbers decay."""
        return sum(int(x.size) for path, x in P.arrays.items() if self.decays(path, x.shape))


class Muon(NamedTuple):
    """The gradient of a hidden matrix becomes orthogonal; other arrays are those of AdamW. Jordan et al., 2024.

    rate           times the rate of AdamW's arrays
    coefficients   "keller", "five" or "polar_express" (arXiv 2505.16932)
    matrices(path, shape): which arrays; those of 8 x 8 and more by default, without embedding and head
    """

    rate: float = 10.0
    momentum: float = 0.95
    nesterov: bool = True
    coefficients: str = "keller"
    decay: float = 0.1
    matrices: Chosen = is_hidden
    others: AdamW = AdamW()

    @property
    def betas(self) -> tuple[float, float]:
        """Those of AdamW's arrays."""
        return self.others.betas

    def start(self, params: Mapping[str, Any], dtype: Any = None) -> tuple[Flat, dict[str, Flat]]:
        """(the parameters in a dtype, their moments): vectors in which the matrices come last, and have one moment.

        Raises ValueError for unknown coefficients.
        """
        check_word("Muon", "coefficients", self.coefficients, tuple(ops.COEFFICIENTS))
        own = {n: x for n, x in params.items() if self.matrices(n, x.shape)}
        first, moments = self.others.start({n: x for n, x in params.items() if n not in own}, dtype)
        P, masters = _with_masters([(n, params[n]) for n in (*first.arrays, *own)], dtype)
        return P, {"m": masters.get("master", P).zeros(), "v": moments["v"]} | masters

    def update(self, P: Flat, G: Flat, moments: Mapping[str, Flat], step: int, rate: float, clip: float = 1.0) -> None:
        """Step number `step`, from 1, in place; clip multiplies the gradients."""
        if (numbers := _numbers(P, moments, self.betas, step, rate, clip)) is not None:
            return self.launch(P, G, moments, numbers)
        self.others.update(*self._rest(P, G, moments), step, rate, clip)
        self._turn(P, G, moments, rate, lambda g, m: clip * g)

    def launch(self, P: Flat, G: Flat, moments: Mapping[str, Flat], numbers: Any) -> None:
        """The step of CuPy arrays whose numbers are on the device; the host does not wait."""
        from ..ops.cuda import optimisers as launched

        self.others.launch(*self._rest(P, G, moments), numbers)
        xp, dtype = compat.array_namespace(P.vector), moments["m"].vector.dtype
        rate, length, scale = (xp.astype(numbers[n], dtype) for n in (launched.RATE, launched.NORM, launched.SCALE))
        finite = xp.isfinite(length)
        rate = xp.where(finite, rate, xp.zeros_like(rate))
        self._turn(P, G, moments, rate, lambda g, m: xp.where(finite, scale * g, m))

    def _rest(self, P: Flat, G: Flat, moments: Mapping[str, Flat]) -> tuple[Flat, Flat, dict[str, Flat]]:
        """AdamW's part of parameters, gradients, moments."""
        v = moments["v"]
        part = lambda F: F.first(v.vector.size, v.arrays)  # noqa: E731
        return part(P), part(G), {n: x if n == "v" else part(x) for n, x in moments.items()}

    def _turn(self, P: Flat, G: Flat, moments: Mapping[str, Flat], rate: Any, scaled: Callable[..., Any]) -> None:
        """Steps of the matrices; scaled(g, m): the gradient that enters the momentum m."""
        xp, own, paths = compat.array_namespace(P.vector), self.rate * rate, P.arrays.keys()
        W, m = moments.get("master", P), moments["m"]
        for path in paths - moments["v"].arrays.keys():
            p, g, M = W.arrays[path], cast(xp, G.arrays[path], m.vector.dtype), m.arrays[path]
            ops.muon(p, scaled(g, M), M, 1 - own * self.decay, own, self.momentum, self.nesterov, self.coefficients)
            _round(xp, P.arrays[path], p)


def _shape_of(each: tuple[str, Any]) -> tuple[str, tuple[int, ...]]:
    return each[0], each[1].shape


def _with_masters(params: Iterable[tuple[str, Any]], dtype: Any) -> tuple[Flat, dict[str, Flat]]:
    """(parameters in a dtype, None: their own, and their masters if it has 16 bits)."""
    whole = Flat.of(dict(params))
    P, wide = whole if dtype is None else whole.cast(dtype), compat.array_namespace(whole.vector).float32
    return P, {"master": whole.cast(wide)} if P.is_narrow else {}


def _round(xp: Any, p: Any, master: Any) -> None:
    """The parameters of new masters."""
    if p.dtype != master.dtype:
        p[...] = cast(xp, master, p.dtype)


def launched_on(P: Flat, moments: Mapping[str, Flat]) -> Any:
    """The module whose kernels step CuPy arrays; None for other arrays."""
    if not is_cupy(compat.array_namespace(P.vector)):
        return None
    from ..ops.cuda import optimisers as launched

    return launched if launched.takes(P.vector, P.vector, *(x.vector for x in moments.values())) else None


def _numbers(
    P: Flat, moments: Mapping[str, Flat], betas: tuple[float, float], step: int, rate: float, clip: float
) -> Any:
    """The numbers of a step whose gradient is multiplied by `clip`, for `launch`; None if no kernels compute it."""
    if (launched := launched_on(P, moments)) is None:
        return None
    numbers = np.array([*launched.numbers_of(step, rate, betas, np.inf), 0.0, clip])
    return compat.array_namespace(P.vector).asarray(numbers)
