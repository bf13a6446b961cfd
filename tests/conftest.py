"""Array libraries, as fixtures: how to bring NumPy arrays in, and how to see what came out."""

from __future__ import annotations

import gc
import importlib
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take 3/4 of a GPU from the others


@dataclass(frozen=True)
class Backend:
    """A library under test: `bring` converts a NumPy array to it, `see` any result back to NumPy."""

    name: str
    bring: Callable[[np.ndarray], Any]
    see: Callable[[Any], np.ndarray]
    kind: type
    dtypes: tuple[str, ...] = ("float32", "float64")
    quick: bool = True  # False where a small operation takes a millisecond or more

    def device(self, x: Any) -> Any:
        return getattr(x, "device", None)


def _read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def _numpy() -> Backend:
    return Backend("numpy", lambda x: x, lambda x: x, np.ndarray)


def _frozen() -> Backend:
    return Backend("numpy, read-only", _read_only, lambda x: x, np.ndarray)


def _strict() -> Backend:
    import array_api_strict

    kind = type(array_api_strict.asarray(0))
    return Backend("array-api-strict", array_api_strict.asarray, np.from_dlpack, kind)


def _torch() -> Backend:
    torch = pytest.importorskip("torch")
    bring = lambda x: torch.from_numpy(np.ascontiguousarray(x).reshape(x.shape))  # noqa: E731
    return Backend("torch", bring, lambda x: x.numpy(), torch.Tensor)


def _jax() -> Backend:
    jnp = pytest.importorskip("jax.numpy")
    return Backend("jax", jnp.asarray, np.asarray, importlib.import_module("jax").Array, ("float32",))


def _dask() -> Backend:
    da = pytest.importorskip("dask.array")
    return Backend("dask", da.from_array, lambda x: x.compute(), da.Array, quick=False)


BACKENDS = {
    "numpy": _numpy,
    "numpy, read-only": _frozen,
    "array-api-strict": _strict,
    "torch": _torch,
    "jax": _jax,
    "dask": _dask,
}


SLOW = ("dask",)  # each new shape is planned: its tests run with -m slow


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BACKENDS])
def library(request) -> Backend:
    return BACKENDS[request.param]()


NEEDS = {"cupy": "a CUDA device and CuPy", "torch": "PyTorch", "jax": "JAX", "numba": "Numba"}  # by module


def pytest_collection_finish() -> None:
    """Takes the tests out of garbage collection: tens of thousands of them, which each `gc.collect` would look at."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter) -> None:
    """Counts skipped tests by the missing requirement."""
    count = Counter(_need(report) for report in terminalreporter.stats.get("skipped", ()))
    if count:
        terminalreporter.section("skipped, and what runs them")
    for need, n in count.most_common():
        terminalreporter.write_line(f"{n:6d}  {need}")


def _need(report) -> str:
    """The missing requirement of a skipped test, from its reason."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if "gpu" in getattr(report, "keywords", ()):  # a module that is skipped has none
        return NEEDS["cupy"]
    if (found := re.match(r"could not import '(\w+)", reason)) is not None:
        return NEEDS.get(found[1], found[1])
    return reason
