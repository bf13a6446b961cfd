"""The house: imports run downward, files and functions stay short, specs and docstrings and loops agree."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linattn_np as la
from bench import compare
from bench.__main__ import COMPARED
from bench.cpu import variants
from linattn_np.call import replay
from linattn_np.docstring import docstring
from tests.naive import NAIVE

ROOT = Path(la.__file__).parent
FILES = sorted(p for p in ROOT.rglob("*.py") if "cuda_src" not in p.parts)
DOCS = ROOT.parent / "docs"
NAMES = [str(p.relative_to(ROOT)) for p in FILES]
LAYERS = (  # from the bottom up; what stands on one line does not import each other
    ("runtime",), ("ops",), ("core",), ("matrix_state", "softmax"), ("spec",), ("products",), ("call", "sampling"),
    ("variants",), ("catalog",), ("testing", "filters"),
    ("docstring", "doctor", "experiments", "bridges", "warmup"), ("__main__",), ("__init__",),
)
LAYER = {name: n for n, names in enumerate(LAYERS) for name in names}
CORES = ("matrix_state", "softmax")
USERS = ("experiments", "bridges")  # they see the package itself, as a user does
FRAMEWORKS = {"cupy", "torch", "jax", "tensorflow", "mlx", "dask", "onnx"}
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
            base = ".".join([*(package[: len(package) - node.level + 1] if node.level else []),
                             *(node.module.split(".") if node.module else [])])
            each = [f"{base}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else base for name in each}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.JoinedStr) and ast.unparse(node).startswith("f'{__package__}."):
            found.add(".".join(package) + ast.unparse(node)[len("f'{__package__}"):-1])
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
            allowed = own[:2] in (["runtime", "pieces"], ["ops", "cpu"], ["matrix_state", "cpu"],
                                    ["softmax", "cpu"])
            assert allowed, f"{'.'.join(own)} imports a compiler"
        if name[0] in FRAMEWORKS:
            lazily = not top and own in (["runtime", "arrays"], ["doctor"])
            assert lazily or own[0] == "bridges" or own[:2] == ["runtime", "cuda"], f"{'.'.join(own)} imports {name[0]}"
        if name[0] in EXTRAS:
            lazily = not top and own in (["__main__"], ["warmup"], ["runtime", "blas"])
            assert lazily or own[0] in ("experiments", "doctor"), f"{own} imports {name[0]}"
        assert name[0] != "tests", f"{'.'.join(own)} imports the tests"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_kernels_are_imported_where_they_are_used(path):
    """A NumPy call never enters CUDA code: only CUDA code, warmup and recorded plans import it at the top."""
    own = module(path)
    if "cuda" in own or own in (["warmup"], ["call", "device_replay"], ["bridges", "device_programs"]):
        return
    for name, top in imports(path):
        at_the_top = top and name[0] == "linattn_np" and "cuda" in name
        assert not at_the_top, f"{'.'.join(own)} imports {'.'.join(name)}"


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "naive").rglob("*.py")), ids=lambda p: p.name)
def test_the_loops_know_nothing_of_the_library(path):
    if path.name.startswith("test_"):
        pytest.skip("a test of the loops")
    assert "linattn" not in path.read_text()


# sizes: what a person reads in one sitting

LINES, FUNCTION, PARAMETERS, CLASS, FOLDER = 400, 60, 8, 200, 20
ALLOWED = {  # (file, name): why
    ("variants/no_erase/mamba2.py", "transxssm"): "the nine arrays of the variant, in the order of its equation",
}


def too_large(path: Path, base: Path) -> list[tuple[str, str, str]]:
    """(file, name, what is too large) of a Python file."""
    text, name = path.read_text(), path.relative_to(base).as_posix()
    lines = len(text.splitlines())
    found = [(name, "", f"{lines} lines")] if lines > LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            length = node.end_lineno - node.lineno + 1
            if length > (CLASS if isinstance(node, ast.ClassDef) else FUNCTION):
                found.append((name, node.name, f"{length} lines"))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len(given) - (bool(given) and given[0].arg in ("self", "cls"))
            if count > PARAMETERS:
                found.append((name, node.name, f"{count} parameters"))
    return found


def test_files_functions_and_classes_are_short():
    found = [one for path in FILES for one in too_large(path, ROOT)]
    bench = ROOT.parent / "bench"
    found += [one for path in sorted(bench.rglob("*.py")) for one in too_large(path, bench)]
    assert [one for one in found if one[:2] not in ALLOWED] == []
    assert len(ALLOWED) <= 5
    assert {one[:2] for one in found} == set(ALLOWED)  # what is allowed is there


SIZES_OF_KERNELS = "matrix_state/cuda/shared_memory.py"  # bytes of layouts: what a source asserts, nothing to choose


def test_thresholds_and_sizes_of_the_core_are_in_one_file():
    """No other module of the core has a number as a constant."""
    found = []
    for path, name in zip(FILES, NAMES, strict=True):
        elsewhere = ("matrix_state/policy.py", SIZES_OF_KERNELS)
        if not name.startswith("matrix_state/") or name.startswith(elsewhere):
            continue
        for node in ast.parse(path.read_text()).body:
            parts = list(ast.walk(node.value)) if isinstance(node, ast.Assign) else []
            numbers = [x for x in parts if isinstance(x, ast.Constant) and type(x.value) in (int, float)]
            if numbers and not any(isinstance(x, ast.Name | ast.Call | ast.Dict) for x in parts[1:]):
                found.append((name, ast.unparse(node)))
    assert found == [("matrix_state/cuda/delta_portable_plan.py", "OUTPUTS, WRITES, ADDS = (1, 0, 2)")]  # codes


@pytest.mark.parametrize("top", ["linattn_np", "cuda_src", "tests", "bench", "docs"])
def test_a_folder_holds_few_files(top):
    found: dict[str, int] = {}
    for path in (ROOT.parent / top).rglob("*"):
        if path.is_file() and path.suffix in (".py", ".cu", ".cuh", ".md", ".svg", ".png"):
            folder = path.parent.relative_to(ROOT.parent).as_posix()
            found[folder] = found.get(folder, 0) + (path.name != "__init__.py")
    assert {folder: n for folder, n in found.items() if n > FOLDER} == {}


# the call path


def entered(call: Callable[[], object]) -> set[str]:
    """The modules of this package whose functions a call enters, in any thread."""
    found = set()

    def hook(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            found.add(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


LOOPS = ("matrix_state/cpu/", "ops/cpu/", "runtime/pieces/", "runtime/code_cache.py")  # the compiled loops


def outside(entered: set[str], folders: tuple[str, ...] = LOOPS) -> set[str]:
    """The modules but those of a backend."""
    return {name for name in entered if not name.startswith(folders)}


@pytest.mark.parametrize("T", [1, 64])
@pytest.mark.parametrize(("options", "most"), [("", 12), ("state", 12), ("state in place", 14), ("options", 14)])
def test_modules_that_a_call_enters(T, options, most):
    """A replayed call: 14 modules in all. A first one: `most` outside the loops; nothing else is left out."""
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, T, 4, 32)).astype(np.float32)
    g, beta = -rng.uniform(0, 1, (2, 2, T, 4)).astype(np.float32)
    keywords: dict[str, Any] = {"backend": "numba", "num_threads": 1, "scale": 0.5} if options == "options" else {}
    if "state" in options:
        keywords = {"state": np.zeros((2, 4, 32, 32), np.float32), "return_state": True,
                    "overwrite_state": "place" in options}  # fmt: skip

    def call() -> None:
        la.gated_delta_rule(q, k, v, g, -beta, **keywords)

    call()  # compiles
    replay.clear()
    first, replayed = entered(call), entered(call)
    assert len(outside(first)) <= most, sorted(outside(first))
    assert len(replayed) <= 14, sorted(replayed)
    assert not [name for name in first if "cuda" in name]


@pytest.mark.parametrize("T", [1, 64])
def test_modules_that_a_vjp_and_its_pullback_enter(T):
    """Outside the loops: 14 in a first call, 15 in a replayed one, which checks nothing but records its loops."""
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, T, 4, 32)).astype(np.float32)
    g, beta = -rng.uniform(0, 1, (2, 2, T, 4)).astype(np.float32)

    def call() -> None:
        la.vjp(la.gated_delta_rule, q, k, v, g, -beta)[1](v)

    call()
    replay.clear()
    first, replayed = entered(call), entered(call)
    assert len(outside(first)) <= 14, sorted(outside(first))
    assert len(outside(replayed)) <= 15, sorted(outside(replayed))


# specs, docstrings, loops


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("text", ["written", "by the spec"])
def test_docstring_has_every_array_with_its_shape(fn, text):
    text = fn.__doc__ if text == "written" else docstring(fn.spec)
    lines = [line.strip() for line in text.splitlines()]
    for name, given in fn.spec.arrays.items():
        described = next((line for line in lines if line.split(" ")[0] == name and "(" in line), None)
        assert described, f"{fn.__name__} does not describe {name}"
        for axes in given.axes.split("|"):
            letters = axes.split()
            if letters[0] == "T":
                letters.insert(0, "...")
            shape = f"({letters[0]},)" if len(letters) == 1 else f"({', '.join(letters)})"
            assert shape in described, f"{fn.__name__}: {name} is {shape} on its spec, not so in: {described}"


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("text", ["written", "by the spec"])
def test_docstring_has_equation_options_and_paper(fn, text):
    text = fn.__doc__ if text == "written" else docstring(fn.spec)
    assert "S_t = " in text or "state" not in fn.spec.core.STATE_AXES  # a cache has no equation
    assert "out_t = " in text
    assert "Raises" in text
    assert "Returns" in text
    assert f"scale=None means {'K**-0.5' if fn.spec.scaled else '1'}." in text
    assert "arXiv" in text
    for option in fn.spec.options.defaults:
        assert option in text, f"{fn.__name__} does not explain {option}"
    for paper in fn.spec.paper.split("arXiv ")[1:]:
        assert paper[:10] in text, f"{fn.__name__}: {paper} is on its spec only"


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_every_variant_is_in_every_list(fn):
    assert fn.__name__ == fn.spec.name
    assert getattr(la, fn.spec.name) is fn
    assert fn.spec in la.SPECS
    assert fn.spec.name in NAIVE
    assert f"`{fn.spec.name}`" in la.family_table()


@pytest.mark.skipif(not DOCS.is_dir(), reason="an installed package has no pages")
def test_every_variant_has_a_row_and_a_section_and_every_section_a_variant():
    text = (DOCS / "variants.md").read_text("utf-8")
    rows = re.findall(r"^\| \[`(\w+)`\]\(#[\w-]+\) \|", text, re.MULTILINE)
    headings = [name for line in re.findall(r"^## (.*)$", text, re.MULTILINE) for name in line.split(", ")]
    names = [spec.name for spec in la.SPECS]
    assert rows == names
    assert sorted(headings) == sorted(names)


def test_no_loop_without_a_variant():
    assert NAIVE.keys() == {c.name for c in la.SPECS}


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_the_signature_is_that_of_the_spec(fn):
    parameters = inspect.signature(fn).parameters
    arrays = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert arrays == list(fn.spec.arrays)
    for name, given in fn.spec.arrays.items():
        assert (parameters[name].default is None) == given.optional
    common = ["scale", "state", "return_state", "return_states_at", "overwrite_state", "state_rows", "reverse",
              "cu_seqlens", "chunk_size", "chunk_states", "precision", "num_threads", "layout", "backend", "check"]
    assert list(parameters)[len(arrays):] == [*fn.spec.options.defaults, *common]


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_a_row_of_the_benchmarks_follows_from_every_spec(fn):
    case = variants.by_spec(fn.__name__)
    calls = compare.ours(fn.__name__, case.draw((1, 8, 1, 4)), False)
    assert calls
    assert all(np.isfinite(call()).all() for call in calls.values())
    assert fn.__name__ in COMPARED


def test_the_lists_that_are_written_are_up_to_date():
    script = ROOT.parent / "docs" / "make_lists.py"
    ran = subprocess.run([sys.executable, str(script), "--check"], cwd=ROOT.parent, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


BY_NAME = ("formulas", "naive", "experiments", "sanitized")  # sources' formulas, loops, memories, calls of kernels


def test_no_test_lists_functions_by_name():
    """Tests of several functions choose them by a trait of their spec: a new function is among them."""
    names, found = {spec.name for spec in la.SPECS}, []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        if {*path.parts, path.stem} & set(BY_NAME):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            each: list[Any] = node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) else []
            each = node.keys if isinstance(node, ast.Dict) else each
            listed = [x for x in each if getattr(x, "attr", getattr(x, "value", None)) in names]
            if len(listed) > 1:
                found.append(f"{path.name}: {ast.unparse(node)}")
    assert found == []


# the import


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
    loaded = loaded_by("import numpy as np, linattn_np as la; q = np.ones((4, 2, 3)); "
                       "la.vjp(la.kda, q, q, q, -q, q[..., 0], backend='chunks')")
    assert not loaded & (FRAMEWORKS | {"ml_dtypes", "numba", "llvmlite"})


@pytest.mark.skipif(not (ROOT.parent / "pyproject.toml").exists(), reason="an installed package has no project files")
def test_the_version_is_the_same_everywhere():
    top = ROOT.parent
    assert f'\nversion = "{la.__version__}"\n' in (top / "pyproject.toml").read_text("utf-8")
    assert f"\nversion: {la.__version__}\n" in (top / "CITATION.cff").read_text("utf-8")
