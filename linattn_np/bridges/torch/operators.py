"""Operators `torch.ops.linattn_np.NAME` and `NAME_backward` of every variant, from the specs.

A traced call consists of them: torch.compile and torch.export put one node into their graphs, which runs the
call on the tensors' views. Every array is an argument, then come

    state       the arrays of the initial state, or none
    cu_seqlens  state_rows and fresh: tensors; a list of offsets is an option
    options     all others, as JSON

and the result is a list: out if there are queries, the arrays of the final state with return_state, the arrays of the
states at positions. NAME_backward recomputes the forward. A traced call that autograd follows is NAME_saving, with one
tensor more for NAME_saved_backward (saving.py).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch

from ... import catalog
from ...call.binding import bind
from ...call.foreign import bridges, leaves
from ...call.results import Result, StatesResult
from ...call.vjp import run_vjp
from ...runtime.arrays import name_of
from ...spec import VariantSpec
from . import saving, shapes_of
from .autograd import SECOND, likes, once
from .autograd import cotangents as cotangents_of
from .views import Tensor

NAMESPACE = "linattn_np"
TENSORS = ("cu_seqlens", "state_rows", "fresh")  # options that are tensors


@functools.cache
def library() -> torch.library.Library:
    """The operators, defined by the first call."""
    own = torch.library.Library(NAMESPACE, "DEF")
    for spec in catalog.variants():
        define(own, spec.spec)
    return own


def define(own: torch.library.Library, spec: VariantSpec) -> None:
    """The operator of a variant and its backward."""
    name, backward = spec.name, f"{spec.name}_backward"
    given = ", ".join([*(f"Tensor? {n}" for n in spec.arrays), "Tensor[] state", *(f"Tensor? {n}" for n in TENSORS)])
    own.define(f"{name}({given}, str options) -> Tensor[]")
    own.define(f"{backward}({given}, str options, Tensor?[] cotangents) -> Tensor[]")
    saving, saved = f"{spec.name}_saving", f"{spec.name}_saved_backward"
    own.define(f"{saving}({given}, str options) -> Tensor[]")
    own.define(f"{saved}({given}, str options, Tensor residuals, Tensor?[] cotangents) -> Tensor[]")
    for one, function, fake in (
        (name, _forward, _fake),
        (backward, _backward, _fake_backward),
        (saving, _saving, _fake_saving),
        (saved, _saved_backward, _fake_saved_backward),
    ):
        for device in ("CPU", "CUDA"):
            own.impl(one, functools.partial(function, spec), device)
        torch.library.register_fake(f"{NAMESPACE}::{one}", functools.partial(fake, spec), lib=own)
    for one, rule, keep in ((name, _gradients, _keep), (saving, _saved_gradients, _keep_saved)):
        torch.library.register_autograd(
            f"{NAMESPACE}::{one}", functools.partial(rule, spec), setup_context=keep, lib=own
        )
    for one in (backward, saved):
        torch.library.register_autograd(f"{NAMESPACE}::{one}", functools.partial(_no_second, spec), lib=own)


def defined() -> bool:
    """Define the operators; always true."""
    return library() is not None


# a call


def traced(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The result of a public function by its operator."""
    bound, names = dict(zip(spec.arrays, arrays, strict=False)), {*spec.rules}
    bound.update(keywords)
    plain = {
        n: known(x)
        for n, x in bound.items()
        if n != "state" and not isinstance(x, Tensor) and x is not None and (n not in spec.arrays or n in names)
    }
    options = encoded(spec.name, tuple(plain.items()))
    given = [x if isinstance(x := bound.get(n), Tensor) else None for n in spec.arrays]
    state = [S for S in leaves(bound.get("state")) if S is not None]
    each = [x if isinstance(x := bound.get(n), Tensor) else None for n in TENSORS]
    saves = all(x is None for x in each) and spec.change.query not in plain and is_differentiated(*given, *state)
    found = getattr(getattr(torch.ops, NAMESPACE), f"{spec.name}_saving" if saves else spec.name)(
        *given, state, *each, options
    )
    return structured(spec, plain, found, bound)


