"""Test helpers: closeness in multiples of eps, pullbacks against central differences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from . import sampling
from .call.vjp import vjp
from .spec import VariantFunction

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10,
       "complex128": 2.0**-52, "complex64": 2.0**-23}  # fmt: skip

CURVED = 1e-7  # the relative error of a difference from which on it is extrapolated


def eps_of(x: Any) -> float:
    """Distance from 1 to the next number of x's dtype."""
    return EPS[str(x.dtype).rsplit(".", 1)[-1]]


def to_numpy(x: Any) -> np.ndarray:
    """Any array as float64 NumPy, or complex128."""
    if hasattr(x, "get") and type(x).__module__.startswith("cupy"):
        x = x.get()
    if type(x).__module__.startswith("torch"):
        x = x.detach().cpu()
        x = x if x.is_complex() else x.double()
    y = np.asarray(x)
    return y.astype(np.complex128 if y.dtype.kind == "c" else np.float64)


def relative_error(actual: Any, expected: Any) -> float:
    """max |actual - expected| / max |expected|; absolute where expected is 0; inf for a NaN on one side only."""
    a, b = to_numpy(actual), to_numpy(expected)
    if a.shape != b.shape:
        raise AssertionError(f"shape {a.shape} against {b.shape}")
    if not a.size:
        return 0.0
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    if not (np.isfinite(a[~same]).all() and np.isfinite(b[~same]).all()):
        return float("inf")
    finite = np.abs(b[np.isfinite(b)])
    scale = finite.max() if finite.size else 0.0
    return float(np.abs(a[~same] - b[~same]).max() / (scale or 1.0))


def assert_close(actual: Any, expected: Any, *, eps: float = 50.0, dtype: Any = None, what: str = "result") -> None:
    """Raise AssertionError unless max |actual - expected| <= eps * eps(dtype) * max |expected|.

    dtype: the array whose dtype gives eps; None means `actual`.
    """
    bound = eps * eps_of(actual if dtype is None else dtype)
    error = relative_error(actual, expected)
    if not error <= bound:
        raise AssertionError(f"{what}: relative error {error:.3g}, expected at most {bound:.3g}")


def check_vjp(
    fn: Callable[..., Any], *arrays: Any, rtol: float = 1e-7, step: float = 1e-5, seed: int = 0, **options: Any
) -> dict[str, float]:
    """Check a pullback against central differences along one random direction per input; returns the relative errors.

    Use float64 NumPy arrays. The cotangents of out and of the final state are drawn at random; every array given and
    the initial state are checked, and each error is relative to the larger derivative or 1; gradients of complex
    arrays are dRe + i dIm. A difference that is off by more than 1e-7 is taken at twice the step too, and the two are
    extrapolated, so that curvature counts by step^4. Raises AssertionError above rtol.
    """
    rng = np.random.default_rng(seed)
    names = list(fn.spec.arrays) if hasattr(fn, "spec") else ["q", "state"]
    names = list(fn.piece.names) if hasattr(fn, "piece") else names
    inputs = dict(zip(names, arrays, strict=False))
    inputs |= {n: options.pop(n) for n in list(options) if n in names or n == "state"}
    if hasattr(fn, "spec"):
        options["return_state"] = True

    def call(values: dict[str, Any]) -> list[np.ndarray]:
        return _flat(fn(**values, **options))

    def drawn(x: Any) -> list[np.ndarray]:
        """A direction of an array, or of the parts of a state: none of whole numbers."""
        return [_direction(rng, p) for p in _flat(x)]

    result, pullback = vjp(fn, **inputs, **options)
    cotangents = drawn(result)
    grads = pullback(*_unflat(result, cotangents))
    errors = {}
    for name, x in inputs.items():
        if x is None or isinstance(x, str):
            continue
        direction = drawn(tuple(x) if hasattr(x, "_asdict") else (x,))
        gradient = getattr(grads, name)
        gradient = list(gradient) if hasattr(gradient, "_asdict") else [gradient]
        exact = sum(_pairing(g, d) for g, d in zip(gradient, direction, strict=True))
        difference = functools.partial(_difference, call, inputs, name, direction, cotangents)
        numeric = difference(step)
        if not abs(numeric - exact) <= CURVED * max(1.0, abs(exact)):
            numeric = (4 * numeric - difference(2 * step)) / 3
        errors[name] = float(abs(numeric - exact) / max(1.0, abs(numeric), abs(exact)))
    worst = max(errors, key=errors.__getitem__, default=None)
    if worst is not None and not errors[worst] <= rtol:
        raise AssertionError(
            f"{fn.__name__}: gradient of {worst} is off by {errors[worst]:.3g} against central "
            f"differences, expected at most {rtol:.3g}"
        )
    return errors


