"""Differentiable calls: one `torch.autograd.Function` around every function of linattn_np that has a pullback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...call.foreign import Rule, leaves, mapped
from .views import PLAIN, Tensor

SECOND = "{}: a gradient is differentiated again, expected first derivatives only: second ones are not available"
TENSOR = object()  # in the place of a tensor
Tensors = tuple[Any, ...]
Forward = Callable[[Tensors], tuple[Tensors, Tensors]]  # tensors -> (those of the result, others that are saved)
Backward = Callable[[Tensors, Tensors, Tensors], Sequence[Any]]  # (tensors, saved, cotangents) -> gradients


class Differentiable(torch.autograd.Function):
    """A function of tensors that PyTorch differentiates: a pair of functions, forward and backward."""

    @staticmethod
    def forward(ctx: Any, name: str, forward: Forward, backward: Backward, *tensors: Tensor) -> Any:
        """The tensors of the result."""
        results, saved = forward(tensors)
        ctx.function, ctx.pull, ctx.count = name, backward, len(tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)  # raises in backward if one of them was changed
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The gradients."""
        saved, count = ctx.saved_tensors, ctx.count
        if all(d is None for d in cotangents):
            return (None,) * (3 + count)
        with torch.no_grad():
            grads = ctx.pull(saved[:count], saved[count:], cotangents)
        grads = once(ctx.function, grads, (*saved[:count], *cotangents))
        return None, None, None, *(d if need else None for d, need in zip(grads, ctx.needs_input_grad[3:], strict=True))


def once(name: str, grads: Sequence[Tensor], of: Iterable[Any]) -> Sequence[Tensor]:
    """Gradients whose own derivatives by the tensors `of` are an error, if autograd is to follow them."""
    if not torch.is_grad_enabled():  # no create_graph=True
        return grads
    count = len(grads)

    def raises(*how: Any) -> Any:
        raise RuntimeError(SECOND.format(name))

    return Differentiable.apply(name, lambda x: (tuple(d.view_as(d) for d in x[:count]), ()), raises, *grads, *of)


def differentiated(name: str, rule: Rule, names: tuple[str, ...], keywords: Mapping[str, Any]) -> Any:
    """The result of a call that PyTorch differentiates.

    rule: (arrays, keywords) -> (result, pullback), in tensors. names: of the arguments that have a gradient.
    The pullback, with its residuals, belongs to the storage of a saved tensor. Hooks for saved tensors therefore drop
    it with that tensor: under gradient checkpointing nothing of the forward is held. A second backward of a retained
    graph recomputes the residuals; so does the backward of a tensor that a hook has copied.
    Raises TypeError for a tensor that requires grad in an option.
    """
    tensors, places = (
        list[Tensor](),
        list[tuple[str, int]](),
    )  # places: of each tensor its argument and its part of that
    like: Any = None  # `likes` of the result

    def without(n: str, x: Any) -> Any:
        first = len(tensors)

        def place(y: Any) -> Any:
            if type(y) not in PLAIN:
                return y
            places.append((n, len(tensors) - first))
            tensors.append(y)
            return TENSOR

        return mapped(place, x)

    rest = {n: without(n, x) if n in names else x for n, x in keywords.items()}
    for n, x in keywords.items():
        if n not in names and any(type(y) in PLAIN and y.requires_grad for y in leaves(x)):
            raise TypeError(f"{name}: {n} requires grad, expected a tensor that does not: it has no gradient")

    def computed(given: Tensors) -> tuple[Any, Callable[..., Any]]:
        nonlocal like
        left = iter(given)
        own = {n: mapped(lambda y: next(left) if y is TENSOR else y, x) for n, x in rest.items()}
        result, pullback = rule((), own)
        like = likes(result)
        return result, pullback

    def forward(given: Tensors) -> tuple[Tensors, Tensors]:
        result, pullback = computed(given)
        owner = torch.empty(1, dtype=torch.uint8)
        vars(owner.untyped_storage())["pullback"] = pullback
        return tuple(y for y in leaves(result) if y is not None), (owner,)

    def backward(given: Tensors, saved: Tensors, d: Tensors) -> list[Any]:
        pullback = vars(saved[0].untyped_storage()).pop("pullback", None) or computed(given)[1]
        grads = pullback(*cotangents(like, d, given[0].device))
        return [leaves(getattr(grads, n))[part] for n, part in places]

    outputs = iter(Differentiable.apply(name, forward, backward, *tensors))
    return mapped(lambda y: None if y is None else next(outputs), like)


def likes(result: Any) -> Any:
    """A result with [shape, dtype] in the place of each tensor."""
    return mapped(lambda y: None if y is None else [y.shape, y.dtype], result)


def cotangents(like: Any, given: Iterable[Any], where: torch.device) -> tuple[Any, ...]:
    """The arguments of a pullback from the gradients of the outputs: zeros for a part of a state without one.

    like: `likes` of the result.
    """
    left = iter(given)

    def whole(own: Any, d: Any) -> Any:
        if not isinstance(d, tuple) or all(x is None for x in d):
            return None if isinstance(d, tuple) else d
        return type(d)(*(torch.zeros(shape, dtype=dtype, device=where) if x is None else x
                         for (shape, dtype), x in zip(own, d, strict=True)))  # fmt: skip

    found = mapped(lambda y: None if y is None else next(left), like)
    return tuple(map(whole, like, found)) if isinstance(found, tuple) else (found,)