def is_differentiated(*given: Tensor | None) -> bool:
    """Whether autograd follows a traced call; not in an exported program, which is there for its results."""
    if torch.compiler.is_exporting() or not torch.is_grad_enabled():
        return False
    return any(x is not None and x.requires_grad for x in given)


def structured(spec: VariantSpec, options: Mapping[str, Any], found: list[Tensor], bound: Mapping[str, Any]) -> Any:
    """The public result from the list of an operator."""
    kind = spec.state.type_of({**spec.options, **options})
    count, query = 1 if kind is None else len(kind._fields), spec.change.query
    left = list(found)
    out = left.pop(0) if query is None or bound.get(query) is not None else None

    def state() -> Any:
        parts = [left.pop(0) for _ in range(count)]
        return parts[0] if kind is None else kind(*parts)

    end = state() if options.get("return_state") or (out is None and options.get("return_states_at") is None) else None
    if options.get("return_states_at") is not None:
        return StatesResult(out, end, state())
    return out if end is None else Result(out, end)


def known(x: Any) -> Any:
    """An option: of a float that torch.compile takes for a variable its value."""
    return float.fromhex(x.hex()) if isinstance(x, float) else x


def encoded(fn: str, options: tuple[tuple[str, Any], ...]) -> str:
    """Options as JSON.   Raises TypeError for any value but plain ones and tuples and lists of them."""

    def refused(x: Any) -> Any:
        name = next((n for n, y in options if x is y or x in leaves(y)), "an option")
        raise TypeError(f"{fn}: {name} has a {type(x).__name__}, expected numbers and words in a traced call")

    if dict(options).get("overwrite_state"):
        raise TypeError(f"{fn}: overwrite_state=True in a traced call, expected False: return the state instead")
    return json.dumps(dict(options), default=refused, sort_keys=True)


# as torch.compiler.assume_constant_result does, without importing the compiler
for function in (defined, encoded, name_of):
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010


@functools.lru_cache(maxsize=256)
def decoded(options: str) -> dict[str, Any]:
    """Options from JSON; lists are tuples."""

    def plain(x: Any) -> Any:
        return tuple(map(plain, x)) if isinstance(x, list) else x

    return {n: plain(x) for n, x in json.loads(options).items()}


def keywords_of(spec: VariantSpec, given: tuple[Any, ...]) -> dict[str, Any]:
    """The keywords of a call from the arguments of its operator."""
    (*arrays, state), each, options = given[: -len(TENSORS) - 1], given[-len(TENSORS) - 1 : -1], given[-1]
    found = {n: x for n, x in zip(spec.arrays, arrays, strict=True) if x is not None} | decoded(options)
    found |= {n: x for n, x in zip(TENSORS, each, strict=True) if x is not None}
    if spec.change.query is not None:
        found.setdefault(spec.change.query, None)
    if state:
        kind = spec.state.type_of({**spec.options, **found})
        found["state"] = state[0] if kind is None else kind(*state)
    return found


# the operators


def _listed(result: Any) -> list[Tensor]:
    """The tensors of a result, or of its list, with the strides of their shapes, as the fake tensors have."""
    return [x.contiguous() for x in leaves(tuple(result) if isinstance(result, list) else result) if x is not None]


def _forward(spec: VariantSpec, *given: Any) -> list[Tensor]:
    bridge = bridges[Tensor]  # calls.py, which imports this module
    with torch.no_grad():
        return _listed(bridge.computed(spec, (), keywords_of(spec, given)))


def _backward(spec: VariantSpec, *given: Any) -> list[Tensor]:
    *given_first, cotangents = given
    keywords = keywords_of(spec, tuple(given_first))
    with torch.no_grad():
        result, pullback = run_vjp(spec, (), keywords)
        grads = pullback(*cotangents_of(likes(result), cotangents, keywords[spec.change.value].device))
    return _listed(tuple(getattr(grads, n) for n in (*spec.arrays, "state")))


