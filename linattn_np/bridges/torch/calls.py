"""The bridge of `call/foreign.py`: calls on tensors, by NumPy on the host and by CuPy on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...call import dispatch, vjp
from ...call.foreign import check_cotangents
from ...spec import VariantSpec
from .arguments import Arrays, Keywords, Views, given
from .autograd import Rule, differentiated


def run(spec: VariantSpec, arrays: Arrays, keywords: Keywords) -> Any:
    """The result of a public function, differentiable if a tensor requires grad and grad mode is on."""
    if (found := given(spec.name, arrays, keywords)) is None:
        return NotImplemented
    names = tuple(spec.arrays)
    if found.differentiable and len(arrays) <= len(names) and keywords.keys().isdisjoint(names[: len(arrays)]):
        def rule(arrays: Arrays, keywords: Keywords) -> Any:
            return vjp.run_vjp(spec, arrays, keywords)

        bound = dict(zip(names, arrays, strict=False)) | dict(keywords)
        return differentiated(spec.name, rule, (*names, "state"), bound)
    views = Views(found.device)
    with views.context():
        return views.leave(dispatch.run(spec, *views.call(arrays, keywords)))


def run_vjp(name: str, rule: Rule, arrays: Arrays, keywords: Keywords) -> Any:
    """(result, pullback) of rule(arrays, keywords) in tensors, which autograd does not follow."""
    if (found := given(name, arrays, keywords)) is None:
        return NotImplemented
    views = Views(found.device)
    with views.context():
        result, pullback = rule(*views.call(arrays, keywords))
        result = views.leave(result)

    def of_tensors(*cotangents: Any, **named: Any) -> Any:
        """Gradients by input name, of every tensor that was given and of the state."""
        check_cotangents(name, found.first, dict(zip(("dout", "dstate", "dstates"), cotangents, strict=False)) | named)
        with views.context():
            d, more = views.call(cotangents, named)
            return views.leave(pullback(*d, **more))

    return result, of_tensors


def apply(name: str, fn: Callable[..., Any], rule: Rule | None, names: Arrays, keywords: Keywords) -> Any:
    """fn(**keywords), differentiable by `rule` if there is one; names: of the arguments that have a gradient.

    Raises TypeError without a rule if autograd is to follow the call.
    """
    if (found := given(name, (), keywords)) is None:
        return NotImplemented
    if found.differentiable and rule is not None:
        return differentiated(name, rule, names, keywords)
    if found.differentiable:
        raise TypeError(f"{name}: a tensor requires grad, expected tensors that do not (x.detach()): there is no "
                        "gradient")
    views = Views(found.device)
    with views.context():
        return views.leave(fn(**views.call((), keywords)[1]))


def explain(name: str, fn: Callable[..., Any], arrays: Arrays, keywords: Keywords) -> Any:
    """fn(*arrays, **keywords) on the views: (an explanation, how the tensors are seen and who differentiates)."""
    if (found := given(name, arrays, keywords)) is None:
        return NotImplemented
    views = Views(found.device)
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
