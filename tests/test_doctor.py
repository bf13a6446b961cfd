"""`linattn doctor`: its output, and its verdict and exit status for a wrong result."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np import doctor
from linattn_np.__main__ import main
from linattn_np.fast_weights.core import FastWeights
from tests.cases import one_per

NAME = lambda fn: fn.__name__  # noqa: E731
TWO = tuple(one_per(lambda spec: spec.erase.name == "NONE", (la.linear_attention, *la.VARIANTS)))


@pytest.fixture
def few(monkeypatch):
    """Two variants on the backends that need no compilation."""
    monkeypatch.setattr(doctor, "VARIANTS", TWO)
    monkeypatch.setattr(la.linear_attention.spec.core, "BACKENDS", ("reference", "chunks"))
    monkeypatch.setattr(doctor, "_cupy", lambda: None)
    monkeypatch.setattr(doctor, "PIECES", {})


def test_all_right(few, capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for section in ("versions", "devices", "backends", "caches", "exactness"):
        assert f"\n{section}" in "\n" + text
    cases = sum(len(fn.samples.options) for fn in TWO)
    assert text.count("  right  ") == 2 * cases
    assert "right  defaults\n" in text
    assert "right  feature_map='elu+1', normalize=True\n" in text
    assert text.count("right  qk_l2norm=True\n") == 2
    assert text.endswith("checks on chunks, reference: all right\n")


@pytest.mark.parametrize("fn", [fn for fn in la.VARIANTS if isinstance(fn.spec.core, FastWeights)], ids=NAME)
def test_gradients_of_learners_are_right(fn):
    """Curved functions: a plain difference of lact is off by more than the bound."""
    for options in fn.samples.options:
        errors = la.testing.check_vjp(fn, **doctor._draw(fn, options), **options, backend="reference", rtol=np.inf)
        assert max(errors.values()) <= doctor.GRADIENT


def test_brief(few, capsys):
    assert main(["doctor", "--brief"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["reference", "chunks", "cupy", "linattn_np"]
    assert lines[0].startswith("reference    9 checks of 2 functions, gradients within ")
    assert lines[1].startswith("chunks       9 checks of 2 functions, outputs within ")
    assert lines[2] == "cupy         not checked: none (no CuPy, or no device that it can use)"
    assert lines[3].endswith(": 18 checks, all right")


def test_brief_names_what_is_wrong(few, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check_vjp", lambda fn, **given: {"q": 1e-3 * (fn is TWO[1])})
    assert main(["doctor", "--brief"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith(f"gradients within 1.0e-03: WRONG: {TWO[1].__name__}")
    assert lines[-1].endswith("18 checks, 4 WRONG")


def test_checks_on_cupy(few, monkeypatch):
    """NumPy in place of CuPy: the arrays are moved, the calls run and compared."""
    monkeypatch.setattr(doctor, "_cupy", lambda: np)
    found = [check for check in doctor.checks() if check.backend.startswith("cupy ")]
    assert [check.options for check in found][-2:] == ["", "qk_l2norm=True"]
    assert all(check.right for check in found)


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"linattn_np {la.__version__}\n"


def test_a_wrong_gradient_is_told(few, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check_vjp", lambda fn, **given: {"q": 1e-3})
    assert main(["doctor"]) == 1
    assert "WRONG" in capsys.readouterr().out.splitlines()[-1]


def test_a_wrong_forward_is_told(few, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "relative_error", lambda a, b: 1e-9)
    assert main(["doctor"]) == 1
    assert "chunks        1.0e-09" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("forward", "gradient", "right"),
    [(1e-12, 1e-7, True), (2e-12, 0.0, False), (0.0, 2e-7, False), (None, 0.0, True), (np.nan, 0.0, False)],
)
def test_the_bounds(forward, gradient, right):
    assert doctor.Check("kda", "chunks", forward, gradient).right is right
