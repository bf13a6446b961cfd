"""`python -m bench step`: one token of the gated delta rule with a state, in place, beside copying the state.

Times are of one call, H = 16, D = 128; the state alone is B MiB, read and written once.
"""

from __future__ import annotations

import numpy as np

import linattn_np as la
from bench import compare, gated_delta_rule, peers

SHAPES = [(1, 1, 16, 128), (32, 1, 16, 128)]


def calls(arrays: compare.Arrays, backward: bool) -> compare.Calls:
    B, _, H, D = arrays["q"].shape
    state = 0.1 * np.random.default_rng(1).standard_normal((B, H, D, D)).astype(np.float32)
    other = np.empty_like(state)

    def ours(backend: str | None) -> None:
        la.gated_delta_rule(**arrays, state=state, return_state=True, overwrite_state=True, backend=backend)

    found = {"linattn_np": lambda: ours(None), "linattn_np_numba": lambda: ours("numba"),
             "copy_of_the_state": lambda: np.copyto(other, state)}  # fmt: skip
    return found | peers.step(arrays, state)


def work(D: int, backward: bool) -> float:
    """Decay, read, write, read."""
    return 7 * D * D


CASE = compare.Case("step", SHAPES, gated_delta_rule.draw, calls, work, small=(1, 1, 2, 128))


def main(arguments: list[str]) -> int:
    return compare.main(CASE, arguments)
