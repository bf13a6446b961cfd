"""Shapes and dtypes of the results of a call, from its arrays' shapes, for fake tensors.

Sizes other than batch, tokens and sequences come from a NumPy call on one token of ones: a
feature map or a variant may change them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ... import catalog
from ...call import dispatch
from ...call.binding import axes_of, bind, normalise
from ...call.foreign import leaves
from ...call.layouts import LAYOUTS, ONE_TOKEN
from ...core import CallPlan
from ...runtime import shapes
from ...spec import VariantSpec
from .views import Tensor, bfloat16

OF_TOKENS = ("state", "cu_seqlens", "state_rows", "fresh", "return_states_at")  # that a call on one token is without
One = tuple[str, tuple[int, ...], str]  # an array of one token: name, shape, dtype


def results(spec: VariantSpec, keywords: Mapping[str, Any]) -> list[Tensor]:
    """Empty tensors like the results of a call, in the order of its operator."""
    bound, options = bind(spec, (), keywords)
    layout = options["layout"]
    axes = axes_of(spec, options)
    if layout != "time_first":
        axes = {n: LAYOUTS[layout].axes(a) for n, a in axes.items()}
    value, query = bound[spec.change.value], bound.get(spec.change.query or "")
    rank = value.ndim - len(axes[spec.change.value].split("|")[0].split())
    batch = tuple(value.shape[:rank])
    ones, times = [], {}
    for name, x in bound.items():
        if x is None or isinstance(x, str):
            continue
        own = _one(axes[name], x, batch)
        ones.append((name, own[0], str(x.dtype).removeprefix("torch.")))
        times[name] = own[1]
    plain = {n: x for n, x in keywords.items() if isinstance(x, str) or n not in (*spec.arrays, *OF_TOKENS)}
    out, *parts = _of_one_token(spec.name, tuple(ones), tuple(sorted(plain.items())), query is None)
    found = []
    if out is not None:
        whose = query if query is not None else value
        T = times[str(spec.change.query) if query is not None else spec.change.value]
        shape = _with_time(out[0], T, layout)
        found.append(whose.new_empty((*batch, *shape), dtype=_dtype(out[1])))
    offsets = options["cu_seqlens"]
    lead = batch if offsets is None else (len(offsets) - 1 if isinstance(offsets, tuple) else offsets.shape[0] - 1,)
    if spec.grows and (options["return_state"] or out is None or options["return_states_at"] is not None):
        parts = _after(spec, options, times[spec.change.value], parts)
    if options["return_state"] or (out is None and options["return_states_at"] is None):
        found += [value.new_empty((*lead, *shape), dtype=_dtype(dtype)) for shape, dtype in parts]
    if options["return_states_at"] is not None:
        T = int(times[spec.change.value])
        n = len(shapes.check_positions(spec.name, options["return_states_at"], T))
        lead = (*batch, n) if offsets is None else (n,)
        found += [value.new_empty((*lead, *shape), dtype=_dtype(dtype)) for shape, dtype in parts]
    return found


def _after(spec: VariantSpec, options: dict[str, Any], T: Any, parts: list[Any]) -> list[Any]:
    """Shapes and dtypes of the parts of a state that grows with its T tokens.   Raises ValueError if none follows."""
    offsets, state = options["cu_seqlens"], normalise(spec, "state", options["state"], options)
    if not isinstance(offsets, tuple | None):
        raise ValueError(
            f"{spec.name}: cu_seqlens is a tensor in a traced call that returns a state, expected a tuple "
            "of offsets: the state has a slot for each token of the longest sequence"
        )
    own = CallPlan(None, None, 1.0, sequences=tuple(shapes.sequences(T, offsets)))  # type: ignore[arg-type]
    plan, names = spec.core.plan(own._asdict(), spec, options, {}), spec.state.parts._fields  # type: ignore
    return [(spec.core.end_shape(plan, state, name, shape), dtype)
            for name, (shape, dtype) in zip(names, parts, strict=True)]  # fmt: skip


def _one(axes: str, x: Tensor, batch: tuple[Any, ...]) -> tuple[tuple[int, ...], Any]:
    """(the shape of an array of one token without batch axes, its number of tokens)."""
    for letters in (choice.split() for choice in axes.split("|")):
        tokens = letters[0] in ("T", "Tq") or "T" in letters or "Tq" in letters
        if x.ndim == len(letters) + (len(batch) if tokens else 0):
            shape = list(x.shape[x.ndim - len(letters) :])
            T = None
            for n, letter in enumerate(letters):
                if letter in ("T", "Tq", "S"):
                    T, shape[n] = T or shape[n], 1
            return tuple(map(int, shape)), T
    raise ValueError(f"an array has shape {tuple(x.shape)}, expected (..., {axes.replace(' ', ', ')})")


def _with_time(shape: tuple[int, ...], T: Any, layout: str) -> tuple[Any, ...]:
    if layout == ONE_TOKEN:
        return shape
    return (shape[0], T, *shape[2:]) if layout == "heads_first" else (T, *shape[1:])


@functools.lru_cache(maxsize=256)
def _of_one_token(name: str, ones: tuple[One, ...], options: tuple[Any, ...], writes: bool) -> list[Any]:
    """(shape, dtype) of out, or None, and of the parts of the state."""
    fn = getattr(catalog, name)
    arrays: dict[str, Any] = {n: np.ones(shape, bfloat16() if dtype == "bfloat16" else dtype)
                              for n, shape, dtype in ones}  # fmt: skip
    if writes and fn.spec.change.query is not None:
        arrays[fn.spec.change.query] = None
    with np.errstate(all="ignore"):
        given = arrays | dict(options) | {"return_state": True, "backend": "reference"}
        out, state = dispatch.run(fn.spec, (), given)
    return [None if x is None else (x.shape, x.dtype.name) for x in (out, *leaves(state))]


def _dtype(name: str) -> Any:
    return getattr(torch, name)
