"""The structs that kernels take: their layout, and that the compiler checks it. No GPU."""

from __future__ import annotations

import re
import struct

import pytest

from linattn_np.elementwise.cuda import arguments as elementwise
from linattn_np.fast_weights.cuda import arguments as fast_weights
from linattn_np.matrix_state.cuda import arguments as core
from linattn_np.ops.cuda import arguments as ops
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.runtime.cuda.compile import compile_source
from linattn_np.runtime.cuda.structs import FLOAT, INT, Struct, pointer
from linattn_np.softmax.cuda import arguments as softmax

# compiles if NVRTC supports the comparison
OFFSETS_ARE_COMPARED = """
#if !defined(__has_builtin)
#error "no __has_builtin"
#elif !__has_builtin(__builtin_offsetof)
#error "no offsetof"
#endif
"""


def declared():
    modules = (core, elementwise, fast_weights, ops, softmax)
    return {x for module in modules for x in vars(module).values() if isinstance(x, Struct)}


def test_values_are_at_the_offsets_of_their_names():
    kind = Struct("test/Kind", ("a", INT), ("rows", ops.ROWS, 2), ("b c", FLOAT))
    packed = kind.pack(a=7, rows=[*range(5), *range(5, 10)], b=0.5, c=2.0)
    assert packed == struct.pack("<i4x" + 2 * "4qi4x" + "2f", 7, *range(10), 0.5, 2.0)
    unpacked = kind.unpack(packed)
    assert unpacked["rows"][1] == {"data": 5, "batch": 6, "token": 7, "head": 8, "group": 9}
    assert (unpacked["a"], unpacked["b"], unpacked["c"]) == (7, 0.5, 2.0)


@pytest.mark.parametrize("given", [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "d": 2}])
def test_every_field_has_a_value(given):
    with pytest.raises((TypeError, KeyError)):
        Struct("test/Kind", ("a b", INT)).pack(**given)


def test_there_is_no_other_packing():
    """Each struct that a kernel takes is a declared one or made of them; the host side has no format strings."""
    names = {x.name for x in declared()}
    for path in sources.root().rglob("*.cu"):
        text = path.read_text(encoding="utf-8")
        for kind in re.findall(r"__grid_constant__ (\w+)", text):
            bodies = re.findall(rf"struct {kind} {{([^}}]*)}}", text)
            assert kind in names or bodies, path
            assert set(re.findall(r"(\w+) \w+;", " ".join(bodies))) <= names, path
    for module in ("elementwise", "fast_weights", "matrix_state", "ops", "softmax"):
        for path in (sources.PACKAGE / module / "cuda").glob("*.py"):
            assert "import struct" not in path.read_text(encoding="utf-8"), path


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_the_compiler_checks_the_layout(monkeypatch):
    """A struct that is laid out otherwise than Python packs it does not compile."""
    try:
        compile_source(sources.of_text("none.cu", OFFSETS_ARE_COMPARED), {}, "sm_80", cached=False)
    except nvrtc.CompileError:
        pytest.skip("this NVRTC has no offsetof")
    text = (
        '#include "arguments/matrix_state/ScanArguments.cuh"\n'
        'extern "C" __global__ void entry(const __grid_constant__ ScanArguments a) { *a.dots = a.read; }\n'
    )
    assert compile_source(sources.of_text("one.cu", text), {}, "sm_80", cached=False)[0]
    monkeypatch.setitem(core.SCAN.offsets, "sums", core.SCAN.offsets["sums"] + 8)
    with pytest.raises(nvrtc.CompileError, match=r"ScanArguments.sums"):
        compile_source(sources.of_text("one.cu", text), {}, "sm_80", cached=False)


def test_pointers_are_eight_bytes():
    assert Struct("test/Kind", ("n", INT), ("p", pointer("const float"))).offsets == {"n": 0, "p": 8}
