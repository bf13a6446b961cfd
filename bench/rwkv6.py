"""`python -m bench rwkv6`: RWKV-6 on a CPU, beside softmax; transformers has no path for it."""

from __future__ import annotations

from bench import compare, peers

SHAPES = [(1, 2048, 8, 64), (1, 2048, 8, 128)]


def calls(arrays: compare.Arrays, backward: bool) -> compare.Calls:
    return compare.ours("rwkv6", arrays, backward) | peers.softmax(arrays, backward)


CASE = compare.Case("rwkv6", SHAPES, compare.draw_card("rwkv6"), calls, compare.plain_work, compare.exact("rwkv6"))


def main(arguments: list[str]) -> int:
    return compare.main(CASE, arguments)
