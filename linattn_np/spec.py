"""The specification of a variant: equation, arrays, decay, erase, read-out, and change of variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from .matrix_state.types import Decay, Erase, Inputs, NormalisedState, Readout, ReadState
from .runtime.arrays import Array


@dataclass(frozen=True)
class ArgSpec:
    """One array of a variant: its axes, the distribution for random samples, a description.

    reinterprets: the array whose meaning it changes, if any (with A_log, g is a raw projection, not a log decay).
    """

    axes: str
    draw: str
    words: str
    optional: bool = False
    reinterprets: str | None = None


def same_names(*names: str) -> dict[str, Any]:
    """The identity change of variables, for arrays with the core's names: keywords for a VariantSpec."""

    def to_core(c: Any) -> Inputs:
        return Inputs(**{name: getattr(c, name) for name in names})

    def to_core_vjp(c: Any, d: Inputs) -> dict[str, Array]:
        return {name: getattr(d, name) for name in names}

    return {"to_core": to_core, "to_core_vjp": to_core_vjp}


def normalised(options: Mapping[str, Any]) -> Any:
    """The state type of a variant with the option `normalize`: a NormalisedState with it, else one array."""
    return NormalisedState if options.get("normalize") else None


@dataclass(frozen=True)
class VariantSpec:
    """A variant: decay, erase, read-out, and a change of variables with its transpose.

    to_core(c) returns the core's Inputs for the call c (c.q, c.k, ... in the public layout, c.xp, c.dtype, c.options);
    to_core_vjp(c, d) returns the gradients of the variant's arrays by name from the gradients d of those Inputs.
    from_core(c, out), if the variant transforms the core's output, comes with from_core_vjp(c, out, dout) -> (dout of
    the core, gradients by name), dout in the caller's dtype; names that are not arrays of the variant are passed to
    to_core_vjp as attributes of its c. state(options) is the named tuple type of a state, None for one array.
    pack_state(c, state) converts it to the core's state, unpack_state(c, S) back. If they are not linear, the variant
    has unpack_state_vjp(c, S, dstate) -> (dS of the core, gradients by name, "state" for a direct dependence on the
    initial state) and pack_state_vjp(c, dS, other) -> gradient of the public state. record(...) returns the plan that
    call/replay.py records if the variables are not the core's, (arrays, state) -> (out, public state) or None; or None.
    """

    name: str
    sentence: str
    equation: str
    paper: str
    arrays: Mapping[str, ArgSpec]
    to_core: Callable[[Any], Any]  # returns the core's inputs: Inputs in most variants
    to_core_vjp: Callable[[Any, Any], dict[str, Array]]
    decay: Decay = Decay.NONE
    erase: Erase = Erase.NONE
    readout: Readout = Readout.LINEAR
    query_reads: ReadState = ReadState.UPDATED
    erase_reads: ReadState = ReadState.DECAYED
    scaled: bool = True  # scale=None means K**-0.5, else 1
    gate: str | None = None  # the array without which the log decays are constants that need no gradient
    query: str = "q"
    key: str = "k"
    value: str = "v"
    options: Mapping[str, Any] = field(default_factory=dict)  # the variant's own, with defaults
    named: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # array that may be a name -> (option, default)
    check_options: Callable[[str, dict[str, Any]], None] | None = None
    from_core: Callable[[Any, Array], Array] | None = None
    from_core_vjp: Callable[[Any, Array, Array], tuple[Array, dict[str, Array]]] | None = None
    pack_state: Callable[[Any, Any], Array] | None = None  # public state -> (..., H, K, V) of the core
    unpack_state: Callable[[Any, Array], Any] | None = None
    unpack_state_vjp: Callable[[Any, Array, Any], tuple[Array, dict[str, Any]]] | None = None
    pack_state_vjp: Callable[[Any, Array, Any], Any] | None = None
    state: Callable[[Mapping[str, Any]], Any] = normalised
    record: Callable[..., Any] | None = None  # (c, inputs, plan, residuals, given, state) -> recorded plan
    micro_steps: bool = False  # some arrays have an axis n after T: micro-steps, which the core treats as tokens
    plain: Callable[[Mapping[str, Any]], bool] | None = None  # whether pack_state only checks the state
    wide: bool = False  # the state may have a shape other than (H, K, V)
    examples: tuple[Mapping[str, Any], ...] = ({},)  # option sets for property tests

    @functools.cached_property
    def is_recorded(self) -> bool:
        """Whether calls on NumPy arrays can be replayed: their variables are the core's, or there is a `record`."""
        return self.record is not None or (self.pack_state is None and self.from_core is None)


class Variables(SimpleNamespace):
    """The argument c of a change of variables: arrays by name, xp, dtype, sizes, options."""

    def extended(self, more: Mapping[str, Any]) -> Variables:
        """A copy with more attributes."""
        return Variables(**vars(self), **more) if more else self
