"""Random arrays and states in a variant's intended range, for tests, benchmarks and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .runtime.shapes import is_of_pairs
from .spec import VariantFunction

Draw = Callable[["np.random.Generator", tuple[int, ...]], np.ndarray]


def _unit(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    x = rng.standard_normal(shape)
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-300)


def _spaced(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of well separated channels: near variance 0 a norm is too curved for finite differences."""
    spaced = np.broadcast_to(np.linspace(-1.5, 1.5, shape[-1]), shape)
    return rng.permuted(spaced, axis=-1) + 0.3 * rng.standard_normal(shape)


DRAWS: dict[str, Draw] = {  # the distributions by name (Samples.distributions)
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "unit": _unit,
    "direction": _unit,  # of a map; the maps of tokens are multiplied
    "spread": _spaced,
    "half unit": lambda rng, shape: 0.5 * _unit(rng, shape),
    "log decay": lambda rng, shape: -rng.uniform(0.0, 0.7, shape),
    "strength": lambda rng, shape: rng.uniform(0.0, 2.0, shape),
    "positive": lambda rng, shape: rng.uniform(0.05, 1.0, shape),
    "ridge": lambda rng, shape: rng.uniform(0.5, 1.5, shape),
    "step": lambda rng, shape: rng.uniform(0.005, 0.02, shape),
    "share": lambda rng, shape: rng.uniform(0.0, 0.6, shape),
    "logit": lambda rng, shape: rng.standard_normal(shape),
    "factor": lambda rng, shape: -rng.uniform(0.0, 0.7, shape),  # or a log decay
    "block": lambda rng, shape: rng.uniform(-1.0, 1.0, shape) / shape[-1],  # rows of sums at most 1
    "angle": lambda rng, shape: rng.uniform(0.0, 1.5, shape),
    "negative": lambda rng, shape: -rng.uniform(0.1, 1.0, shape),
}

SIZES = {"T": 12, "H": 2, "K": 5, "V": 3, "n": 2, "R": 2, "M": 4, "levels": 12}


def sizes_by_letter(**sizes: int | None) -> dict[str, int]:
    """The size of every letter of axes; Hq and Hk default to H, Tq to T, D to V, N to K."""
    every = SIZES | {name: n for name, n in sizes.items() if n is not None}
    own = {"Tq": every["T"], "Hq": every["H"], "Hk": every["H"], "P": every["K"] // 2, "D": every["V"], "N": every["K"]}
    return own | every


def sample(
    fn: VariantFunction, rng: np.random.Generator, B: tuple[int, ...] = (2,), optional: bool = True, **sizes: int | None
) -> dict[str, np.ndarray]:
    """Random float64 arrays of a call by name, except arrays that reinterpret another one or have an entry per pair.

    sizes: T, H, K, V, Hq, Hk as in the axes of the arrays; Hq and Hk default to H.
    """
    letters, drawn = sizes_by_letter(**sizes), {}
    for name, arg in fn.spec.arrays.items():
        axes = arg.axes.split("|")[0].split()
        shape = (B if axes[0] == "T" else ()) + tuple(letters[letter] for letter in axes)
        if not arg.reinterprets and not is_of_pairs(" ".join(axes)) and (optional or not arg.optional):
            drawn[name] = draw_array(fn, name, rng, shape)
    return drawn


def draw_array(fn: VariantFunction, name: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A random float64 or complex128 array of a call."""
    x = DRAWS[fn.samples.distribution(name)](rng, shape)
    return x + 1j * rng.standard_normal(shape) if name in fn.samples.complex else x


def draw_state(
    fn: VariantFunction, rng: np.random.Generator, lead: tuple[int, ...], sizes: Mapping[str, int], options: Any
) -> Any:
    """A random float64 state (*lead, H, ...) of a call; sizes: H, K, V (K is 1 if no array has it)."""
    spec, sizes = fn.spec, {"D": sizes["V"], "N": sizes["K"], **sizes}
    if not any("K" in arg.axes.split() for arg in spec.arrays.values()):
        sizes["K"] = 1
    kind = spec.state.type_of({**spec.options, **options})
    axes = spec.state.axes or spec.core.STATE_AXES
    parts = ("state",) if kind is None else kind._fields
    sizes = {**SIZES, **sizes}
    shapes = {p: (*lead, *(sizes[n] for n in axes[p].split())) for p in parts}
    drawn = spec.core.draw_state(rng, kind, shapes)
    return drawn + 1j * rng.standard_normal(shapes["state"]) if "state" in fn.samples.complex else drawn
