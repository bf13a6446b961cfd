"""Functions around a recurrence that compiled loops compute on the host, such as the short convolution.

A call is one `Differentiable` of autograd, or, in a traced call, one operator `torch.ops.linattn_np.NAME` with its
`NAME_backward`. Calls for which there are no loops, and calls that torch.func transforms, are torch operations.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from .arguments import is_followed
from .autograd import SECOND, Rule, differentiated
from .calls import is_traced
from .operators import NAMESPACE
from .views import Tensor, tensor, view

FLOATS = (torch.float32, torch.float64)  # dtypes of the loops
own = torch.library.Library(NAMESPACE, "FRAGMENT")


class Loops(NamedTuple):
    """A function of arrays, None and options, in the order of the call; its vjp takes the cotangent after them."""

    forward: Callable[..., np.ndarray]
    vjp: Callable[..., tuple[np.ndarray | None, ...]]


class Piece:
    """A function whose result has the shape of its first array."""

    def __init__(self, schema: str, names: tuple[str, ...], loops: Loops, plain: Callable[..., Tensor],
                 rule: Rule | None = None):  # fmt: skip
        """schema: of the operator. names: of the arguments that have a gradient, in order, the first ones.

        plain: torch operations. rule: the same with a pullback, where autograd would keep more; None: autograd.
        """
        self.name, self.names = schema.partition("(")[0], names
        self._loops, self._plain, self._rule = loops, plain, rule
        self._define(schema)

    def __call__(self, **given: Any) -> Tensor:
        """given: every argument, in the order of the schema."""
        if torch.compiler.is_compiling() or is_traced((), given):
            operator = getattr(getattr(torch.ops, NAMESPACE), self.name)
            return operator(*given.values()) if self._has_loops(given) else self._plain(**given)
        rule = None if is_followed() else self._by_loops if self._has_loops(given) else self._rule
        if rule is None:
            return self._plain(**given)
        tensors = [given[n] for n in self.names if given[n] is not None]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return differentiated(self.name, rule, self.names, given)
        return rule((), given)[0]

    def _has_loops(self, given: dict[str, Any]) -> bool:
        tensors = [given[n] for n in self.names if given[n] is not None]
        dtype = tensors[0].dtype
        return dtype in FLOATS and all(x.device.type == "cpu" and x.dtype == dtype for x in tensors)

    def _by_loops(self, _: Any, given: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        seen = _seen(given.values())

        def pullback(dy: Tensor) -> Any:
            return SimpleNamespace(**dict(zip(self.names, map(_tensor, self._loops.vjp(*seen, view(dy))), strict=True)))

        return tensor(self._loops.forward(*seen)), pullback

    def _define(self, schema: str) -> None:
        """The operators."""
        one, other = self.name, f"{self.name}_backward"
        own.define(f"{schema} -> Tensor")
        own.define(f"{schema[:-1]}, Tensor dy) -> Tensor[]".replace(one, other, 1))
        own.impl(one, lambda *given: tensor(self._loops.forward(*_seen(given))), "CPU")
        own.impl(other, self._backward, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{one}", lambda x, *_: x.new_empty(x.shape), lib=own)
        torch.library.register_fake(f"{NAMESPACE}::{other}", self._fake_backward, lib=own)
        torch.library.register_autograd(f"{NAMESPACE}::{one}", self._gradients, setup_context=_keep, lib=own)
        torch.library.register_autograd(f"{NAMESPACE}::{other}", self._no_second, lib=own)

    def _backward(self, *given: Any) -> list[Tensor]:
        return [tensor(d) for d in self._loops.vjp(*_seen(given)) if d is not None]

    def _fake_backward(self, *given: Any) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in given[: len(self.names)] if x is not None]

    def _gradients(self, ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        left = list(ctx.saved_tensors)
        given = [left.pop(0) if there else x for there, x in ctx.places]
        grads = getattr(getattr(torch.ops, NAMESPACE), f"{self.name}_backward")(*given, dy)
        found = [None if x is None else grads.pop(0) for x in given[: len(self.names)]]
        return *found, *[None] * (len(given) - len(found))

    def _no_second(self, ctx: Any, cotangents: Any) -> Any:
        raise RuntimeError(SECOND.format(self.name))


def _seen(given: Any) -> list[Any]:
    """Tensors as arrays."""
    return [view(x) if isinstance(x, Tensor) else x for x in given]


def _tensor(d: np.ndarray | None) -> Tensor | None:
    return None if d is None else tensor(d)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.places = [(True, None) if isinstance(x, Tensor) else (False, x) for x in inputs]
