"""A step of training on a GPU, in one CUDA graph, against the time of its matrix products.

    python -m bench training --backend cuda [--only small] [--dtype bfloat16] [--steps 50] [--write]

Byte models of gated_delta_rule on 16,384 random tokens a step, AdamW with clipping: `small` has 2 layers of 128
channels, `large` 12 of 1024. ms: of a step, from the batch on the host to its loss there, in a loop. Products: those of
all dense weights (forward and both gradients) by cuBLAS in one graph, one product of all tokens each; share: their time
over that of a step. Without a graph: the same steps by calls, whose losses must be the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import linattn_np as la
from bench import record
from bench.cuda import report, timing
from linattn_np.runtime.cuda import graphs
from linattn_np.runtime.cuda.products import product
from linattn_np.train.gradient import ALONE
from linattn_np.train.step import Task, step_of

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
VOCABULARY, WARM, SECONDS = 256, 6, 1.0  # steps before any is timed, and for so long: clocks rise


class Case(NamedTuple):
    """A model and its batches."""

    name: str
    D: int
    layers: int
    heads: int
    B: int
    T: int
    aim: str

    @property
    def model(self) -> la.layers.Model:
        hidden = -(-8 * self.D // 3 // 64) * 64
        return la.layers.language_model(VOCABULARY, D=self.D, layers=self.layers, heads=self.heads, hidden=hidden)


CASES = (
    Case("small", 128, 2, 2, 16, 1024, "1.5 ms a step"),
    Case("large", 1024, 12, 8, 8, 2048, "60 % of the time in products"),
)


def options_of(given: list[str]) -> argparse.Namespace:
    """The parsed options."""
    parser = record.parser("training --backend cuda", __doc__)
    parser.add_argument("--only", choices=["", *(case.name for case in CASES)], default="")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--steps", type=int, default=50)
    return parser.parse_args(given)


def main(given: list[str]) -> int:
    options, rows = options_of(given), []
    import cupy as cp

    for case in CASES:
        if options.only in ("", case.name):
            rows.append(measured(cp, case, DTYPES[options.dtype], options.steps))
            print(record.cells(rows[-1]), flush=True)
            cp.get_default_memory_pool().free_all_blocks()
    if options.write:
        print(record.write("cuda_training", report.device(cp) | {"dtype": options.dtype, "rows": rows}))
    return 0


def batches(case: Case) -> Any:
    """Random bytes by number of batch, the same few again."""
    rng = np.random.default_rng(0)
    each = [rng.integers(0, VOCABULARY, (2, case.B, case.T)) for _ in range(4)]
    return lambda n: tuple(each[n % len(each)])


def steps_of(case: Case, dtype: Any, count: int) -> tuple[list[float], list[float]]:
    """(milliseconds of each of `count` steps after the first ones, losses of these)."""
    run, ms = la.train.Run.start(case.model.loss, dtype=dtype).to("cuda"), list[float]()
    with step_of(Task(case.model.loss, run, batches(case), 1.0, 1, ALONE)) as step:
        warm = time.perf_counter() + SECONDS
        while run.step < WARM or time.perf_counter() < warm:
            step(1e-4)
        for _ in range(count):
            began = time.perf_counter()
            step(1e-4)
            ms.append(1e3 * (time.perf_counter() - began))
    return ms, run.losses[:WARM]


def measured(cp: Any, case: Case, dtype: Any, steps: int) -> dict[str, Any]:
    """Times of a step with and without a graph, and of its products."""
    ms, losses = steps_of(case, dtype, steps)
    most, graphs.MOST = graphs.MOST, 0
    try:
        by_calls, other = steps_of(case, dtype, WARM)
    finally:
        graphs.MOST = most
    products, found = products_ms(cp, case, dtype), statistics.median(ms)
    return {"case": case.name, "parameters": case.model.loss.count, "tokens": case.B * case.T, "ms": found,
            "ms without a graph": statistics.median(by_calls), "products ms": products, "share": products / found,
            "tokens/s": case.B * case.T / found * 1e3, "same losses": losses == other, "aim": case.aim}  # fmt: skip


def products_ms(cp: Any, case: Case, dtype: Any) -> float:
    """Milliseconds of the products of all dense weights of a step, in one graph."""
    tokens, rng = case.B * case.T, np.random.default_rng(0)
    draw = lambda *shape: cp.asarray(rng.standard_normal(shape, np.float32).astype(dtype))  # noqa: E731
    shapes = [p.shape for n, p in case.model.loss.parameters.items()
              if len(p.shape) == 2 and n.endswith("weight") and min(p.shape) > 4
              and not n.startswith("embedding")]  # fmt: skip
    arrays = {shape: (draw(tokens, shape[0]), draw(*shape), draw(tokens, shape[1])) for shape in set(shapes)}

    def every() -> None:
        for shape in shapes:
            x, W, dy = arrays[shape]
            product(x, W), product(dy, W.T), product(x.T, dy)

    return timing.graph_ms(cp, [every])
