"""`python -m bench mesa_net`: 15 steps of conjugate gradients beside the gated delta rule, on the same arrays."""

from __future__ import annotations

import numpy as np

from bench import compare
from bench import gated_delta_rule as rule

ITERATIONS = 15


def draw(shape: tuple[int, int, int, int]) -> compare.Arrays:
    arrays = rule.draw(shape)
    q = arrays["q"] / np.linalg.norm(arrays["q"], axis=-1, keepdims=True)
    return arrays | {"q": q, "ridge": np.ones((shape[2], shape[3]), np.float32)}


def calls(arrays: compare.Arrays, backward: bool) -> compare.Calls:
    """The rule first: every ratio is to it. What is not mesa_net's output is not compared with it."""
    plain = {n: x for n, x in arrays.items() if n != "ridge"}
    beside = compare.ours("gated_delta_rule", plain, backward, backends=("numba",))
    solved = {"solver": "conjugate_gradients", "iterations": ITERATIONS, "tolerance": 0.0}
    own = compare.ours("mesa_net", arrays | solved, backward)
    return {f"gated_delta_rule_{name}": lambda call=call: [call()] for name, call in beside.items()} | own


def exact(arrays: compare.Arrays) -> np.ndarray:
    import linattn_np as la

    return la.mesa_net(**{n: x.astype(np.float64) for n, x in arrays.items()}, solver="conjugate_gradients",
                       iterations=60, tolerance=1e-12, backend="chunks")  # fmt: skip


CASE = compare.Case("mesa_net", rule.SHAPES, draw, calls, lambda D, backward: None, exact)


def main(arguments: list[str]) -> int:
    return compare.main(CASE, arguments)
