"""Concepts of a call: docs/internals/concepts.md lists the classes that calls meet, and no others."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.test_replay import drawn
from tests.matrix_state.cuda.token import host

launched, public, doubling = host.launched, host.public, host.doubling
ROOT = Path(la.__file__).parent
PAGE = ROOT.parent / "docs" / "internals" / "concepts.md"
Class = tuple[str, str]  # (file, name)
COMPILER = ("runtime/pieces/compiler.py", "runtime/pieces/piece.py", "runtime/pieces/vectors.py")
OTHERS = ("gla", "rwkv7", "mamba2", "lightning_attention", "linear_attention", "softmax_attention", "hgrn")

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="an installed package has no pages")


def met(call: Callable[[], Any]) -> set[Class]:
    """The classes of the package of which a call makes, takes or returns an instance, or enters a method.

    An instance is an argument, a variable or a result of a function that the call enters, or lies in a tuple, a list
    or a dict that is one.
    """
    found: set[type] = set()

    def add(x: Any, depth: int = 3) -> None:
        found.add(type(x))
        if depth and isinstance(x, tuple | list | dict):
            for y in list(x.values() if isinstance(x, dict) else x)[:50]:
                add(y, depth - 1)

    def hook(frame: Any, event: str, result: object) -> None:
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith(str(ROOT)):
            owner = frame.f_globals.get(code.co_qualname.split(".")[0])
            found.update({owner} if isinstance(owner, type) else ())
            add([*frame.f_locals.values(), result])

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {each for kind in found if (each := place(kind)) and each[0] not in COMPILER}


def place(kind: type) -> Class | None:
    """(file, name) of a class of the package."""
    module = kind.__module__.split(".")
    return ("/".join(module[1:]) + ".py", kind.__qualname__) if module[0] == la.__name__ else None


def listed(section: str) -> set[Class]:
    """The classes in the rows of a section of the page."""
    text = PAGE.read_text("utf-8").split(f"\n## {section}")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]*) \| `([\w/]+\.py)` \|", text, re.MULTILINE)
    return {(file, name) for names, file in rows for name in re.findall(r"`(\w+)`", names)}


def arrays_of(name: str) -> dict[str, np.ndarray]:
    drawn = la.testing.sample(getattr(la, name), np.random.default_rng(0), T=20, K=8, V=16, optional=False)
    return {n: x.astype(np.float32) for n, x in drawn.items()}


def first(call: Callable[[], Any]) -> set[Class]:
    """The classes that a first call meets whose kernels are loaded."""
    call()
    replay.clear()
    return met(call)


def calls_of(name: str) -> tuple[set[Class], set[Class]]:
    """(classes of a call, classes of its vjp and pullback) on NumPy arrays."""
    fn, x = getattr(la, name), arrays_of(name)
    plain = first(lambda: fn(**x))

    def both() -> None:
        out, pullback = la.vjp(fn, **x)
        pullback(np.ones_like(out))

    return plain, first(both)


NUMPY, CASES, VJP, CUPY, TORCH, OTHER = "A call on NumPy", "Cases", "`la.vjp`", "CuPy", "torch", "Other calls"
EVERY = (NUMPY, CASES, VJP)  # that the calls of other arrays meet too


def test_the_classes_of_a_numpy_call():
    """Each is a row, and each row is met; the same for a vjp and its pullback."""
    pytest.importorskip("numba")
    plain, pulled = calls_of("gated_delta_rule")
    assert plain == listed(NUMPY) | listed(CASES)
    assert pulled - plain == listed(VJP)


def test_the_classes_of_other_variants():
    pytest.importorskip("numba")
    found = set[Class]().union(*(classes for name in OTHERS for classes in calls_of(name)))
    assert found.difference(*map(listed, EVERY)) == listed(OTHER)


def test_the_classes_of_cupy_calls(public, monkeypatch):
    """A step and its vjp, on stubs of CuPy arrays."""
    doubling(monkeypatch)
    x, S = drawn(0)
    dout = stub(np.ones(x["v"].shape, np.float32))
    found = first(lambda: la.gated_delta_rule(**x, state=S, return_state=True))
    found |= first(lambda: la.vjp(la.gated_delta_rule, **x, state=S)[1](dout))
    assert found.difference(*map(listed, EVERY)) == listed(CUPY)


def test_the_classes_of_torch_calls():
    pytest.importorskip("numba")
    torch = pytest.importorskip("torch")
    x = {n: torch.from_numpy(y).requires_grad_() for n, y in arrays_of("gated_delta_rule").items()}

    def call() -> None:
        la.gated_delta_rule(**x).sum().backward()

    found = first(call) | first(lambda: la.gated_delta_rule(**{n: y.detach() for n, y in x.items()}))
    assert found.difference(*map(listed, EVERY)) == listed(TORCH)


@pytest.mark.parametrize(("section", "most"), [(NUMPY, 18), (CASES, 4), (VJP, 4), (CUPY, 8), (TORCH, 4)])
def test_a_heading_says_how_many(section, most):
    """Classes in the rows of its tables: few enough to learn."""
    heading = re.search(rf"^## {section}[^\n]*: (\d+)", PAGE.read_text("utf-8"), re.MULTILINE)
    assert heading
    assert int(heading[1]) == len(listed(section)) <= most


def test_every_class_is_in_its_file():
    for section in (*EVERY, CUPY, TORCH, OTHER):
        for file, name in listed(section) - {("call/results.py", "Gradients")}:  # made by namedtuple
            assert re.search(rf"^class {name}\b", (ROOT / file).read_text("utf-8"), re.MULTILINE), (file, name)
