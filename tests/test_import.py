"""What the import of the package loads, and what its window shows."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import linattn_np as la
from tests.test_structure import EXTRAS, FRAMEWORKS

ROOT = Path(la.__file__).parent


def loaded_by(code: str) -> set[str]:
    """Top-level modules of a fresh process after `code`."""
    code += "; import sys; print(*{m.split('.')[0] for m in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def test_import_takes_only_what_it_needs():
    """In a fresh process: the window alone."""
    loaded = loaded_by("import linattn_np")
    assert "linattn_np" in loaded
    assert not loaded & (FRAMEWORKS | EXTRAS | {"numba", "llvmlite", "ml_dtypes"})
    added = loaded - loaded_by("import numpy, array_api_compat") - sys.stdlib_module_names
    assert added == {"linattn_np"}
    code = "import sys, linattn_np; print(*[m for m in sys.modules if m.startswith('linattn_np')])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["linattn_np"]


def test_a_name_loads_what_it_needs():
    """One variant loads no other one, and no CUDA code."""
    code = "import sys, linattn_np as la; la.gla; print(*[m for m in sys.modules if m.startswith('linattn_np.')])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    found = [name.split(".")[1:] for name in ran.stdout.split()]
    variants = [name for name in found if name[0] == "variants" and len(name) > 2 and name[1] != "shared"]
    assert [name[2] for name in variants] == ["gla"]
    assert not [name for name in found if "cuda" in name or "experiments" in name]


def test_the_window_shows_the_functions_and_nothing_else():
    assert dir(la) == sorted([*la.__all__, "__version__"])
    assert {fn.__name__ for fn in la.VARIANTS} <= set(la.__all__)
    for name in la.__all__:
        assert getattr(la, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        la.nonsense  # noqa: B018


def test_type_checkers_see_what_is_there():
    """The stub names what `__all__` does; every variant has its arrays and options, and its gradients their names."""
    seen, classes = set(), {}
    for node in ast.parse((ROOT / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            seen |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.AnnAssign):
            seen.add(node.target.id)
            classes[node.target.id] = ast.unparse(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            seen.add(node.name)
        elif isinstance(node, ast.ClassDef):
            classes[node.name] = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AnnAssign)]
    assert seen - {"__version__"} == set(la.__all__)
    for fn in la.VARIANTS:
        name = classes[fn.__name__]
        for call in (n for n in classes[name] if isinstance(n, ast.FunctionDef)):
            words = [a.arg for a in (*call.args.args[1:], *call.args.kwonlyargs)]
            assert sorted(words) == sorted(inspect.signature(fn).parameters)
        assert [n.target.id for n in classes[f"{name}Gradients"]] == [*fn.spec.arrays, "state"]


def test_ml_dtypes_is_not_imported_for_a_call_without_it():
    loaded = loaded_by(
        "import numpy as np, linattn_np as la; q = np.ones((4, 2, 3)); "
        "la.vjp(la.kda, q, q, q, -q, q[..., 0], backend='chunks')"
    )
    assert not loaded & (FRAMEWORKS | {"ml_dtypes", "numba", "llvmlite"})


@pytest.mark.skipif(not (ROOT.parent / "pyproject.toml").exists(), reason="an installed package has no project files")
def test_the_version_is_the_same_everywhere():
    top = ROOT.parent
    assert f'\nversion = "{la.__version__}"\n' in (top / "pyproject.toml").read_text("utf-8")
    assert f"\nversion: {la.__version__}\n" in (top / "CITATION.cff").read_text("utf-8")
