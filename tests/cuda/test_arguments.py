"""The structs that kernels take: their layout, and that the compiler checks it. No GPU."""

from __future__ import annotations

import re
import struct

import pytest

from linattn_np.matrix_state.cuda import arguments as core
from linattn_np.ops.cuda import arguments as ops
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.runtime.cuda.compile import compile_source
from linattn_np.runtime.cuda.structs import FLOAT, INT, Struct, pointer
from linattn_np.softmax.cuda import arguments as softmax

# compiles where NVRTC has what the comparison needs
OFFSETS_ARE_COMPARED = """
#if !defined(__has_builtin)
#error "no __has_builtin"
#elif !__has_builtin(__builtin_offsetof)
#error "no offsetof"
#endif
"""
# written by hand: bytes of each struct, and where some of its fields are
LAYOUT = {
    ops.ROWS: (40, {"data": 0, "batch": 8, "token": 16, "head": 24, "group": 32}),
    core.STATES: (32, {"data": 0, "slot": 8, "row": 16, "column": 24}),
    core.GATE: (40, {"data": 0, "batch": 8, "head": 24, "group": 32}),
    core.SCAN: (
        440,
        {
            "q": 0,
            "out": 160,
            "g": 200,
            "offsets": 240,
            "start": 248,
            "end": 280,
            "start_group": 312,
            "sums": 320,
            "dots": 328,
            "marks": 352,
            "tokens": 360,
            "T": 368,
            "read": 384,
            "write": 388,
            "at": 392,
            "at_chunks": 424,
            "at_count": 432,
        },
    ),
    core.WRITES: (
        464,
        {
            "dv": 200,
            "g": 240,
            "start": 288,
            "start_group": 352,
            "marks": 376,
            "T": 392,
            "write": 408,
            "at": 416,
            "at_group": 460,
        },
    ),
    core.SEGMENTS: (120, {"states": 0, "start": 32, "start_group": 64, "sums": 72, "elements": 88, "T": 96}),
    core.GATE_GRAD: (120, {"products": 16, "g": 24, "dg": 64, "offsets": 72, "blocks": 96, "T": 104, "warps": 116}),
    core.HEAD_SUMS: (32, {"x": 0, "y": 8, "pieces": 16, "group": 24, "row": 28}),
    core.DELTA: (
        1344,
        {
            "q": 0,
            "dk": 768,
            "out": 896,
            "g": 976,
            "beta": 1016,
            "offsets": 1056,
            "checkpoints": 1064,
            "start": 1080,
            "begins": 1144,
            "slots": 1184,
            "T": 1192,
            "group_q": 1208,
            "which": 1228,
            "scale": 1232,
            "eps": 1236,
            "at": 1240,
            "at_count": 1280,
        },
    ),
    core.DELTA_SCAN: (
        480,
        {
            "writes": 200,
            "g": 240,
            "offsets": 320,
            "inverses": 328,
            "start": 344,
            "start_group": 408,
            "transfers": 416,
            "slots": 448,
            "T": 456,
            "scale": 472,
        },
    ),
    core.DELTA_GRADS: (512, {"dr": 320, "g": 360, "offsets": 440, "dbeta": 472, "slots": 480, "T": 488, "scale": 504}),
    core.DELTA_SEGMENTS: (88, {"added": 8, "begins": 24, "start": 32, "start_group": 64, "chunks": 80}),
    core.VECTOR: (
        1024,
        {
            "q": 0,
            "out": 512,
            "to": 640,
            "offsets": 680,
            "start": 688,
            "begins": 752,
            "transfers": 776,
            "u": 784,
            "states": 792,
            "factors": 816,
            "beta": 832,
            "flags": 872,
            "handed": 880,
            "slots": 888,
            "T": 896,
            "steps": 912,
            "group_q": 920,
            "group_u": 936,
            "start_group": 940,
            "scale": 948,
            "at": 952,
            "at_chunks": 984,
        },
    ),
    core.VECTOR_REVERSE: (
        960,
        {
            "q": 0,
            "dv": 512,
            "g": 640,
            "offsets": 720,
            "grams": 728,
            "ends": 744,
            "start": 752,
            "start_group": 816,
            "sums": 840,
            "slots": 848,
            "T": 856,
            "group_q": 872,
            "scale": 884,
            "at": 888,
            "at_chunks": 920,
        },
    ),
    core.VECTOR_GRADS: (
        640,
        {
            "v": 0,
            "dout": 128,
            "q": 256,
            "dg": 456,
            "offsets": 496,
            "states": 504,
            "flags": 528,
            "u": 536,
            "erase_dots": 552,
            "slots": 560,
            "items": 576,
            "T": 580,
            "group_v": 592,
            "scale": 600,
        },
    ),
    core.VECTOR_BONUS: (48, {"parts": 0, "du": 8, "offsets": 16, "slots": 24, "T": 32, "sequences": 40}),
    core.VECTOR_STRENGTHS: (
        104,
        {
            "ends": 0,
            "erase_dots": 8,
            "beta": 16,
            "dbeta": 56,
            "offsets": 64,
            "slots": 72,
            "items": 88,
            "T": 92,
            "chunks": 100,
        },
    ),
    core.FREE: (
        1216,
        {
            "q": 0,
            "out": 768,
            "to": 896,
            "offsets": 936,
            "start": 944,
            "end": 976,
            "factors": 1008,
            "states": 1024,
            "flags": 1040,
            "slots": 1048,
            "T": 1056,
            "group_q": 1072,
            "end_group": 1100,
            "scale": 1104,
            "at": 1112,
        },
    ),
    core.FREE_GRADS: (
        1408,
        {
            "q": 0,
            "dout": 768,
            "rows_q": 896,
            "dq": 1096,
            "db": 1256,
            "offsets": 1296,
            "states": 1304,
            "flags": 1336,
            "slots": 1344,
            "T": 1352,
            "group_q": 1364,
            "items": 1388,
            "scale": 1392,
        },
    ),
    core.ERASE_VECTORS: (
        240,
        {
            "g": 40,
            "v": 80,
            "beta": 120,
            "a": 160,
            "dg": 176,
            "dk": 200,
            "db": 208,
            "dbeta": 216,
            "rows": 224,
            "T": 232,
            "heads": 236,
        },
    ),
    core.RECURRENCE: (
        608,
        {
            "q": 0,
            "dout": 240,
            "dq": 280,
            "db": 480,
            "offsets": 520,
            "u": 528,
            "w": 536,
            "start": 552,
            "marks": 568,
            "dots": 576,
            "marks_of_sequence": 584,
            "T": 592,
            "scale": 604,
        },
    ),
    core.VECTOR_PORTABLE: (
        624,
        {
            "q": 0,
            "beta": 160,
            "out": 200,
            "dg": 400,
            "du": 480,
            "offsets": 520,
            "u": 528,
            "start": 536,
            "marks": 552,
            "parts": 584,
            "marks_of_sequence": 592,
            "T": 608,
            "scale": 620,
        },
    ),
    core.VECTORS: (32, {"batch": 0, "token": 8, "head": 16, "group": 24, "kind": 28}),
    core.STEP: (
        576,
        {
            "q": 0,
            "out": 80,
            "start": 88,
            "fresh": 120,
            "offsets": 128,
            "at_q": 136,
            "at_out": 456,
            "start_slot": 488,
            "places": 536,
            "T": 544,
            "heads_inverse": 560,
            "read": 564,
            "past": 568,
        },
    ),
    core.SOLVE: (72, {"q": 0, "g": 16, "beta": 24, "ridge": 32, "start": 40, "x": 48, "end": 56, "enough": 64}),
    softmax.ATTENTION: (
        832,
        {
            "q": 0,
            "dout": 384,
            "out": 512,
            "other": 552,
            "sums": 592,
            "logs": 608,
            "dq": 624,
            "added": 632,
            "tiles": 640,
            "near": 648,
            "rows": 664,
            "crossing": 672,
            "norms": 680,
            "least": 696,
            "ends": 704,
            "offsets": 712,
            "T": 720,
            "slots": 736,
            "group_q": 748,
            "shared": 764,
            "offset": 768,
            "scale": 784,
        },
    ),
    softmax.PORTABLE: (
        640,
        {
            "q": 0,
            "out": 120,
            "past_k": 160,
            "b": 240,
            "sums": 280,
            "readers": 288,
            "parts": 312,
            "lengths": 328,
            "dout": 344,
            "dots": 504,
            "offsets": 544,
            "T": 552,
            "group_s": 580,
            "slots": 600,
            "outputs": 616,
            "shared": 624,
            "scale": 632,
        },
    ),
    softmax.SYSTEM: (704, {"of": 0, "beta": 640, "dbeta": 648, "solved": 656, "counts": 696}),
    softmax.STICK: (672, {"of": 0, "marks": 640, "ends": 648, "first": 656, "pairs": 660, "tiles": 664}),
    softmax.PATH: (
        1216,
        {
            "of": 0,
            "w": 832,
            "beta": 960,
            "factors": 968,
            "maps": 984,
            "key_heads": 992,
            "each": 1000,
            "levels": 1004,
            "level": 1008,
            "mapped": 1016,
            "dkeys": 1032,
            "chain": 1056,
            "bases": 1064,
            "tiles": 1072,
            "dk": 1080,
            "dw": 1120,
            "dbeta": 1160,
            "least": 1168,
        },
    ),
    softmax.GATES: (
        216,
        {
            "g": 0,
            "k": 40,
            "sums": 80,
            "readers": 88,
            "norms": 96,
            "ends": 104,
            "dq": 112,
            "tiles": 120,
            "rows": 144,
            "dg": 160,
            "offsets": 168,
            "T": 176,
            "window": 196,
            "shared": 200,
            "pitch": 204,
            "parts": 208,
        },
    ),
    softmax.DOTS: (
        184,
        {
            "out": 0,
            "dout": 40,
            "dots": 80,
            "added": 88,
            "rows": 96,
            "tiles": 104,
            "sums": 112,
            "ends": 136,
            "offsets": 144,
            "T": 152,
            "normalize": 160,
            "pairs": 164,
            "slots": 176,
        },
    ),
    ops.PRODUCT: (56, {"y": 8, "z": 16, "add": 24, "dx": 32, "dy": 40, "size": 48}),
    ops.UNIT_ROWS_ARRAY: (72, {"dy": 40, "y": 48, "rows": 56, "heads": 64}),
    ops.UNIT_ROWS: (152, {"of": 0, "first": 144, "root": 148}),
    ops.STEP_SIZE: (
        224,
        {
            "z": 40,
            "dt": 80,
            "other": 112,
            "dg": 128,
            "y": 136,
            "g": 160,
            "rows": 192,
            "dt_kind": 204,
            "low": 212,
            "high": 216,
        },
    ),
    ops.COLUMN_SUMS: (32, {"y": 8, "rows": 16, "block": 24}),
    ops.COMPLEMENT: (40, {"g": 0, "dk": 8, "y": 24, "size": 32}),
    ops.GATE_FORMULA: (80, {"raw": 0, "g": 32, "tokens": 56, "width": 64, "block": 72, "bound": 76}),
}


