"""Kernels, functions, structs and files of cuda_src are short, as tests/test_structure.py asks of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from linattn_np.runtime.cuda import sources
from tests import test_structure as structure

ROOT = sources.root()
FILES = sorted(p for p in ROOT.rglob("*") if p.suffix in (".cu", ".cuh"))
ALLOWED = {  # (file, name): why
    ("delta/delta_grads.cu", "gradients"): "96 registers a thread: split into stages it is 2 to 4 % slower",
    ("delta/delta_scan_grads.cu", "grads"): "three tiles of accumulators at 128 registers, loops rolled against spills",
    ("step/step.cu", "step"): "a token in registers at memory speed: all loads are issued before the first is used",
}
# comments, literals, and directives with their continuations
IGNORED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ \t]*#(?:\\\n|[^\n])*',
                     re.DOTALL | re.MULTILINE)
ATTRIBUTE = re.compile(r"\b(?:__launch_bounds__|__align__|alignas)\s*(?=\()")
STRUCT = re.compile(r"\b(?:struct|class|union|enum)\s+(?:class\s+)?(\w+)")
SCOPE = re.compile(r"\s*(?:extern|(?:inline\s+)?namespace\b[\w:\s]*)\s*")
INITIALISER = re.compile(r"[:,]\s*\w+\s*$")  # of a member, before the body of a constructor
NAME = re.compile(r"(operator\s*(?:\(\s*\)|\[\s*\]|[^\s\w(]+)|~?\w+)\s*$")


class Piece(NamedTuple):
    """A function, a kernel or a struct of a source."""

    name: str
    kind: str  # function or struct
    lines: int
    parameters: int


def blank(text: str) -> str:
    """The text without comments, literals and directives; every line stays where it is."""
    return IGNORED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def closing(text: str, at: int) -> int:
    """The place of the bracket that closes the one at `at`."""
    pairs, depth = {"{": "}", "(": ")", "<": ">"}, 0
    opens, closes = text[at], pairs[text[at]]
    for n in range(at, len(text)):
        depth += (text[n] == opens) - (text[n] == closes)
        if not depth:
            return n
    raise ValueError(f"{opens} is not closed: {text[at : at + 60]!r}")


def without(pattern: re.Pattern[str], opens: str, head: str) -> str:
    """The head without what the pattern begins and a pair of brackets ends."""
    while found := pattern.search(head):
        head = head[: found.start()] + head[closing(head, head.index(opens, found.start())) + 1 :]
    return head


def declared(head: str) -> tuple[str, int | None]:
    """(name, number of parameters) of what stands before a {; None: a struct; an empty name: neither."""
    head = without(re.compile(r"\btemplate\s*(?=<)"), "<", head)
    head = without(ATTRIBUTE, "(", head)
    for found in re.finditer(r"\(", head):
        name = NAME.search(head[: found.start()])
        if name and not re.match(r"\s*\(", head[closing(head, found.start()) + 1 :]):
            inside = head[found.start() + 1 : closing(head, found.start())]
            return re.sub(r"\s", "", name[1]), count(inside)
    found = STRUCT.search(head)
    return (found[1], None) if found else ("", 0)


def count(parameters: str) -> int:
    """Commas at the top level, and one."""
    depth = commas = 0
    for character in parameters:
        depth += (character in "([{<") - (character in ")]}>")
        commas += character == "," and not depth
    return commas + 1 if parameters.strip() not in ("", "void") else 0


def pieces(text: str) -> Iterator[Piece]:
    """Every function, member functions too, and every struct of a source. Lambdas belong to their function."""
    text = blank(text)
    at = begin = 0
    while at < len(text):
        if text[at] == "{":
            head = text[begin:at]
            first = text.count("\n", 0, begin + len(head) - len(head.lstrip()))
            end = closing(text, at)
            if INITIALISER.search(head) and "(" in without(ATTRIBUTE, "(", head):
                at = end + 1
                continue
            name, parameters = declared(head)
            lines = text.count("\n", 0, end) - first + 1
            scope = parameters is None or SCOPE.fullmatch(head)
            if name:
                yield Piece(name, "struct" if scope else "function", lines, parameters or 0)
            at = at if scope else end
            begin = at + 1 if name or scope else begin
        elif text[at] in ";}":
            begin = at + 1
        at += 1


def too_large(name: str, text: str) -> Iterator[tuple[str, str, str]]:
    """(file, name, what is too large)."""
    if (lines := len(text.splitlines())) > structure.LINES:
        yield name, "", f"{lines} lines"
    for piece in pieces(text):
        if piece.lines > (structure.FUNCTION if piece.kind == "function" else structure.CLASS):
            yield name, piece.name, f"{piece.lines} lines"
        if piece.parameters > structure.PARAMETERS:
            yield name, piece.name, f"{piece.parameters} parameters"


SAMPLE = """
#define BRACES { \\
    {{ (
typedef Tile<4, 2> Keys;   // a comment with { and (
constexpr int N = 3, TABLE[2] = {1, 2};
static_assert(N == 3, "text with { in it");
template <class T, int M = (1 > 0)> struct alignas(4 * M) Pair : Base<T> {
    T x[M];
    int (*pointer)(int);
    __device__ Pair(int a, int b)
        : x{a}, y(b) {}
    __device__ T operator[](int i) const { return x[i]; }
    __device__ T operator()(int i, int j) const {
        auto f = [&](int, int, int) { return '{'; };
        if (i) { return f(1, 2, 3); }
        return x[j];
    }
};
enum { WHOLE, ADD };
LA_DEVICE void tiles(float (&c)[4][2], const Map<int, Pair<int>>& m, u32 n) {}
template <bool B> LA_DEVICE int nothing(void) { return B; }
#if N
extern "C" __global__ void __launch_bounds__(32 * N, 2)
    entry(const __grid_constant__ Arguments a) {
#pragma unroll
    for (int i = 0; i < 2; i++) { /* } */ }
    struct Inner { int z; };
}
#endif
extern "C" {
void last(int a, int b, int c, int d, int e, int f, int g, int h, int i) {
}
}
"""


def test_what_is_counted():
    found = [tuple(piece) for piece in pieces(SAMPLE)]
    assert found == [
        ("Pair", "struct", 12, 0), ("Pair", "function", 2, 2), ("operator[]", "function", 1, 1),
        ("operator()", "function", 5, 2), ("tiles", "function", 1, 3), ("nothing", "function", 1, 0),
        ("entry", "function", 6, 1), ("last", "function", 2, 9),
    ]  # fmt: skip


def test_what_is_too_large():
    """At the limit nothing is said, one line or parameter further something is."""
    body = "\n" * (structure.FUNCTION - 1)
    assert list(too_large("x.cu", f"void f() {{{body}}}")) == []
    assert list(too_large("x.cu", f"void f() {{\n{body}}}")) == [("x.cu", "f", "61 lines")]
    members = "\n".join("int f(int a) { return a; }" for _ in range(structure.CLASS - 1))
    assert list(too_large("x.cu", f"struct S {{\n{members} }};")) == []
    assert list(too_large("x.cu", f"struct S {{\n\n{members} }};")) == [("x.cu", "S", "201 lines")]
    assert list(too_large("x.cu", SAMPLE)) == [("x.cu", "last", "9 parameters")]
    assert list(too_large("x.cu", "\n" * 401)) == [("x.cu", "", "401 lines")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_bracket_is_seen(path):
    """Kernels are found by name, and all that is left between functions is balanced."""
    text = path.read_text()
    for bracket in ("{}", "()"):
        assert blank(text).count(bracket[0]) == blank(text).count(bracket[1])
    kernels = re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(", text)
    found = {piece.name for piece in pieces(text) if piece.kind == "function"}
    assert set(kernels) <= found


def test_sources_are_short():
    found = [one for path in FILES for one in too_large(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert [one for one in found if one[:2] not in ALLOWED] == []
    assert {one[:2] for one in found} == set(ALLOWED)  # what is allowed is there
    assert len(ALLOWED) + len(structure.ALLOWED) <= 5
