"""Calls on PyTorch tensors and JAX arrays on a CPU against the same calls on NumPy arrays.

    python -m bench frameworks [--rounds 40] [--write]

The gated delta rule, float32: forward, vjp with pullback, and backward by autograd, at (1, 2048, 8, 64); a step that
overwrites its state (which JAX cannot do), at (1, 1, 16, 128). CPU time of all threads, and wall time; medians. The
calls of a round are in random order: memory that one call frees is mapped again by the next.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import linattn_np as la
from bench import record

LONG, STEP = (1, 2048, 8, 64), (1, 1, 16, 128)
Calls = dict[str, Callable[[], Any]]


def draw(shape: tuple[int, int, int, int]) -> list[np.ndarray]:
    """q, k, v, g, beta; unit keys."""
    B, T, H, _ = shape
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, *shape)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return [q, k, v, -rng.uniform(0, 0.1, (B, T, H)).astype(np.float32), rng.random((B, T, H), np.float32)]


def cases() -> Iterator[tuple[str, Calls]]:
    """Named calls by framework; those that are not installed are left out."""
    fn, x = la.gated_delta_rule, draw(LONG)
    forward: Calls = {"numpy": lambda: fn(*x)}
    both: Calls = {"numpy": lambda: la.vjp(fn, *x)[1](x[2])}
    one = draw(STEP)
    state = np.zeros((1, 16, 128, 128), np.float32)
    step: Calls = {"numpy": lambda: fn(*one, state=state, return_state=True, overwrite_state=True)}
    try:
        import torch
    except ImportError:
        pass
    else:
        t, own = [torch.from_numpy(y) for y in x], [torch.from_numpy(y) for y in one]
        grad = [y.clone().requires_grad_() for y in t]
        begin = torch.from_numpy(state.copy())
        forward["torch"] = lambda: fn(*t)
        both["torch"] = lambda: la.vjp(fn, *t)[1](t[2])
        both["torch.autograd"] = lambda: torch.autograd.grad(fn(*grad), grad, t[2])
        step["torch"] = lambda: fn(*own, state=begin, return_state=True, overwrite_state=True)
    try:
        import jax
    except ImportError:
        pass
    else:
        j = [jax.numpy.asarray(y) for y in x]
        forward["jax"] = lambda: jax.block_until_ready(fn(*j))
        both["jax"] = lambda: jax.block_until_ready(la.vjp(fn, *j)[1](j[2]))
    yield f"forward {LONG}", forward
    yield f"vjp and pullback {LONG}", both
    yield f"step {STEP}", step


def compared(calls: Calls, rounds: int) -> dict[str, dict[str, float]]:
    """Median CPU and wall microseconds of each call, and the median ratio to NumPy's CPU time in the same round."""
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    wall: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    began = time.perf_counter()
    calls["numpy"]()
    inner = max(1, round(0.005 / (time.perf_counter() - began)))
    for _ in range(rounds):
        for name, call in random.sample([*calls.items()], len(calls)):
            start, used = time.perf_counter_ns(), time.process_time_ns()
            for _ in range(inner):
                call()
            cpu[name].append((time.process_time_ns() - used) / inner / 1e3)
            wall[name].append((time.perf_counter_ns() - start) / inner / 1e3)
    return {name: {"cpu_us": statistics.median(cpu[name]), "wall_us": statistics.median(wall[name]),
                   "least_wall_us": min(wall[name]),
                   "cpu_ratio": statistics.median(a / b for a, b in zip(cpu[name], cpu["numpy"], strict=True))}
            for name in calls}  # fmt: skip


def main(argv: list[str]) -> int:
    parser = record.parser("frameworks", __doc__)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args(argv)
    found = {name: compared(calls, args.rounds) for name, calls in cases()}
    for name, row in found.items():
        for library, one in row.items():
            print(f"{name:36s} {library:15s} " + "  ".join(f"{n} {x:10.3f}" for n, x in one.items()))
    if args.write:
        print(record.write("frameworks", record.rounded({"calls": found})))
    return 0
