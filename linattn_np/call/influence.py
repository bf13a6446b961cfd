"""The influence matrix: the weight of every token's value in every output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

from ..runtime import shapes
from ..runtime.arrays import device
from .binding import prepare, spec_of
from .foreign import bridge_of


def influence_matrix(fn: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """The matrix A with out = A v of a variant that is linear in its values: (..., H, T, T), no initial state.

    Where a token has n micro-steps, with a value each, A is (..., H, T, T n), the steps of a token side by side.

    A_ij is how much of token j's value reaches token i. Where something acts on the value channels one by one (gv;
    z, or D (H, V), of mamba2) there is one matrix a channel: (..., H, V, T, T). The values given fix batch, T, H, V
    and the dtype; their numbers do not matter. Memory grows with T^2. Raises TypeError for a variant that is not linear
    in its values, and as the variant does for shapes, dtypes and options that do not fit.
    """
    spec = spec_of("influence_matrix", fn)
    query, value = spec.change.query, spec.change.value
    if not spec.change.linear:
        raise TypeError(f"influence_matrix: {spec.name} is not linear in {value}, expected a variant that is")
    for name in ("state", "return_state", "overwrite_state", "return_states_at", "return_lse"):
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"influence_matrix: {name} is given, expected none: A is of a call that starts from zero")
    if (bridge := bridge_of(arrays, options)) is not None:
        bound = {**dict(zip(spec.arrays, arrays, strict=False)), **options}
        found = bridge.apply("influence_matrix", functools.partial(influence_matrix, fn), None, (), bound)
        if found is not NotImplemented:
            return found
    call = prepare(spec, arrays, options)
    xp, axes = call.xp, call.axes
    if query is not None and getattr(call, query) is None:
        raise TypeError(f"influence_matrix: {query} is None, expected an array: A is what the queries read")
    given = {n: getattr(call, n) for n in spec.arrays if getattr(call, n) is not None}
    given |= {n: call.options[option] for n, (option, _) in spec.rules.items() if n not in given}
    v = given[value]
    batch, (*steps, V) = v.shape[: len(call.batch)], v.shape[len(call.batch) :]
    heads = [steps.pop()] if shapes.head_axis(axes[value]) else []
    count = prod(steps)
    one_hot = xp.reshape(xp.eye(count, dtype=v.dtype, device=device(v)), (*steps, *(1 for _ in heads), count))
    same_options = {*spec.options, "scale", "cu_seqlens", "chunk_size", "reverse"}
    same = {n: x for n, x in call.options.items() if n in same_options}
    letter = axes[value].split()[-1]
    own = {n: _value_axis(given[n], axes[n], letter, len(batch)) for n in given if n != value}
    by_channel = {n: axis for n, axis in own.items() if axis is not None}

    def matrix(channel: int) -> Any:
        changed = {value: xp.broadcast_to(one_hot, (*batch, *steps, *heads, count))}
        for n in by_channel:
            x, axis = given[n], by_channel[n]
            one = x[(slice(None),) * axis + (slice(channel, channel + 1), ...)]
            changed[n] = xp.broadcast_to(one, (*x.shape[:axis], count, *x.shape[axis + 1 :]))
        out = fn(**{**given, **changed}, **same, backend=call.options["backend"])  # (..., i, H, j)
        return xp.moveaxis(out, -2, -3) if heads else out

    A = xp.stack([matrix(e) for e in range(V)], axis=-3) if by_channel else matrix(0)
    return call.library.give_back(A)


def _value_axis(x: Any, axes: str, letter: str, batch: int) -> int | None:
    """The axis of an array with the letter of the value channels, if it has one; a name of a rule has none.

    batch: the number of batch axes.
    """
    for choice in axes.split("|") if hasattr(x, "ndim") else ():
        letters, lead = choice.split(), batch * shapes.has_time(choice)
        if x.ndim == len(letters) + lead and letter in letters:
            return lead + letters.index(letter)
    return None
