"""Wrong arguments of every entry to compiled code are refused with its name, or are legal with the right result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from linattn_np.runtime.doorway import expect, expect_one_dtype

pytest.importorskip("numba")


@pytest.mark.parametrize("group", ["ops", "torch", "variants"])
def test_every_entry_refuses_arguments_that_do_not_fit(group):
    """In a separate process, so that a crash is a failure of this test."""
    if group == "torch":
        pytest.importorskip("torch")
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.bridges.arguments.doorway", group]
    found = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ | {"PYTHONPATH": path})
    assert (found.returncode, found.stdout) == (0, ""), found.stdout + found.stderr


@pytest.mark.parametrize(("given", "error", "text"), [
    ({"x": (np.ones((2, 3)), "T D"), "b": (np.ones(2), "D")}, ValueError, r"f: b has shape \(2,\), expected \(D,\) = "
     r"\(3,\)$"),
    ({"x": (np.ones((4, 2, 3)), "... D"), "b": (np.ones((2, 3)), "... D")}, ValueError,
     r"f: b has shape \(2, 3\), expected \(..., D\) = \(4, 2, 3\)$"),
    ({"x": (np.ones(3), "T D")}, ValueError, r"f: x has shape \(3,\), expected \(T, D\)$"),
    ({"x": (np.ones(3, int), "D")}, TypeError, "f: x has dtype int64, expected one of float16, bfloat16, float32, "),
    ({"x": (None, "D")}, TypeError, "f: x is None, expected an array$"),
    ({"x": ([1.0], "D")}, TypeError, r"f: x is \[1.0\], expected an array$"),
])  # fmt: skip
def test_errors_name_entry_argument_and_what_was_expected(given, error, text):
    with pytest.raises(error, match=text):
        expect("f", **given)


def test_sizes_are_bound_in_order():
    x, w = np.ones((4, 2, 3)), np.ones((3, 5))
    assert expect("f", {"W": 5}, x=(x, "... D"), none=(None, "D?"), w=(w, "D W")) == {"W": 5, "...": (4, 2), "D": 3}
    with pytest.raises(TypeError, match="f: w has dtype float32, expected that of x: float64"):
        expect_one_dtype("f", x=x, w=w.astype(np.float32))