def declared():
    return {x for module in (core, ops, softmax) for x in vars(module).values() if isinstance(x, Struct)}


def test_layouts():
    assert set(LAYOUT) == declared()
    for kind, (size, offsets) in LAYOUT.items():
        assert kind.size == size, kind.name
        assert offsets.items() <= kind.offsets.items(), kind.name


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
    names = {x.name for x in declared()} | {"ArrayCallsArguments"}  # generated with its packing, runtime/cuda/fusion.py
    for path in sources.root().rglob("*.cu"):
        text = path.read_text(encoding="utf-8")
        for kind in re.findall(r"__grid_constant__ (\w+)", text):
            bodies = re.findall(rf"struct {kind} {{([^}}]*)}}", text)
            assert kind in names or bodies, path
            assert set(re.findall(r"(\w+) \w+;", " ".join(bodies))) <= names, path
    for module in ("matrix_state", "ops", "softmax"):
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
    assert compile_source(sources.of_text("one.cu", text), {}, "sm_80", cached=False).cubin
    monkeypatch.setitem(core.SCAN.offsets, "sums", core.SCAN.offsets["sums"] + 8)
    with pytest.raises(nvrtc.CompileError, match=r"ScanArguments.sums"):
        compile_source(sources.of_text("one.cu", text), {}, "sm_80", cached=False)


def test_pointers_are_eight_bytes():
    assert Struct("test/Kind", ("n", INT), ("p", pointer("const float"))).offsets == {"n": 0, "p": 8}
