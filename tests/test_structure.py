"""The house: imports run downward."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import linattn_np as la

ROOT = Path(la.__file__).parent
FILES = sorted(p for p in ROOT.rglob("*.py") if "cuda_src" not in p.parts)
NAMES = [str(p.relative_to(ROOT)) for p in FILES]
LAYERS = (  # from the bottom up; what stands on one line does not import each other
    ("runtime",),
    ("ops",),
    ("core",),
    ("matrix_state", "softmax", "elementwise", "fast_weights"),
    ("spec",),
    ("products", "composition"),
    ("call", "sampling"),
    ("variants",),
    ("catalog",),
    ("testing", "filters", "arguments", "nn"),
    ("layers", "distributed", "serving"),
    ("train",),
    ("docstring", "doctor", "experiments", "bridges", "warmup"),
    ("__main__",),
    ("__init__",),
)
LAYER = {name: n for n, names in enumerate(LAYERS) for name in names}
CORES = ("matrix_state", "softmax", "elementwise", "fast_weights")
USERS = ("experiments", "bridges")  # they see the package itself, as a user does
FRAMEWORKS = {"cupy", "torch", "jax", "tensorflow", "mlx", "dask", "onnx"}
EXTRAS = {"matplotlib", "rich", "tqdm", "threadpoolctl", "pandas", "scipy"}


def module(path: Path) -> list[str]:
    """linattn_np/ops/sums.py -> [linattn_np, ops, sums]."""
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
    """What is imported of this package."""
    found = [name[1:] for name, _ in imports(path) if name[0] == "linattn_np"]
    if module(path)[0] in USERS:
        return [name for name in found if name and name[0] in LAYER]
    assert all(found), f"{path.name} imports the package that it is a part of"
    return found


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_run_downward(path):
    own = module(path)
    for name in ours(path):
        assert name[0] in LAYER, f"{name} stands on no layer"
        if name[0] != own[0]:
            assert LAYER[name[0]] < LAYER[own[0]], f"{'.'.join(own)} imports {'.'.join(name)}"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(path: Path, modules: set[str]) -> set[str]:
    """The modules of this package that one imports anywhere, also by a name like f"{__package__}.other"."""
    package, found = ["linattn_np", *path.relative_to(ROOT).parent.parts], set()
    left: list[ast.AST] = [ast.parse(path.read_text())]
    while left:
        node = left.pop()
        if isinstance(node, ast.ImportFrom):
            base = ".".join(
                [
                    *(package[: len(package) - node.level + 1] if node.level else []),
                    *(node.module.split(".") if node.module else []),
                ]
            )
            each = [f"{base}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else base for name in each}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.JoinedStr) and ast.unparse(node).startswith("f'{__package__}."):
            found.add(".".join(package) + ast.unparse(node)[len("f'{__package__}") : -1])
        left += [] if is_type_checking(node) else ast.iter_child_nodes(node)
    return found & modules


def test_no_module_imports_itself_through_others():
    """Imports inside of functions count; those for type checkers do not."""
    names = {".".join(["linattn_np", *module(path)]).removesuffix(".__init__"): path for path in FILES}
    left = {name: imported(path, set(names)) - {name} for name, path in names.items()}
    assert sum(map(len, left.values())) > 3 * len(left)
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    circle = [next(iter(left))] if left else []
    while left and circle.count(circle[-1]) == 1:
        circle.append(min(left[circle[-1]] & left.keys()))
    assert circle == []


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_neighbours_that_do_not_know_each_other(path):
    """Variants do not import variants, cores do not import cores; a variant sees no backend."""
    own = module(path)
    for name in ours(path):
        if own[0] == name[0] == "variants":
            assert name[1] == "shared", f"{'.'.join(own)} imports {'.'.join(name)}"
        if own[0] in CORES and name[0] in CORES:
            assert own[0] == name[0], f"{'.'.join(own)} imports {'.'.join(name)}"
        if own[0] == "variants" and name[0] in CORES:
            assert name[1] in ("core", "types", "readouts"), f"{'.'.join(own)} imports {'.'.join(name)}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_who_may_import_what(path):
    own = module(path)
    for name, top in imports(path):
        if name[0] in ("numba", "llvmlite"):
            allowed = own[:2] == ["runtime", "pieces"] or (own[0] in ("ops", *CORES) and own[1] == "cpu")
            assert allowed, f"{'.'.join(own)} imports a compiler"
        if name[0] in FRAMEWORKS:
            lazily = not top and own in (["runtime", "arrays"], ["doctor"])
            lazily = lazily or (not top and own[0] == "distributed")  # a communicator of that framework
            assert lazily or own[0] == "bridges" or own[:2] == ["runtime", "cuda"], f"{'.'.join(own)} imports {name[0]}"
        if name[0] in EXTRAS:
            lazily = not top and own in (
                ["__main__"],
                ["warmup"],
                ["runtime", "blas"],
                ["train", "loop"],
                ["train", "curve"],
            )
            assert lazily or own[0] in ("experiments", "doctor"), f"{own} imports {name[0]}"
        assert name[0] != "tests", f"{'.'.join(own)} imports the tests"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_kernels_are_imported_where_they_are_used(path):
    """A NumPy call never enters CUDA code: only CUDA code, warmup and recorded plans import it at the top."""
    own = module(path)
    if "cuda" in own or own in (["warmup"], ["call", "replay", "device"], ["bridges", "device_programs"]):
        return
    for name, top in imports(path):
        at_the_top = top and name[0] == "linattn_np" and "cuda" in name
        assert not at_the_top, f"{'.'.join(own)} imports {'.'.join(name)}"


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "naive").rglob("*.py")), ids=lambda p: p.name)
def test_the_loops_know_nothing_of_the_library(path):
    if path.name.startswith("test_"):
        pytest.skip("a test of the loops")
    assert "linattn" not in path.read_text()
