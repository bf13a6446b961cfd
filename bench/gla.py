"""`python -m bench gla`: gated linear attention on a CPU, beside softmax; transformers has no path for it."""

from __future__ import annotations

from bench import compare, peers

SHAPES = [(1, 2048, 8, 64), (1, 2048, 8, 128)]


def calls(arrays: compare.Arrays, backward: bool) -> compare.Calls:
    return compare.ours("gla", arrays, backward) | peers.softmax(arrays, backward)


CASE = compare.Case("gla", SHAPES, compare.draw_card("gla", "gv"), calls, compare.plain_work, compare.exact("gla"))


def main(arguments: list[str]) -> int:
    return compare.main(CASE, arguments)
