"""What a variant is: a card with its equation, its arrays, its cell of the family, and its change of variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from .cores.kinds import PARTS, Decay, Erase, NormalisedState, Readout, Row, SolvedState
from .cores.matrix_state.inputs import Inputs
from .ground.namespace import Array

Draw = Callable[["np.random.Generator", tuple[int, ...]], np.ndarray]


def _unit(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    x = rng.standard_normal(shape)
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-300)


def _spread(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Channels far apart in every row: its variance is away from 0, where a norm bends too much for differences."""
    apart = np.broadcast_to(np.linspace(-1.5, 1.5, shape[-1]), shape)
    return rng.permuted(apart, axis=-1) + 0.3 * rng.standard_normal(shape)


DRAWS: dict[str, Draw] = {  # how a test, a bench or a check draws an array
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "unit": _unit,
    "spread": _spread,
    "half unit": lambda rng, shape: 0.5 * _unit(rng, shape),
    "log decay": lambda rng, shape: -rng.uniform(0.0, 0.7, shape),
    "strength": lambda rng, shape: rng.uniform(0.0, 2.0, shape),
    "positive": lambda rng, shape: rng.uniform(0.05, 1.0, shape),
    "ridge": lambda rng, shape: rng.uniform(0.5, 1.5, shape),
    "share": lambda rng, shape: rng.uniform(0.0, 0.6, shape),
    "logit": lambda rng, shape: rng.standard_normal(shape),
    "angle": lambda rng, shape: rng.uniform(0.0, 1.5, shape),
    "negative": lambda rng, shape: -rng.uniform(0.1, 1.0, shape),
}


@dataclass(frozen=True)
class Given:
    """One array of a variant: its shape spec, how it is drawn at random, what it is.

    turns: the array to which it gives another meaning, if it does (A_log makes of a log decay a raw projection).
    """

    spec: str
    draw: str
    words: str
    optional: bool = False
    turns: str | None = None


def same_names(*names: str) -> dict[str, Any]:
    """The change of variables of a variant whose arrays are the core's own: keywords for its Card."""

    def to_core(c: Any) -> Inputs:
        return Inputs(**{name: getattr(c, name) for name in names})

    def to_core_vjp(c: Any, d: Inputs) -> dict[str, Array]:
        return {name: getattr(d, name) for name in names}

    return {"to_core": to_core, "to_core_vjp": to_core_vjp}


def normalised(options: Mapping[str, Any]) -> Any:
    """The state of a variant that takes `normalize`: a NormalisedState with it, else one array."""
    return NormalisedState if options.get("normalize") else None


@dataclass(frozen=True)
class Card:
    """A variant: three choices and a change of variables with its transpose.

    to_core(c) gives the core's Inputs from the call c (c.q, c.k, ... in the public layout, c.xp, c.dtype, c.options);
    to_core_vjp(c, d) gives the gradients of the variant's arrays by name from the gradients d of those Inputs.
    from_core(c, out), where a variant finishes the core's output, has from_core_vjp(c, out, dout) -> (dout of the
    core, gradients by name), dout in the caller's dtype; what it names there that is no array of the variant's,
    to_core_vjp finds in its c. state(options) is the named tuple that a state is, None for
    one array. pack_state(c, state) makes it the core's, unpack_state(c, S) a public one again; where they are not
    linear, unpack_state_vjp(c, S, dstate) -> (dS of the core, gradients by name, "state" being what comes by another
    way) and pack_state_vjp(c, dS, other) -> gradient of the public state. again(...) is what alike.py remembers of a
    call whose variables are not the core's: (given, state) -> (out, public state), or None; or None for nothing.
    """

    name: str
    sentence: str
    equation: str
    paper: str
    arrays: Mapping[str, Given]
    to_core: Callable[[Any], Any]  # the inputs of its room, Inputs in most
    to_core_vjp: Callable[[Any, Any], dict[str, Array]]
    decay: Decay = Decay.NONE
    erase: Erase = Erase.NONE
    readout: Readout = Readout.LINEAR
    query_row: Row = Row.AFTER
    erase_row: Row = Row.DECAYED
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
    again: Callable[..., Any] | None = None  # (c, inputs, plan, kept, given, state): such a call for other numbers
    micro_steps: bool = False  # some arrays have an axis n after T: steps of a token, which are tokens to the core
    plain: Callable[[Mapping[str, Any]], bool] | None = None  # whether with such options pack_state only checks a state
    wide: bool = False  # its state may have a shape of its own, other than (H, K, V)
    examples: tuple[Mapping[str, Any], ...] = ({},)  # option sets that a property test should go through

    def specs(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Shape specs of a call: where all queries see all keys they may have their own length."""
        specs = {name: given.spec for name, given in self.arrays.items()}
        if options.get("causal") is False and options.get("cu_seqlens") is None:
            specs[self.query] = specs[self.query].replace("T ", "Tq ", 1)
        return specs

    def sample(
        self,
        rng: np.random.Generator,
        B: tuple[int, ...] = (2,),
        T: int = 12,
        H: int = 2,
        K: int = 5,
        V: int = 3,
        Hq: int | None = None,
        Hk: int | None = None,
        optional: bool = True,
    ) -> dict[str, np.ndarray]:
        """Random float64 arrays of a call, drawn as the variant is meant to be used; none that turns another."""
        sizes = {"T": T, "Tq": T, "H": H, "Hq": Hq or H, "Hk": Hk or H, "K": K, "V": V, "n": 2, "P": K // 2, "M": 4}
        drawn = {}
        for name, given in self.arrays.items():
            letters = given.spec.split("|")[0].split()
            shape = (B if letters[0] == "T" else ()) + tuple(sizes[letter] for letter in letters)
            if not given.turns and (optional or not given.optional):
                drawn[name] = DRAWS[given.draw](rng, shape)
        return drawn

    def sample_state(
        self, rng: np.random.Generator, lead: tuple[int, ...], H: int, K: int, V: int, options: Mapping[str, Any]
    ) -> Any:
        """A random float64 state (*lead, H, ...) of a call with these options."""
        S = rng.standard_normal((*lead, H, K, V))
        kind = self.state({**self.options, **options})
        if kind is None:
            return S
        if kind is SolvedState:  # keys were written: positive semidefinite
            keys = rng.standard_normal((*lead, H, K + 2, K))
            return kind(S, np.swapaxes(keys, -1, -2) @ keys / (K + 2))
        sizes = {"H": H, "K": K, "V": V}
        rest = [rng.uniform(0.5, 2.0, (*lead, *(sizes[n] for n in PARTS[p].split()))) for p in kind._fields[1:]]
        return kind(S, *rest)


class Variables(SimpleNamespace):
    """A call as a change of variables sees it: its arrays by name, xp, dtype, sizes, options."""

    def knowing(self, more: Mapping[str, Any]) -> Variables:
        """The same with more names."""
        return Variables(**vars(self), **more) if more else self
