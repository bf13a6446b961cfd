"""The house: imports run downward, files and functions stay short, cards and docstrings and loops agree."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import linattn_np as la
from tests.naive import NAIVE

ROOT = Path(la.__file__).parent
FILES = sorted(p for p in ROOT.rglob("*.py") if "cuda_src" not in p.parts)
NAMES = [str(p.relative_to(ROOT)) for p in FILES]
FLOORS = (  # from the ground up; what stands on one line does not import each other, but for what BESIDE allows
    ("ground", "versions"), ("pieces", "cuda"), ("cores",), ("card", "again", "options"),
    ("alike", "pulled", "similarity", "rotated", "projections", "step_sizes", "state_parts", "results"),
    ("call",), ("variants",),
    ("catalog", "read", "transforms"), ("testing",), ("doctor", "lab", "bridges", "warmup"), ("__main__",),
    ("__init__",),
)
FLOOR = {name: n for n, names in enumerate(FLOORS) for name in names}
FRAMEWORKS = {"cupy", "torch", "jax", "tensorflow", "mlx", "dask"}
EXTRAS = {"matplotlib", "rich", "tqdm", "threadpoolctl", "pandas", "scipy"}


def module(path: Path) -> list[str]:
    """linattn_np/cores/decay.py -> [cores, decay]."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def imports(path: Path) -> list[tuple[list[str], bool]]:
    """(dotted name, whether at the top of the module) of every import; ours without the package's name."""
    tree = ast.parse(path.read_text())
    package = list(path.relative_to(ROOT).parent.parts)
    found = []
    for node in ast.walk(tree):
        top = node in tree.body
        if isinstance(node, ast.Import):
            found += [(alias.name.split("."), top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append((node.module.split("."), top))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            found += [(["linattn_np", *base, alias.name], top) for alias in node.names]
    return found


def ours(path: Path) -> list[list[str]]:
    """What is imported of this package; the lab and the bridges see the package itself, as a user does."""
    found = [name[1:] for name, _ in imports(path) if name[0] == "linattn_np"]
    if module(path)[0] in ("lab", "bridges"):
        return [name for name in found if name]
    assert all(found), f"{path.name} imports the package that it is a part of"
    return found


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_run_downward(path):
    own = module(path)
    for name in ours(path):
        assert name[0] in FLOOR, f"{name} stands on no floor"
        if name[0] == own[0] or (own[0] == "lab" and name == ["__init__"]):  # the lab is a caller like any other
            continue
        assert FLOOR[name[0]] < FLOOR[own[0]], f"{'.'.join(own)} imports {'.'.join(name)}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_neighbours_that_do_not_know_each_other(path):
    """Variants do not import variants, rooms do not import rooms."""
    own = module(path)
    for name in ours(path):
        if own[0] == name[0] == "variants":
            raise AssertionError(f"{'.'.join(own)} imports {'.'.join(name)}")
        rooms = {p.name for p in (ROOT / "cores").iterdir() if p.is_dir()}
        if own[0] == name[0] == "cores" and len(own) > 1 and own[1] in rooms:
            assert name[1] == own[1] or name[1] not in rooms, f"{'.'.join(own)} imports {'.'.join(name)}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_who_may_import_what(path):
    own = module(path)
    for name, top in imports(path):
        if name[0] in ("numba", "llvmlite"):
            assert path.name.startswith("numba_"), f"{'.'.join(own)} imports a compiler"
        if name[0] in FRAMEWORKS:
            lazily = not top and own in (["ground", "namespace"], ["doctor"])
            assert lazily or own[0] in ("bridges", "cuda"), f"{'.'.join(own)} imports {name[0]}"
        if name[0] in EXTRAS:
            lazily = not top and own in (["__main__"], ["warmup"], ["ground", "blas"])
            assert lazily or own[0] in ("lab", "doctor"), f"{own} imports {name[0]}"
        if name[0] == "tests":
            raise AssertionError(f"{'.'.join(own)} imports the tests")


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "naive").glob("*.py")), ids=lambda p: p.name)
def test_the_loops_know_nothing_of_the_library(path):
    if path.name.startswith("test_"):
        pytest.skip("a test of the loops")
    assert "linattn" not in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_file_is_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= 450


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_function_is_a_screen(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 70, node.name


# cards, docstrings, loops


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_docstring_has_every_array_with_its_shape(fn):
    lines = [line.strip() for line in fn.__doc__.splitlines()]
    for name, given in fn.card.arrays.items():
        described = next((line for line in lines if line.split(" ")[0] == name and "(" in line), None)
        assert described, f"{fn.__name__} does not describe {name}"
        for spec in given.spec.split("|"):
            letters = spec.split()
            if letters[0] == "T":
                letters.insert(0, "...")
            shape = f"({letters[0]},)" if len(letters) == 1 else f"({', '.join(letters)})"
            assert shape in described, f"{fn.__name__}: {name} is {shape} on its card, not so in: {described}"


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_docstring_has_equation_options_and_paper(fn):
    text = fn.__doc__
    assert "S_t = " in text
    assert "out_t = " in text
    assert "Raises" in text
    assert "Returns" in text
    assert f"scale=None means {'K**-0.5' if fn.card.scaled else '1'}." in text
    assert "arXiv" in text
    for option in fn.card.options:
        assert option in text, f"{fn.__name__} does not explain {option}"
    for paper in fn.card.paper.split("arXiv ")[1:]:
        assert paper[:10] in text, f"{fn.__name__}: {paper} is on its card only"


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_every_variant_is_in_every_list(fn):
    assert fn.__name__ == fn.card.name
    assert getattr(la, fn.card.name) is fn
    assert fn.card in la.CARDS
    assert fn.card.name in NAIVE
    assert f"`{fn.card.name}`" in la.family_table()


def test_no_loop_without_a_variant():
    assert NAIVE.keys() == {c.name for c in la.CARDS}


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_signature_is_the_cards(fn):
    import inspect

    parameters = inspect.signature(fn).parameters
    arrays = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert arrays == list(fn.card.arrays)
    for name, given in fn.card.arrays.items():
        assert (parameters[name].default is None) == given.optional
    common = ["scale", "state", "return_state", "overwrite_state", "state_rows", "cu_seqlens", "chunk_size",
              "precision", "num_threads", "layout", "backend"]
    assert list(parameters)[len(arrays):] == [*fn.card.options, *common]


# the import


def loaded_by(code: str) -> set[str]:
    """Top-level modules of a fresh process after `code`."""
    code += "; import sys; print(*{m.split('.')[0] for m in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def test_import_takes_only_what_it_needs():
    """In a fresh process: NumPy, array_api_compat and the standard library, nothing heavier."""
    loaded = loaded_by("import linattn_np")
    assert {"numpy", "array_api_compat", "linattn_np"} <= loaded
    assert not loaded & (FRAMEWORKS | EXTRAS | {"numba", "llvmlite", "ml_dtypes"})
    added = loaded - loaded_by("import numpy, array_api_compat.numpy") - sys.stdlib_module_names
    assert added == {"linattn_np"}
    # array_api_compat.numpy takes longer to import than NumPy itself
    code = "import sys, linattn_np; sys.exit('array_api_compat.numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0


def test_ml_dtypes_is_not_imported_for_a_call_without_it():
    loaded = loaded_by("import numpy as np, linattn_np as la; q = np.ones((4, 2, 3)); "
                       "la.vjp(la.kda, q, q, q, -q, q[..., 0], backend='chunks')")
    assert not loaded & (FRAMEWORKS | {"ml_dtypes", "numba", "llvmlite"})
