"""The bridge of `call/foreign.py`: calls on tensors, by NumPy on the host and by CuPy on a device.

A traced call is an operator (operators.py); any other a recorded plan, or computed on views, followed by autograd if a
tensor requires grad and grad mode is on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch

from ...call import dispatch, vjp
from ...call.foreign import Rule, check_cotangents, leaves
from ...call.options import PLAIN as PLAIN_OPTIONS
from ...call.results import Result, StatesResult
from ...nn.declaration import Piece
from ...spec import VariantSpec
from . import operators, views
from . import pieces_of_layers as layers
from .autograd import differentiated
from .views import PLAIN, Arrays, Keywords, Tensor, as_tensors, as_views, context, given, on_views, tensor, view

COTANGENTS = "dout", "dstate", "dstates"


def run(spec: VariantSpec, arrays: Arrays, keywords: Keywords) -> Any:
    """The result of a public function: computed, or, in a traced call, by its operator."""
    if torch.compiler.is_compiling():
        operators.defined()
        return operators.traced(spec, arrays, keywords)
    result, signature = fast(spec, arrays, keywords)
    if result is None and is_traced(spec.name, arrays, keywords):
        operators.defined()
        return operators.traced(spec, arrays, keywords)
    return eager(spec, arrays, keywords, signature) if result is None else result


def is_traced(name: str, arrays: Arrays, keywords: Keywords) -> bool:
    """Whether the tensors are stand-ins, or a mode or transform follows operations on them.

    Raises TypeError for a nested tensor.
    """
    if views.modes() or views.tracing() is not None:
        return True
    for key, x in views.by_name(arrays, keywords):
        for y in leaves(x) if isinstance(x, tuple) else (x,):
            if isinstance(y, Tensor) and (type(y) not in PLAIN or y.is_meta):
                views.refuse_nested(name, key, y)
                return True
    return False


def computed(spec: VariantSpec, arrays: Arrays, keywords: Keywords) -> Any:
    """The result of a public function on tensors of a device or the host, also while others are traced."""
    result, signature = fast(spec, arrays, keywords)
    return eager(spec, arrays, keywords, signature) if result is None else result


def fast(spec: VariantSpec, arrays: Arrays, keywords: Keywords) -> tuple[Any, Any]:
    """(the result by a recorded plan or on the host, None if there is neither; the signature on a device)."""
    signature = replays and replays.signature(spec, arrays, keywords)
    result = replays.replayed(signature, arrays, keywords) if signature else None
    return (_on_host(spec, arrays, keywords) if result is None else result), signature


def _on_host(spec: VariantSpec, arrays: Arrays, keywords: Keywords) -> Any:
    """The result of a call on plain CPU tensors that nothing differentiates or traces; None for all others.

    What `eager` does, for a step of decoding, with fewer questions.
    """
    if views.is_followed():
        return None
    grad, given, named = torch.is_grad_enabled(), [], {}
    try:
        for x in arrays:
            if type(x) in PLAIN:
                if grad and x.requires_grad:
                    return None
                x = view(x)
            elif x is not None:
                return None
            given.append(x)
        for n, x in keywords.items():
            if type(x) in PLAIN:
                if grad and x.requires_grad:
                    return None
                x = view(x)
            elif x is not None and type(x) not in PLAIN_OPTIONS:
                return None
            named[n] = x
    except (TypeError, RuntimeError):  # on a device, sparse, transformed
        return None
    result = dispatch.run(spec, tuple(given), named)
    if type(result) is not Result:
        return tensor(result) if type(result) is np.ndarray else as_tensors(result, {})
    out, state = result
    if type(state) is not np.ndarray:
        return as_tensors(result, {})
    state = keywords["state"] if state is named.get("state") else tensor(state)
    return Result(out if out is None else tensor(out), state)


def eager(spec: VariantSpec, arrays: Arrays, keywords: Keywords, signature: Any = None) -> Any:
    """The result of a public function, differentiable if a tensor requires grad and grad mode is on.

    signature: under which the plan of a call on a device is recorded.
    """
    if (found := given(spec.name, arrays, keywords)) is None:
        return NotImplemented
    names = tuple(spec.arrays)
    if found.differentiable and len(arrays) <= len(names) and keywords.keys().isdisjoint(names[: len(arrays)]):
        bound = dict(zip(names, arrays, strict=False)) | dict(keywords)
        known = signature and replays.is_known(signature, replays.signature(spec, (), bound, follows=False))
        if known and (result := replays.replayed(signature, arrays, keywords)) is not None:
            return result
        rule = functools.partial(in_tensors, spec, functools.partial(vjp.run_vjp, spec), found.device)
        return differentiated(spec.name, rule, (*names, "state"), bound)
    with context(found.device):
        own_arrays, own, owners = as_views(arrays, keywords)
        result = dispatch.run(spec, own_arrays, own)
        if found.device.type == "cuda":
            loaded().record(signature, spec, (own_arrays, own))
        return as_tensors(result, owners)


replays: Any = None  # the module of that name, once there was a call on a device


def loaded() -> Any:
    """That module."""
    global replays
    if replays is None:
        replays = import_module(f"{__package__}.cuda.replays")
    return replays


# vjp


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


def check(name: str, found: views.Given, cotangents: Keywords) -> None:
    """Raise TypeError for a cotangent of another library or device."""
    if not all(d is None or (type(d) in PLAIN and d.device == found.device) for d in cotangents.values()):
        check_cotangents(name, found.first, cotangents)


def recorded_vjp(
    spec: VariantSpec | None, rule: Rule, arrays: Arrays, keywords: Keywords
) -> tuple[Any, Callable[..., Any]] | None:
    """(result, pullback) by the recorded plan of a call on a device; None without one."""
    signature = replays and spec and replays.signature(spec, arrays, keywords, follows=False)
    recorded = replays.forward(signature, arrays, keywords) if signature else None
    if recorded is None or spec is None:
        return None
    result, gradients = recorded

    def in_full(each: tuple[Any, ...]) -> Any:
        """The gradients for cotangents of another layout, with the forward."""
        if (found := given(spec.name, arrays, keywords)) is None:
            raise RuntimeError(f"{spec.name}: an input was changed before the pullback")
        check(spec.name, found, dict(zip(COTANGENTS, each, strict=False)))
        return on_views(rule, found.device, arrays, keywords)[1](*each)

    def of_states(dout: Any = None, dstate: Any = None, dstates: Any = None) -> Any:
        """Gradients by input name, of every tensor that was given and of the state."""
        each = dout, dstate, dstates
        return in_full(each) if (grads := gradients(each)) is None else grads

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of every tensor that was given and of the state."""
        each = dout, dstate
        return in_full(each) if (grads := gradients(each)) is None else grads

    return result, of_states if type(result) is StatesResult else pullback


