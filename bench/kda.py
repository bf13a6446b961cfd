"""`python -m bench kda`: Kimi delta attention on a CPU, beside transformers' chunk form and softmax."""

from __future__ import annotations

from bench import compare, peers

SHAPES = [(1, 2048, 8, 64), (1, 2048, 8, 128)]


def calls(arrays: compare.Arrays, backward: bool) -> compare.Calls:
    return compare.ours("kda", arrays, backward) | peers.kda(arrays, backward)


CASE = compare.Case("kda", SHAPES, compare.draw_card("kda"), calls, compare.delta_work, compare.exact("kda"))


def main(arguments: list[str]) -> int:
    return compare.main(CASE, arguments)
