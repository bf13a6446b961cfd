"""A repeated call with a change of variables over the same call with ready inputs, one token with a state.

    python -m bench changes [--repeats 400] [--threads 1] [--cupy] [--only REGEX] [--json FILE]

Each row: a variant, or an option that preprocesses its inputs, and the cell of the core that it becomes, on inputs
computed before. Calls: forward with a new state and with overwrite_state, la.step, and vjp + pullback. Both calls are
timed alternately in one process; the ratio is that of the times that a tenth of the calls fell below.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .record import machine

SHAPES = ((1, 4, 64), (1, 16, 64), (1, 16, 128))  # (B, H, K = V)
WARM_UP = 15
QUEUE = 32  # GPU calls between synchronisations


class Pair(NamedTuple):
    """A call with a change of variables, and calls of the core's cells on what it becomes."""

    name: str
    changed: tuple[str, dict[str, Any]]
    ready: tuple[tuple[str, dict[str, Any]], ...]


def draw(B: int, H: int, D: int) -> dict[str, np.ndarray]:
    """Arrays of one token by name."""
    rng = np.random.default_rng(0)
    names = ("q", "k", "v", "p", "w", "z")
    arrays = dict(zip(names, rng.standard_normal((len(names), B, 1, H, D)), strict=True))
    arrays["k"] /= np.linalg.norm(arrays["k"], axis=-1, keepdims=True)
    arrays |= {n: -rng.uniform(0.01, 0.1, (B, 1, H)) for n in ("g",)}
    arrays |= {n: rng.uniform(0.1, 0.9, (B, 1, H)) for n in ("beta", "i", "f")}
    arrays |= {"gates": -rng.uniform(0.01, 0.1, (B, 1, H, D)), "b": rng.uniform(0, 1, (B, 1, H, D))}
    arrays |= {"A_log": rng.uniform(0, 1, H), "dt_bias": rng.uniform(0, 1, H), "A": -rng.uniform(0, 1, H),
               "D": rng.uniform(0, 1, H), "ridge": rng.uniform(0.5, 1, (H, D)),
               "channel_bias": rng.uniform(0, 1, (H, D)), "share": rng.uniform(0.1, 0.9, (B, 1, H, D))}
    return {n: x.astype(np.float32) for n, x in arrays.items()}


def pairs(a: dict[str, Any]) -> Iterator[Pair]:
    """All rows of the table."""
    pick = lambda names, **more: {n: a[n] for n in names.split()} | more  # noqa: E731
    qkv, gate, raw = pick("q k v"), pick("q k v g beta"), pick("A_log dt_bias")
    channels = pick("q k v beta", g=a["gates"])
    simple, gla = ("simple_gla", pick("q k v g")), ("gla", qkv | {"g": a["gates"]})
    delta, comba = ("delta_rule", pick("q k v beta")), ("comba", gate | pick("p"))
    gated, kda = ("gated_delta_rule", gate), ("kda", channels)
    yield Pair("hgrn2", ("hgrn2", pick("q v", g=a["gates"])), (gla,))
    yield Pair("longhorn", ("longhorn", pick("q k v beta")), (delta,))
    yield Pair("efla", ("efla", pick("q k v beta")), (delta,))
    yield Pair("gdn2", ("gdn2", pick("q k v b w", g=a["gates"])), (kda,))
    mamba = {"x": a["v"], "dt": a["beta"], "A": a["A"], "B": a["k"], "C": a["q"]}
    yield Pair("mamba2", ("mamba2", mamba), (simple,))
    yield Pair("mamba2 softplus, bias", ("mamba2", mamba | pick("dt_bias", dt_softplus=True)), (simple,))
    yield Pair("mamba2 softplus, bias, D, z", ("mamba2", mamba | pick("dt_bias D z", dt_softplus=True)), (simple,))
    for name, cell in (("gated_delta_rule", gated), ("kda", kda), ("delta_rule", delta), ("comba", comba)):
        yield Pair(f"{name} qk_l2norm", (name, cell[1] | {"qk_l2norm": True}), (cell,))
        if "g" in cell[1]:
            bias = {"A_log": a["A_log"], "dt_bias": a["channel_bias"]} if name == "kda" else raw
            yield Pair(f"{name} A_log", (name, cell[1] | bias), (cell,))
            yield Pair(f"{name} A_log, qk_l2norm", (name, cell[1] | bias | {"qk_l2norm": True}), (cell,))
    plain = ("linear_attention", qkv)
    yield Pair("retention", ("retention", qkv), (simple,))
    yield Pair("lightning_attention", ("lightning_attention", qkv), (simple,))
    yield Pair("linear_attention elu+1", ("linear_attention", qkv | {"feature_map": "elu+1"}), (plain,))
    wide = np.concatenate([a["v"], np.ones_like(a["v"][..., :1])], axis=-1)  # the core's values of a division by sums
    yield Pair("linear_attention elu+1, normalize",
               ("linear_attention", qkv | {"feature_map": "elu+1", "normalize": True}),
               (("linear_attention", qkv | {"v": wide}),))  # fmt: skip
    yield Pair("gated_delta_rule elu+1", ("gated_delta_rule", gate | {"feature_map": "elu+1"}), (gated,))
    slots = {"q": a["q"], "k": a["k"], "v": a["share"], "gv": a["gates"], "g": np.zeros_like(a["gates"])}
    yield Pair("gsa", ("gsa", qkv | {"s": a["share"]}),
               (("gla", slots), ("gla", {"q": a["share"], "k": a["b"], "v": a["v"], "g": a["gates"]})))
    yield Pair("mlstm", ("mlstm", pick("q k v i f")), (("simple_gla", simple[1] | {"v": wide}),))
    again = {"q": a["q"], "k": a["k"], "v": a["w"], "g": a["g"]}
    solver = pick("ridge", solver="conjugate_gradients", iterations=1)
    yield Pair("mesa_net, 1 step of conjugate gradients", ("mesa_net", gate | solver), (simple, ("simple_gla", again)))
    yield from mapped(a)


