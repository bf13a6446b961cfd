"""What is installed."""

from __future__ import annotations

import sys

LIBRARIES = (
    "numpy",
    "array-api-compat",
    "ml-dtypes",
    "numba",
    "llvmlite",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "torch",
    "jax",
    "dask",
    "array-api-strict",
)


def versions() -> dict[str, str]:
    """Versions of this package, of Python, and of every array library that is installed; none is imported."""
    import platform

    table = {"linattn_np": _version("linattn_np"), "python": platform.python_version()}
    table["platform"] = platform.platform()
    table |= {name: _version(name) for name in LIBRARIES}
    return {name: version for name, version in table.items() if version}


def _version(name: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def show_versions() -> None:
    """Print the versions that a bug report needs."""
    for name, version in versions().items():
        sys.stdout.write(f"{name:18s} {version}\n")
