"""Differentiable calls: one `torch.autograd.Function` around every function of linattn_np that has a pullback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...call.foreign import leaves, mapped
from .views import PLAIN, Tensor

Rule = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, Callable[..., Any]]]


SECOND = "{}: a gradient is differentiated again, expected first derivatives only: second ones are not available"


@dataclass(frozen=True)
class _Place:
    """A tensor of a call: its number, the argument it belongs to and its position there, if that has parts."""

    number: int
    argument: str
    part: int


class TensorCall:
    """A call without its tensors."""

    def __init__(self, name: str, rule: Rule, names: tuple[str, ...], keywords: Mapping[str, Any]):
        """rule: (arrays, keywords) -> (result, pullback), in tensors. names: of the arguments that have a gradient.

        Raises TypeError for a tensor that requires grad in an option.
        """
        self._rule = rule
        self.name, self.tensors, self._places = name, list[Tensor](), list[_Place]()
        self._keywords = {n: self._without_tensors(n, x) if n in names else x for n, x in keywords.items()}
        for n, x in keywords.items():
            if n not in names and any(type(y) in PLAIN and y.requires_grad for y in leaves(x)):
                raise TypeError(f"{name}: {n} requires grad, expected a tensor that does not: it has no gradient")
        self._result: Any = None  # of forward: the shape and dtype in the place of each array

    def _without_tensors(self, name: str, x: Any) -> Any:
        first = len(self.tensors)

        def place(y: Any) -> Any:
            if type(y) not in PLAIN:
                return y
            self._places.append(_Place(len(self.tensors), name, len(self.tensors) - first))
            self.tensors.append(y)
            return self._places[-1]

        return mapped(place, x)

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Any, Callable[..., Any]]:
        """(the result, the pullback to the gradients of all tensors)."""

        def fill(y: Any) -> Any:
            return tensors[y.number] if type(y) is _Place else y

        result, pullback = self._rule((), {n: mapped(fill, x) for n, x in self._keywords.items()})
        self._result = mapped(lambda y: None if y is None else [y.shape, y.dtype], result)

        def of_tensors(*cotangents: Any) -> list[Any]:
            grads = pullback(*cotangents)
            return [leaves(getattr(grads, place.argument))[place.part] for place in self._places]

        return result, of_tensors

    def cotangents(self, given: tuple[Any, ...], where: torch.device) -> tuple[Any, ...]:
        """The arguments of the pullback from the gradients of the outputs: zeros for a part of a state without one."""
        left = iter(given)

        def each(like: Any) -> Any:
            return None if like is None else next(left)

        def whole(like: Any, d: Any) -> Any:
            if not isinstance(d, tuple) or all(x is None for x in d):
                return None if isinstance(d, tuple) else d
            return type(d)(*(torch.zeros(shape, dtype=dtype, device=where) if x is None else x
                             for (shape, dtype), x in zip(like, d, strict=True)))  # fmt: skip

        found, likes = mapped(each, self._result), self._result
        if not isinstance(found, tuple):
            return (found,)
        return tuple(map(whole, likes, found))


class Differentiable(torch.autograd.Function):
    """A call that PyTorch differentiates by its pullback.

    The pullback, with its residuals, belongs to the storage of the last saved tensor. Hooks for saved tensors
    therefore drop it with that tensor: under gradient checkpointing nothing of the forward is held.
    """

    @staticmethod
    def forward(ctx: Any, call: TensorCall, *tensors: Tensor) -> Any:
        """The tensors of the result."""
        result, pullback = call.forward(tensors)
        owner = torch.empty(1, dtype=torch.uint8)
        vars(owner.untyped_storage())["pullback"] = pullback
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, owner)  # raises in backward if one of them was changed
        return tuple(y for y in leaves(result) if y is not None)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The gradients. Residuals are freed; a second backward of a retained graph recomputes them.

        So does the backward of a tensor that a hook has copied.
        """
        (*tensors, owner), call = ctx.saved_tensors, ctx.call
        if all(d is None for d in cotangents):
            return (None,) * (1 + len(tensors))
        with torch.no_grad():
            pullback = vars(owner.untyped_storage()).pop("pullback", None) or call.forward(tuple(tensors))[1]
            grads = pullback(*call.cotangents(cotangents, tensors[0].device))
        grads = once(call.name, grads, (*tensors, *cotangents))
        return None, *(d if need else None for d, need in zip(grads, ctx.needs_input_grad[1:], strict=True))


class OnlyOnce(torch.autograd.Function):
    """Gradients as they are; their own backward is an error."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Any) -> Any:
        """The gradients, the first `count` tensors; the others are those that they depend on."""
        ctx.function = name
        return tuple(d.view_as(d) for d in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Raises RuntimeError."""
        raise RuntimeError(SECOND.format(ctx.function))


def once(name: str, grads: Sequence[Tensor], of: Iterable[Any]) -> Sequence[Tensor]:
    """Gradients whose own derivatives by the tensors `of` are an error, if autograd is to follow them."""
    if not torch.is_grad_enabled():  # no create_graph=True
        return grads
    return OnlyOnce.apply(name, len(grads), *grads, *of)


def differentiated(name: str, rule: Rule, names: tuple[str, ...], keywords: Mapping[str, Any]) -> Any:
    """The result of a call that PyTorch differentiates."""
    call = TensorCall(name, rule, names, keywords)
    outputs = iter(Differentiable.apply(call, *call.tensors))
    return mapped(lambda like: None if like is None else next(outputs), call._result)
