"""The bridge of `call/foreign.py`: calls on tensors, by NumPy on the host and by CuPy on a device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...call.foreign import leaves
from ...nn.declaration import Piece
from ...spec import VariantSpec
from . import operators
from . import pieces_of_layers as layers
from .arguments import Arrays, Keywords, TensorViews, given, modes, tracing, transforms
from .autograd import Rule, differentiated
from .eager import COTANGENTS, check, eager, fast, in_tensors, recorded_vjp
from .views import PLAIN, Tensor


def run(spec: VariantSpec, arrays: Arrays, keywords: Keywords) -> Any:
    """The result of a public function: computed, or, in a traced call, by its operator."""
    if torch.compiler.is_compiling():
        operators.defined()
        return operators.traced(spec, arrays, keywords)
    result, signature = fast(spec, arrays, keywords)
    if result is None and is_traced(arrays, keywords):
        operators.defined()
        return operators.traced(spec, arrays, keywords)
    return eager(spec, arrays, keywords, signature) if result is None else result


def is_traced(arrays: Arrays, keywords: Keywords) -> bool:
    """Whether the tensors are stand-ins, or a mode or transform follows operations on them."""
    if modes() or tracing() is not None:
        return True
    return any(
        isinstance(y, Tensor) and (type(y) not in PLAIN or y.is_meta)
        for x in (*arrays, *keywords.values())
        for y in (leaves(x) if isinstance(x, tuple) else (x,))
    )


def run_vjp(name: str, spec: VariantSpec | None, rule: Rule, arrays: Arrays, keywords: Keywords) -> Any:
    """(result, pullback) of rule(arrays, keywords) in tensors, which autograd does not follow."""
    if (recorded := recorded_vjp(spec, rule, arrays, keywords)) is not None:
        return recorded
    if (found := given(name, arrays, keywords)) is None:
        return NotImplemented
    result, pullback = in_tensors(spec, rule, found.device, arrays, keywords)

    def checked(*cotangents: Any, **named: Any) -> Any:
        """Gradients by input name, of every tensor that was given and of the state."""
        check(name, found, dict(zip(COTANGENTS, cotangents, strict=False)) | named)
        return pullback(*cotangents, **named)

    return result, checked


def apply(name: str, fn: Callable[..., Any], rule: Rule | None, names: Arrays, keywords: Keywords) -> Any:
    """fn(**keywords), differentiable by `rule` if there is one; names: of the arguments that have a gradient.

    Raises TypeError without a rule if autograd is to follow the call.
    """
    if isinstance(fn, Piece) and not torch.compiler.is_compiling() and transforms() is not None:
        return NotImplemented  # array calls, which torch.func transforms
    if isinstance(fn, Piece) and (torch.compiler.is_compiling() or is_traced((), keywords)):
        layers.defined()
        return layers.traced(fn, keywords)
    if (found := given(name, (), keywords)) is None:
        return NotImplemented
    if found.differentiable and rule is not None:
        return differentiated(name, functools.partial(in_tensors, None, rule, found.device), names, keywords)
    if found.differentiable:
        raise TypeError(
            f"{name}: a tensor requires grad, expected tensors that do not (x.detach()): there is no gradient"
        )
    views = TensorViews(found.device)
    with views.context():
        return views.leave(fn(**views.call((), keywords)[1]))


def explain(name: str, fn: Callable[..., Any], arrays: Arrays, keywords: Keywords) -> Any:
    """fn(*arrays, **keywords) on the views: (an explanation, how the tensors are seen and who differentiates)."""
    if (found := given(name, arrays, keywords)) is None:
        return NotImplemented
    views = TensorViews(found.device)
    words = ("NumPy" if found.device.type == "cpu" else "CuPy") + " views of torch tensors"
    if found.device.type != "cpu":
        words += ", on torch's current stream"
    if found.requires_grad:
        words += ", differentiable by torch.autograd" if found.differentiable else ", no gradient: grad mode is off"
    else:
        words += ", no tensor requires grad"
    with views.context():
        arrays, keywords = views.call(arrays, keywords)
        return fn(*arrays, **keywords), words
