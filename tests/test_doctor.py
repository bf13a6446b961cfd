"""`linattn doctor`: what it prints, and that a wrong result ends in a verdict and an exit status."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np import doctor
from linattn_np.__main__ import main
from tests.cases import one_per

TWO = tuple(one_per(lambda spec: spec.erase.name == "NONE", (la.linear_attention, *la.VARIANTS)))


@pytest.fixture
def few(monkeypatch):
    """Two variants on the backends that need no compilation."""
    monkeypatch.setattr(doctor, "VARIANTS", TWO)
    monkeypatch.setattr(la.linear_attention.spec.core, "BACKENDS", ("reference", "chunks"))
    monkeypatch.setattr(doctor, "_cupy", lambda: None)


def test_all_right(few, capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for section in ("versions", "devices", "backends", "caches", "exactness"):
        assert f"\n{section}" in "\n" + text
    cases = sum(len(fn.samples.options) for fn in TWO)
    assert text.count(" right\n") == 2 * cases + 1  # and the last line
    assert text.endswith("checks on chunks, reference: all right\n")


def test_a_wrong_gradient_is_told(few, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check_vjp", lambda fn, **given: {"q": 1e-3})
    assert main(["doctor"]) == 1
    assert "WRONG" in capsys.readouterr().out.splitlines()[-1]


def test_a_wrong_forward_is_told(few, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "relative_error", lambda a, b: 1e-9)
    assert main(["doctor"]) == 1
    assert "chunks        1.0e-09" in capsys.readouterr().out


@pytest.mark.parametrize(("forward", "gradient", "right"), [
    (1e-12, 1e-7, True), (2e-12, 0.0, False), (0.0, 2e-7, False), (None, 0.0, True), (np.nan, 0.0, False),
])
def test_the_bounds(forward, gradient, right):
    assert doctor.Check("kda", "chunks", forward, gradient).right is right
