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
ALLOWED: dict[tuple[str, str], str] = {}  # (file, name): why
# comments, literals, and directives with their continuations
IGNORED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M)
ATTRIBUTE = re.compile(r"\b(?:__launch_bounds__|__align__|alignas)\s*(?=\()")
STRUCT = re.compile(r"\b(?:struct|class|union|enum)\s+(?:class\s+)?(\w+)")
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
    structs: list[tuple[str, int]] = []
    while at < len(text):
        if text[at] == "{":
            head = text[begin:at]
            first = text.count("\n", 0, begin + len(head) - len(head.lstrip()))
            name, parameters = declared(head)
            end = closing(text, at)
            lines = text.count("\n", 0, end) - first + 1
            if name and parameters is None:
                yield Piece(name, "struct", lines, 0)
                structs.append((name, end))
                end = at
            elif name:
                yield Piece(name, "function", lines, parameters)
            at = end
            begin = at + 1 if name or head.strip() == "extern" else begin
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
