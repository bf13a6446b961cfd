"""Arguments of a call in a program of JAX: arrays that are traced, options that are part of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..runtime.values import shown
from .device_programs import available

Operation = Callable[..., Any]
MOST = 1024  # cached programs
NUMBERS = ("cu_seqlens", "return_states_at")  # options that may be arrays of numbers


def traced(fn: str, name: str, x: Any) -> Any:
    """An array that JAX can trace."""
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return jnp.asarray(x)
    raise TypeError(
        f"{fn}: {name} is a {type(x).__module__}.{type(x).__qualname__} beside arrays that JAX traces, "
        "expected all arrays in one library"
    )


def fixed(fn: str, name: str, x: Any) -> Any:
    """The value of an option, which is a part of the compiled program."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{fn}: {name} is traced by JAX, expected numbers that are known when the function is "
            "compiled: pass them as static arguments"
        )
    if name in ("state_rows", "fresh") and x is not None:
        raise TypeError(
            f"{fn}: {name} was given with arrays that JAX traces, expected None: "
            "take the states that sequences begin with yourself, as in state=pool[rows]"
        )
    if name in NUMBERS and hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, list):
        x = tuple(x)
    try:
        hash(x)
    except TypeError:
        raise TypeError(
            f"{fn}: {name} is {shown(x)}, expected a value that can be hashed, since JAX compiles a program for each"
        ) from None
    return x


def is_on_device() -> bool:
    """Whether the program will probably run on a CUDA device: that is not known while JAX traces."""
    device = getattr(jax.config, "jax_default_device", None)
    platform = device if isinstance(device, str) else getattr(device, "platform", jax.default_backend())
    return platform in ("gpu", "cuda") and available()
