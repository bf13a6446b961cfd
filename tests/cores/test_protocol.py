"""The protocol of cores: calls know it and no core; every core has all of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import linattn_np as la
from linattn_np.core import STATES, CallPlan, Computation, Core
from linattn_np.elementwise import types as elementwise
from linattn_np.matrix_state.types import Plan
from linattn_np.softmax import types as softmax

ROOT = Path(la.__file__).parent
CORES = ("matrix_state", "softmax", "elementwise", "fast_weights")
CALLS = [*sorted((ROOT / "call").glob("*.py")), *(ROOT / f"{n}.py" for n in ("sampling", "testing", "doctor"))]
OF_DATA = ("tuple", "dict", "tuple | list", "str")  # kinds of arrays, states and options


@pytest.mark.parametrize("path", CALLS, ids=lambda p: p.stem)
def test_calls_know_no_core(path):
    """No import of a core."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = (node.module or "").split(".") + [alias.name for alias in node.names]
            assert not set(names) & set(CORES), ast.unparse(node)


@pytest.mark.parametrize("path", CALLS, ids=lambda p: p.stem)
def test_calls_ask_no_core_what_it_is(path):
    """No branch on the type or an attribute of a core, its plan, its inputs or its residuals."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id in ("isinstance", "hasattr") or (node.func.id == "getattr" and len(node.args) == 3):
            asked, what = map(ast.unparse, node.args[:2])
            assert what in OF_DATA or not re.search(r"core|plan|inputs|residuals", asked), ast.unparse(node)


def test_the_plan_of_a_core_has_what_every_call_has():
    for kind in (Plan, softmax.SoftmaxPlan, elementwise.Plan):
        own = kind._field_defaults
        assert set(CallPlan._fields) <= set(kind._fields)
        assert {n: own[n] for n in CallPlan._field_defaults} == CallPlan._field_defaults


def members(protocol: type) -> set[str]:
    """The names that a protocol asks for."""
    return {n for c in protocol.__mro__ for n in (*vars(c), *vars(c).get("__annotations__", ()))
            if c.__module__ == "linattn_np.core" and not n.startswith("_")}  # fmt: skip


def test_every_core_is_complete():
    cores = {id(c): c for c in (*(fn.spec.core for fn in la.VARIANTS), *STATES.values())}.values()
    for core in cores:
        assert not [n for n in members(Core) if not hasattr(core, n)]
    found = [kind.computation for kind in tuple.__subclasses__() if hasattr(kind, "computation")]
    for computation in found:
        assert not [n for n in members(Computation) if not hasattr(computation, n)]
    assert len(cores) >= 2
    assert len(found) >= 4