def _difference(
    call: Callable[..., list[np.ndarray]],
    inputs: dict[str, Any],
    name: str,
    direction: Any,
    cotangents: Any,
    step: float,
) -> float:
    """The central difference of <cotangents, call> along a direction of one input."""
    x, moved = inputs[name], []
    parts = list(x) if hasattr(x, "_asdict") else [x]
    for h in (step, -step):
        y = [p + h * d if d.dtype.kind in "fc" else p for p, d in zip(parts, direction, strict=True)]
        moved.append(call({**inputs, name: type(x)(*y) if hasattr(x, "_asdict") else y[0]}))
    return sum(_pairing((a - b) / (2 * step), c) for a, b, c in zip(*moved, cotangents, strict=True))


def _direction(rng: np.random.Generator, p: np.ndarray) -> np.ndarray:
    """Random numbers in the place of an array; zeros where it has whole numbers."""
    if p.dtype.kind not in "fc":
        return np.zeros(p.shape, p.dtype)
    real = rng.standard_normal(p.shape)
    return real if p.dtype.kind == "f" else real + 1j * rng.standard_normal(p.shape)


def _pairing(x: np.ndarray, d: np.ndarray) -> float:
    """sum Re(x) Re(d) + Im(x) Im(d)"""
    return float((x * d.conj()).sum().real)


def sample(fn: Callable[..., Any], rng: np.random.Generator, **sizes: Any) -> dict[str, np.ndarray]:
    """Random float64 arrays of a variant by name: B=(2,), T=12, H=2, K=5, V=3, Hq, Hk (sampling.py)."""
    return sampling.sample(cast(VariantFunction, fn), rng, **sizes)


def sample_state(
    fn: Callable[..., Any], rng: np.random.Generator, lead: tuple[int, ...], options: Any, **sizes: Any
) -> Any:
    """A random float64 state (*lead, H, ...) of a call with these options; sizes: H=2, K=5, V=3, Hq, Hk.

    For variants with their own state shapes it is the final state of a short call.
    """
    variant = cast(VariantFunction, fn)
    spec = variant.spec
    sizes = {"H": 2, "K": 5, "V": 3} | sizes
    if not spec.state.wide:
        return sampling.draw_state(variant, rng, lead, {n: sizes[n] for n in ("H", "K", "V")}, options)
    arrays = sampling.sample(variant, rng, B=lead, T=7, **sizes)
    arrays.pop(spec.change.query or "", None)
    return fn(**{**arrays, **options}, backend="reference").state


def _flat(result: Any) -> list[np.ndarray]:
    """out and the parts of the state, without None."""
    items = result if isinstance(result, tuple) else (result,)
    return [y for x in items if x is not None for y in (_flat(x) if isinstance(x, tuple) else [x])]


def _unflat(result: Any, values: list[np.ndarray]) -> tuple[Any, ...]:
    """`values` in the structure of the result, as arguments of the pullback."""
    left = list(values)

    def build(x: Any) -> Any:
        if x is None:
            return None
        if isinstance(x, tuple):
            return type(x)(*map(build, x))
        return left.pop(0)

    return tuple(build(x) for x in (result if isinstance(result, tuple) else (result,)))
