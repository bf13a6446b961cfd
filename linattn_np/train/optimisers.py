"""Optimisers of parameters in one vector; their moments are vectors too. ops/optimisers.py has the equations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..ops import optimisers as ops
from ..runtime.arrays import compat
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

    def start(self, params: Mapping[str, Any]) -> tuple[Flat, dict[str, Flat]]:
        """(the parameters, their moments): vectors in which the arrays that decay come first."""
        P = Flat.of(dict(sorted(params.items(), key=lambda each: not self.decays(each[0], each[1].shape))))
        return P, {"m": P.zeros(), "v": P.zeros()}

    def update(self, P: Flat, G: Flat, moments: Mapping[str, Flat], step: int, rate: float, clip: float = 1.0) -> None:
        """Step number `step`, from 1, in place; clip multiplies the gradients."""
        xp, count = compat.array_namespace(P.vector), 0
        for path, x in P.arrays.items():
            count += x.size * self.decays(path, x.shape)
        groups = [(0, count, 1 - rate * self.decay, rate), (count, P.vector.size, 1.0, rate)]
        each = (P.vector, G.vector, moments["m"].vector, moments["v"].vector)
        ops.adamw(xp, *each, groups, self.betas, self.eps, step, clip)


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

    def start(self, params: Mapping[str, Any]) -> tuple[Flat, dict[str, Flat]]:
        """(the parameters, their moments): vectors in which the matrices come last, and have one moment.

        Raises ValueError for unknown coefficients.
        """
        check_word("Muon", "coefficients", self.coefficients, tuple(ops.COEFFICIENTS))
        own = {n: x for n, x in params.items() if self.matrices(n, x.shape)}
        first, moments = self.others.start({n: x for n, x in params.items() if n not in own})
        P = Flat.of(first.arrays | own)
        return P, {"m": P.zeros(), "v": moments["v"]}

    def update(self, P: Flat, G: Flat, moments: Mapping[str, Flat], step: int, rate: float, clip: float = 1.0) -> None:
        """Step number `step`, from 1, in place; clip multiplies the gradients."""
        rest = moments["v"].arrays
        n, part = moments["v"].vector.size, lambda F: Flat(F.vector[:n], {path: F.arrays[path] for path in rest})
        m = moments["m"]
        self.others.update(part(P), part(G), {"m": part(m), "v": moments["v"]}, step, rate, clip)
        own = self.rate * rate
        for path in P.arrays.keys() - rest.keys():
            ops.muon(P.arrays[path], clip * G.arrays[path], m.arrays[path], 1 - own * self.decay, own,
                       self.momentum, self.nesterov, self.coefficients)  # fmt: skip