def _saving(spec: VariantSpec, *given: Any) -> list[Tensor]:
    keywords = keywords_of(spec, given)
    with torch.no_grad():
        if (found := saving.computed(spec, keywords)) is not None:
            return [*_listed(found[0]), found[1]]
        return [*_forward(spec, *given), keywords[spec.change.value].new_zeros(1, dtype=torch.uint8)]


def _saved_backward(spec: VariantSpec, *given: Any) -> list[Tensor]:
    *first, residuals, cotangents = given
    keywords = keywords_of(spec, tuple(first))
    with torch.no_grad():
        found = saving.gradients(spec, keywords, residuals, cotangents)
    return _backward(spec, *first, cotangents) if found is None else _listed(found)


def _fake(spec: VariantSpec, *given: Any) -> list[Tensor]:
    keywords = keywords_of(spec, given)
    bind(spec, (), keywords)  # raises for missing arrays and unknown options
    return shapes_of.results(spec, keywords)


def _fake_backward(spec: VariantSpec, *given: Any) -> list[Tensor]:
    *arrays, state = given[: -len(TENSORS) - 2]
    return [x.new_empty(x.shape) for x in (*arrays, *state) if x is not None]


def _fake_saving(spec: VariantSpec, *given: Any) -> list[Tensor]:
    found = _fake(spec, *given)
    return [*found, found[0].new_empty(1, dtype=torch.uint8)]


def _fake_saved_backward(spec: VariantSpec, *given: Any) -> list[Tensor]:
    return _fake_backward(spec, *given[:-2], given[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    (*arrays, state), each, options = inputs[: -len(TENSORS) - 1], inputs[-len(TENSORS) - 1 : -1], inputs[-1]
    tensors = [x for x in (*arrays, *state, *each) if x is not None]
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    ctx.places = [x is not None for x in arrays], len(state), [x is not None for x in each], options


def _keep_saved(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    (*arrays, state), options = inputs[: -len(TENSORS) - 1], inputs[-1]
    ctx.save_for_backward(*(x for x in (*arrays, *state) if x is not None), output[-1])
    ctx.set_materialize_grads(False)
    ctx.places = [x is not None for x in arrays], len(state), [False] * len(TENSORS), options


def _gradients(spec: VariantSpec, ctx: Any, cotangents: Any) -> tuple[Any, ...]:
    return _by_place(spec, ctx, "backward", list(ctx.saved_tensors), (), cotangents)


def _saved_gradients(spec: VariantSpec, ctx: Any, cotangents: Any) -> tuple[Any, ...]:
    *saved, residuals = ctx.saved_tensors
    return _by_place(spec, ctx, "saved_backward", saved, (residuals,), cotangents[:-1])


def _by_place(spec: VariantSpec, ctx: Any, which: str, saved: list[Tensor], residuals: Any, cotangents: Any) -> Any:
    """The gradients of a backward operator for each input of the forward's."""
    given, count, others, options = ctx.places
    left = iter(saved)
    arrays = [next(left) if there else None for there in given]
    state = [next(left) for _ in range(count)]
    each = [next(left) if there else None for there in others]
    backward = getattr(getattr(torch.ops, NAMESPACE), f"{spec.name}_{which}")
    found = backward(*arrays, state, *each, options, *residuals, list(cotangents))
    grads = list(once(spec.name, found, (*saved, *cotangents)))  # autograd does not see tensors in a list with None
    of_arrays = [grads.pop(0) if there else None for there in given]
    return *of_arrays, grads[:count], *[None] * len(TENSORS), None


def _no_second(spec: VariantSpec, ctx: Any, cotangents: Any) -> Any:
    raise RuntimeError(SECOND.format(spec.name))