def mapped(a: dict[str, Any]) -> Iterator[Pair]:
    """Variants with feature maps, and linear attention on the features."""
    import linattn_np as la

    for name, width in (("based", 16), ("rebased", 16), ("performer", 64), ("rfa", 64)):
        given = {"q": a["q"][..., :width].copy(), "k": a["k"][..., :width].copy(), "v": a["v"]}
        S = getattr(la, name)(**given, return_state=True)[1]
        features = (S[0] if isinstance(S, tuple) else S).shape[-2]
        rng = np.random.default_rng(1)
        q, k = rng.standard_normal((2, *a["q"].shape[:-1], features)).astype(np.float32)
        v = np.concatenate([a["v"], np.ones_like(a["v"][..., :1])], axis=-1) if isinstance(S, tuple) else a["v"]
        yield Pair(f"{name} ({width} channels, {features} features)", (name, given),
                   (("linear_attention", {"q": q, "k": k, "v": v}),))  # fmt: skip


def call_of(kind: str, name: str, given: dict[str, Any], state: Any) -> Callable[[], Any]:
    """The call that is timed."""
    import linattn_np as la

    fn, more = getattr(la, name), {"state": state, "return_state": True}
    if kind == "in place":
        return lambda: fn(**given, **more, overwrite_state=True)
    if kind == "step":
        tokens = {n: x[:, 0] if hasattr(x, "ndim") and x.ndim >= 3 else x for n, x in given.items()}
        names, options = list(fn.spec.arrays), {n: x for n, x in tokens.items() if n not in fn.spec.arrays}
        arrays = {n: tokens[n] for n in names if n in tokens}
        return lambda: la.step(fn, **arrays, **options, **more)
    if kind == "vjp":
        out = fn(**given)
        return lambda: la.vjp(fn, **given, **more)[1](out)
    return lambda: fn(**given, **more)


def timed(calls: list[Callable[[], Any]], repeats: int, wait: Callable[[], None]) -> list[float]:
    """For each call the microseconds that a tenth of its repeats fell below; the calls take turns."""
    for call in calls:
        for _ in range(WARM_UP):
            call()
    times: list[list[int]] = [[] for _ in calls]
    for n in range(repeats):
        if n % QUEUE == 0:
            wait()
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter_ns()
            call()
            own.append(time.perf_counter_ns() - start)
    wait()
    return [float(np.percentile(own, 10)) / 1e3 for own in times]


def on(xp: Any, dtype: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a call in a library."""
    wide = ("g", "beta", "A_log", "dt_bias", "A", "D", "dt", "i", "f", "s", "gv")
    move = lambda n, x: xp.asarray(x).astype(x.dtype if n in wide else dtype)  # noqa: E731
    return {n: move(n, x) if isinstance(x, np.ndarray) else x for n, x in given.items()}


def measure(args: argparse.Namespace, xp: Any, dtype: Any, wait: Callable[[], None]) -> dict[str, Any]:
    """Microseconds by case: (changed, ready)."""
    import linattn_np as la

    found: dict[str, Any] = {}
    for shape in [SHAPES[n] for n in args.shapes]:
        for pair in pairs(draw(*shape)):
            if args.only and not re.search(args.only, pair.name):
                continue
            for kind in args.kinds:
                calls = []
                for name, given in (pair.changed, *pair.ready):
                    moved = on(xp, dtype, given)
                    state = getattr(la, name)(**moved, return_state=True)[1]
                    calls.append(call_of(kind, name, moved, state))
                try:
                    changed, *ready = timed(calls, args.repeats, wait)
                except Exception as error:  # the table goes on
                    print(f"{pair.name} {kind}: {type(error).__name__}: {error}")
                    continue
                found[f"{pair.name}, {shape}, {kind}"] = (changed, sum(ready))
                print(f"{pair.name:42s} {shape!s:14s} {kind:9s} {changed:8.1f} us {sum(ready):8.1f} us "
                      f"{changed / sum(ready):6.2f}", flush=True)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench changes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--threads", default="1", help="threads of the compiled loops and of BLAS")
    parser.add_argument("--cupy", action="store_true", help="on CuPy arrays: bfloat16 with float32 gates")
    parser.add_argument("--only", help="names of the rows, a regular expression")
    parser.add_argument("--kinds", nargs="+", default=["new", "in place", "step", "vjp"])
    parser.add_argument("--shapes", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--json", help="write the times to this file too")
    args = parser.parse_args(argv)
    names = ("LINATTN_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    os.environ.update(dict.fromkeys(names, args.threads))
    if args.cupy:
        import cupy
        import ml_dtypes

        from .cuda.report import device

        where = device(cupy)
        found = measure(args, cupy, ml_dtypes.bfloat16, cupy.cuda.Device().synchronize)
    else:
        where = machine()
        found = measure(args, np, np.float32, lambda: None)
    worst = max((changed / ready, name) for name, (changed, ready) in found.items())
    print(f"{len(found)} pairs, largest ratio {worst[0]:.2f}: {worst[1]}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(where | {"microseconds": found}, file, indent=1)
    return 0