def in_tensors(
    spec: VariantSpec | None, rule: Rule, device: torch.device, arrays: Arrays, keywords: Keywords
) -> tuple[Any, Callable[..., Any]]:
    """(result, pullback) of a rule, from and to plain tensors of one device; spec: of a variant, which is replayed."""
    if (recorded := recorded_vjp(spec, rule, arrays, keywords)) is not None:
        return recorded
    record = None
    if device.type == "cuda" and spec is not None:
        signature = replays and replays.signature(spec, arrays, keywords, follows=False)
        record = functools.partial(loaded().record_forward, signature, spec)
    return on_views(rule, device, arrays, keywords, record)


# other functions


def apply(name: str, fn: Callable[..., Any], rule: Rule | None, names: Arrays, keywords: Keywords) -> Any:
    """fn(**keywords), differentiable by `rule` if there is one; names: of the arguments that have a gradient.

    Raises TypeError without a rule if autograd is to follow the call.
    """
    if isinstance(fn, Piece) and not torch.compiler.is_compiling() and views.transforms() is not None:
        return NotImplemented  # array calls, which torch.func transforms
    if isinstance(fn, Piece) and (torch.compiler.is_compiling() or is_traced(name, (), keywords)):
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
    with context(found.device):
        _, own, owners = as_views((), keywords)
        return as_tensors(fn(**own), owners)


def explain(name: str, fn: Callable[..., Any], arrays: Arrays, keywords: Keywords) -> Any:
    """fn(*arrays, **keywords) on the views: (an explanation, how the tensors are seen and who differentiates)."""
    if (found := given(name, arrays, keywords)) is None:
        return NotImplemented
    words = ("NumPy" if found.device.type == "cpu" else "CuPy") + " views of torch tensors"
    if found.device.type != "cpu":
        words += ", on torch's current stream"
    if found.requires_grad:
        words += ", differentiable by torch.autograd" if found.differentiable else ", no gradient: grad mode is off"
    else:
        words += ", no tensor requires grad"
    with context(found.device):
        arrays, keywords, _ = as_views(arrays, keywords)
        return fn(*arrays, **keywords), words
