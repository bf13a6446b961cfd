"""What is installed, and whether it computes what it should."""

from __future__ import annotations

import importlib.metadata
import platform
import sys


def versions() -> dict[str, str]:
    """Versions of this package, of Python, and of every array library that is installed (none is imported)."""
    found = {"linattn_np": _version("linattn_np"), "python": platform.python_version(), "platform": platform.platform()}
    for name in ("numpy", "array-api-compat", "ml-dtypes", "numba", "cupy-cuda12x", "cupy-cuda13x", "torch", "jax",
                 "dask", "array-api-strict"):
        found[name] = _version(name)
    return {name: v for name, v in found.items() if v}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def show_versions() -> None:
    """Print the versions that a bug report needs."""
    for name, version in versions().items():
        sys.stdout.write(f"{name:18s} {version}\n")
