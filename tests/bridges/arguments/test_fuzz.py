"""Some hundred random calls of every bridge, right and wrong ones; tests/bridges/arguments/fuzz.py is for more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

MODULES = {"torch": "torch", "jax": "jax", "dask": "dask.array", "onnx": "onnx.reference.ops.op_linear_attention",
           "transformers": "torch"}  # fmt: skip
SLOW = ("torch", "jax", "dask")  # of all variants, whose loops are compiled first


@pytest.mark.parametrize("bridge", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MODULES])
def test_random_calls_are_computed_or_refused_clearly(bridge):
    """In a separate process, so that a crash is a failure of this test."""
    pytest.importorskip(MODULES[bridge])
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.bridges.arguments.fuzz", bridge, "0", "120"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ | {"PYTHONPATH": path})
    assert (found.returncode, found.stdout) == (0, ""), found.stdout + found.stderr
