"""A few calls of every CUDA kernel, small enough for compute-sanitizer, each against the definition in float64.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.cuda.sanitized
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.cuda.sanitized --every-lane
    compute-sanitizer --tool initcheck --error-exitcode 1 python -m tests.cuda.sanitized --fresh

Every array is an allocation of its own, so that memcheck sees its end, and begins full of NaN, so that a result that
holds memory which nobody wrote is wrong here too; with --fresh it begins as the driver gives it, for initcheck,
which does not see what the copy engine stores (cp.async.bulk) and reports other kernels that read it.
With --every-lane all lanes of a warp arrive at a barrier where else the first one speaks for them, since racecheck
follows single threads. LINATTN_CUDA_PORTABLE=1 takes the portable kernels. --only PATTERN takes the calls
whose name it matches.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from linattn_np.matrix_state.cuda.delta import plan as cuda_delta_plan
from linattn_np.matrix_state.cuda.free import plan as cuda_free_plan
from linattn_np.matrix_state.cuda.vector import plan as cuda_vector_plan
from linattn_np.sampling import DRAWS
from linattn_np.softmax.cuda import path_plan as cuda_path_plan
from linattn_np.softmax.cuda import plan as cuda_softmax_plan
from tests.softmax.terms import ROUNDING, cancelling

BOUND = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5, "tf32": 3e-3}  # of the norm; states grow along the tokens


class Case(NamedTuple):
    """One call and, with `backward`, its pullback."""

    fn: str
    dtype: str
    T: int
    K: int = 128
    V: int = 128
    heads: tuple[int, int, int] = (2, 2, 2)  # of queries, keys, values
    offsets: list[int] | None = None
    backward: bool = True
    raw: bool = False  # q and k of any length, a gate before its formula
    steps: int = 2  # of a token of DeltaProduct
    state: str = "float32"  # as it is stored; one of 16 bits is overwritten
    strong: bool = False  # log decays of 10 nats and more a token
    at: tuple[int, ...] | None = None  # positions whose states are returned
    window: int | None = None  # of softmax attention
    slots: int = 0  # of its cache, which is full and overwritten
    bound: float | None = None  # gate_lower_bound

    @property
    def name(self) -> str:
        kind = "ragged" if self.offsets else "grouped" if len(set(self.heads)) > 1 else "plain"
        kind += self.raw * " raw" + (self.fn == "delta_product") * f" steps={self.steps}"
        kind += (self.state != "float32") * f" state={self.state}" + self.strong * " strong"
        kind += "" if self.at is None else f" at={self.at}"
        kind += "" if self.window is None else f" window={self.window}"
        kind += f" slots={self.slots}" if self.slots else ""
        kind += "" if self.bound is None else f" bound={self.bound}"
        return f"{self.fn} {self.dtype} T={self.T} {self.K}x{self.V} {kind} {'both' if self.backward else 'forward'}"


CASES = [
    Case("simple_gla", "bfloat16", 150),
    Case("simple_gla", "bfloat16", 1100, heads=(1, 1, 1)),  # two segments
    Case("simple_gla", "bfloat16", 130, 128, 64, (4, 2, 2), [0, 70, 70, 130]),
    Case("linear_attention", "bfloat16", 70, 64, 64),
    Case("simple_gla", "float16", 70, 64, 40),
    Case("simple_gla", "float32", 140),
    Case("simple_gla", "float32", 1100, 64, 64, (1, 1, 1)),
    Case("simple_gla", "float32", 75, 60, 100, (2, 1, 1), [0, 33, 75]),
    Case("simple_gla", "float32", 40, 256, 256, (1, 1, 1)),
    Case("simple_gla", "tf32", 140),
    *(
        Case(fn, "bfloat16", T, backward=False)
        for fn in ("simple_gla", "gated_delta_rule", "kda", "rwkv7", "rwkv6")
        for T in (1, 3)
    ),
    Case("gated_delta_rule", "float32", 2, 60, 36, (4, 2, 2), backward=False),
    *(
        Case(fn, "bfloat16", T, backward=False, state=state)
        for fn, T, state in (
            ("simple_gla", 1, "bfloat16"),
            ("gated_delta_rule", 3, "bfloat16"),
            ("kda", 1, "float16"),
            ("rwkv7", 2, "float16"),
            ("rwkv6", 1, "bfloat16"),
        )
    ),
    Case("gated_delta_rule", "bfloat16", 1, heads=(256, 256, 256), backward=False, state="bfloat16"),  # eight warps
    Case("gated_delta_rule", "bfloat16", 1, 60, 36, (2, 1, 1), backward=False, state="bfloat16"),
    Case("kda", "bfloat16", 1, 7, 5, (2, 1, 1), backward=False, state="float16"),  # elements one by one
    # a step size, a skip and a gate
    Case("mamba2", "bfloat16", 70, 64, 64),
    Case("mamba2", "bfloat16", 1, heads=(1, 1, 4), backward=False),
    Case("mamba2", "float32", 33, 7, 5, (1, 1, 2), [0, 20, 33]),
    Case("gated_delta_rule", "bfloat16", 200),
    Case("gated_delta_rule", "bfloat16", 1100, heads=(1, 1, 1)),
    Case("gated_delta_rule", "bfloat16", 150, 128, 128, (2, 2, 4), [0, 80, 150]),
    Case("gated_delta_rule", "float32", 100, 64, 64),
    Case("delta_rule", "bfloat16", 70),
    # rows divided by their length, the gate's formula, sums over heads that share a key
    Case("gated_delta_rule", "bfloat16", 140, raw=True),
    Case("gated_delta_rule", "bfloat16", 1100, heads=(1, 1, 1), raw=True),
    Case("gated_delta_rule", "bfloat16", 150, 128, 128, (2, 2, 4), [0, 80, 80, 150], raw=True),
    Case("gated_delta_rule", "float32", 70, 60, 36, raw=True),
    *(Case(fn, "bfloat16", 3, heads=(2, 2, 4), backward=False, raw=True) for fn in ("gated_delta_rule", "kda")),
    # tokens of several steps, with a row of the queries a token
    Case("delta_product", "bfloat16", 50),
    Case("delta_product", "bfloat16", 33, heads=(4, 2, 2), offsets=[0, 20, 33], steps=4),
    Case("delta_product", "bfloat16", 140, heads=(1, 1, 1), steps=8),
    Case("delta_product", "bfloat16", 80, heads=(2, 2, 4), offsets=[0, 37, 37, 80], raw=True),
    Case("delta_product", "bfloat16", 30, steps=3),  # expanded to the steps
    # one decay a token and key channel: a scan, segments, chains of the delta rule; strong decays take the exact path
    Case("gla", "bfloat16", 150),
    Case("gla", "bfloat16", 1100, heads=(1, 1, 1)),
    Case("gla", "bfloat16", 130, 128, 64, (4, 2, 2), [0, 70, 70, 130]),
    Case("gla", "bfloat16", 150, strong=True),
    # blocks that have parts of several heads, and hand states over
    Case("gla", "bfloat16", 130, 64, 64, (140, 140, 140), backward=False),
    Case("gla", "bfloat16", 130, 64, 64, (140, 140, 140), backward=False, strong=True),
    # declared bounds: two groups of warps take turns at chunks, in three stages
    Case("gla", "bfloat16", 130, 64, 64, (140, 140, 140), backward=False, bound=-1.0),
    Case("gla", "bfloat16", 130, 64, 64, (140, 140, 140), backward=False, strong=True, bound=-1.0),
    Case("gla", "bfloat16", 700, bound=-1.0),
    Case("gla", "bfloat16", 330, 128, 64, (4, 2, 2), [0, 270, 270, 330], bound=-1.0),
    Case("gla", "bfloat16", 330, 128, 64, (4, 2, 2), [0, 270, 270, 330], strong=True, bound=-1.0),
    Case("rwkv6", "bfloat16", 100, 64, 64),
    Case("rwkv6", "bfloat16", 100, strong=True),
    Case("kda", "bfloat16", 150),
    Case("kda", "bfloat16", 150, strong=True),
    Case("kda", "bfloat16", 130, 64, 128, (2, 2, 4), [0, 70, 130]),
    Case("kda", "bfloat16", 1600, heads=(1, 1, 1)),
    Case("kda", "bfloat16", 1600, heads=(1, 1, 1), backward=False, strong=True),  # exact in segments
    Case("kda", "bfloat16", 130, 64, 128, (2, 2, 4), [0, 70, 130], backward=False, strong=True),
    Case("hgrn2", "bfloat16", 150),
    Case("hgrn2", "bfloat16", 130, 64, 64, (2, 2, 2), [0, 70, 130]),
    Case("gla", "bfloat16", 70, 200, 136),  # in blocks of keys and of values
    # token by token
    Case("gdn2", "float16", 70, backward=False),
    Case("gla", "float16", 50),
    Case("rwkv6", "float32", 40, 64, 64),
    Case("rwkv7", "float32", 60, 60, 36, (2, 1, 2), [0, 33, 60]),
    Case("kda", "float32", 40, 64, 256, (1, 1, 1)),
    Case("kda", "bfloat16", 140, raw=True, backward=False),
    # a free rank-one term
    Case("rwkv7", "bfloat16", 150),
    Case("rwkv7", "bfloat16", 150, strong=True),
    Case("rwkv7", "bfloat16", 130, 64, 64, (2, 2, 2), [0, 70, 130], strong=True),
    Case("dplr", "bfloat16", 130, 64, 128, (2, 2, 4), [0, 70, 130]),
    Case("iplr", "bfloat16", 70, 64, 40),
    Case("dplr", "bfloat16", 150, backward=False, at=(64, 150)),
    Case("gdn2", "bfloat16", 150),
    Case("gdn2", "bfloat16", 130, 64, 40, (2, 2, 2), [0, 70, 130], raw=True),
    # states at positions, stored by the pass; and their gradients
    Case("simple_gla", "bfloat16", 300, at=(64, 256, 300)),
    Case("simple_gla", "bfloat16", 200, 64, 64, offsets=[0, 90, 90, 200], at=(64, 90, 154)),
    Case("gated_delta_rule", "bfloat16", 200, 64, 128, (4, 2, 2), at=(64, 200)),
    Case("gla", "bfloat16", 150, at=(64, 128)),
    Case("gla", "bfloat16", 150, offsets=[0, 70, 150], at=(64, 134)),
    Case("kda", "bfloat16", 150, at=(64, 150)),
    # not covered by warpgroup products: widths, dtypes, separate erase vectors
    Case("gated_delta_rule", "bfloat16", 150, 60, 100, (2, 2, 2), [0, 80, 80, 150]),
    Case("gated_delta_rule", "bfloat16", 70, 50, 33, (2, 1, 1)),
    Case("gated_delta_rule", "bfloat16", 1100, 60, 36, (1, 1, 1)),
    Case("gated_delta_rule", "float16", 150, 64, 40, (2, 2, 4), [0, 80, 150]),
    Case("gated_delta_rule", "float16", 1100, 60, 36, (1, 1, 1)),
    Case("gated_delta_rule", "float32", 90, 60, 100, (2, 1, 1), [0, 33, 90]),
    Case("gated_delta_rule", "float32", 550, 60, 36, (1, 1, 1)),
    Case("gated_delta_rule", "float32", 40, 256, 192, (1, 1, 1)),
    Case("comba", "bfloat16", 150, 60, 100, (2, 2, 2), [0, 80, 150]),
    Case("comba", "bfloat16", 1100, 48, 40, (1, 1, 1)),
    Case("comba", "float16", 100, 48, 40, (1, 1, 2), raw=True),
    Case("comba", "float32", 70, 48, 40, (1, 1, 2)),
    # softmax attention: tiles of 128 tokens, the last one cut
    Case("softmax_attention", "bfloat16", 200),
    Case("softmax_attention", "bfloat16", 300, 64, 40, (4, 2, 2), [0, 130, 130, 300]),
    Case("softmax_attention", "float16", 300, 64, 128, window=140),
    Case("forgetting_attention", "bfloat16", 300, heads=(1, 1, 1)),
    Case("forgetting_attention", "bfloat16", 300, 64, 64, (4, 2, 2), [0, 130, 130, 300], strong=True),
    Case("forgetting_attention", "bfloat16", 400, 64, 64, (1, 1, 1), window=200),
    Case("alibi", "float16", 140, 60, 100),
    # portable kernels: float32, wide heads, caches
    Case("softmax_attention", "float32", 70, 60, 36, (4, 2, 2), [0, 33, 70]),
    Case("softmax_attention", "float32", 140, heads=(2, 1, 1)),
    Case("softmax_attention", "bfloat16", 70, 160, 136, (2, 1, 1), window=40),
    Case("forgetting_attention", "float32", 200, 32, 32, (2, 1, 2), [0, 140, 140, 200]),
    Case("forgetting_attention", "float16", 140, 50, 33, (2, 1, 1), window=70),
    Case("softmax_attention", "bfloat16", 1, 64, 64, (4, 2, 2), backward=False, slots=600),
    Case("forgetting_attention", "float32", 3, 40, 50, (4, 2, 2), backward=False, slots=70, window=60),
    Case("forgetting_attention", "bfloat16", 60, 33, 7, (2, 1, 1), [0, 5, 5, 60], backward=False, slots=40),
    # a linear system by blocks of 64, 32 or 16 tokens that wait for one another
    Case("deltaformer", "bfloat16", 200, 64, 64),
    Case("deltaformer", "bfloat16", 140, 50, 33, (4, 2, 2), [0, 65, 65, 140], strong=True),
    Case("deltaformer", "float32", 140, 32, 60, (2, 1, 2)),
    Case("deltaformer", "float16", 70, 160, 200, (1, 1, 1)),
    # shares of a stick: keys from the newest on, then back
    Case("stick_breaking_attention", "bfloat16", 200, 64, 64, (4, 2, 2), [0, 65, 65, 200]),
    Case("stick_breaking_attention", "float32", 140, 32, 60, (2, 1, 2)),
    Case("stick_breaking_attention", "float16", 70, 160, 200, (1, 1, 1)),
    Case("path_attention", "bfloat16", 300, 64, 64, (4, 2, 2), [0, 130, 130, 300], strong=True),
    Case("path_attention", "bfloat16", 1160, 64, 64, (1, 1, 1)),  # a group of blocks
    Case("path_attention", "bfloat16", 300, heads=(1, 1, 1)),
]
# whatever the dtype of the call; g too, unless it is raw
FLOAT32 = ("beta", "u", "A_log", "dt_bias", "A", "D", "sinks", "slopes")


def draw(case: Case) -> tuple[dict[str, np.ndarray], np.ndarray | None, np.ndarray]:
    """(arrays of a call, initial state, cotangent of the output), rounded as the call will see them, in float64."""
    fn, rng, (Hq, Hk, H) = getattr(la, case.fn), np.random.default_rng(0), case.heads
    sizes = {"T": case.T, "H": H, "Hq": Hq, "Hk": Hk, "K": case.K, "V": case.V, "n": case.steps}
    drawn = {}
    for n, given in fn.spec.arrays.items():
        if n not in ("gv", "bias") and (case.raw or not given.reinterprets):
            letters = given.axes.split("|")[0].split()
            shape = (1,) * (letters[0] == "T") + tuple(sizes[c] for c in letters)
            drawn[n] = DRAWS[fn.samples.distribution(n)](rng, shape)
    if case.raw:
        drawn |= {n: drawn[n] * rng.uniform(0.3, 3.0, (*drawn[n].shape[:-1], 1)) for n in ("q", "k")}
        drawn["g"] = rng.standard_normal(drawn["g"].shape)
    if case.strong:
        drawn["g"] = 30 * drawn["g"]
    drawn = {n: _round(x, _dtype(case, n)) for n, x in drawn.items()}
    many = () if case.offsets is None else (len(case.offsets) - 1,)
    state = None
    if "state" in fn.spec.core.STATE_AXES:  # the cache of softmax attention is empty
        state = _round(rng.standard_normal((*(many or (1,)), H, case.K, case.V)), case.state)
    if case.slots:
        state = _cache(case, rng, *(many or (1,)))
    return drawn, state, _round(rng.standard_normal((1, case.T, max(Hq, H), case.V)), case.dtype)


def _cache(case: Case, rng: np.random.Generator, N: int) -> Any:
    """A cache in float64, its keys and values rounded to the dtype of the call."""
    (Hq, Hk, H), L = case.heads, case.slots
    k, v = (_round(rng.standard_normal((N, L, *shape)), case.dtype) for shape in ((Hk, case.K), (H, case.V)))
    b = _round(-rng.random((N, L, Hq)), "float32")
    length = np.full(N, L + 5)
    return la.GatedCache(k, v, b, length) if case.fn == "forgetting_attention" else la.KeyValueCache(k, v, length)


def _dtype(case: Case, name: str) -> str:
    """Of an array of the call."""
    return "float32" if name in FLOAT32 or (name == "g" and not case.raw) else case.dtype


def _kind(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return {"tf32": np.float32}.get(name) or np.dtype(name)


def _round(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(_kind(dtype)).astype(np.float64)


def compute(case: Case, arrays: Any, state: Any, dout: Any, **options: Any) -> dict[str, Any]:
    """What the call gives, by name."""
    fn = getattr(la, case.fn)
    options |= {"state": state, "return_state": state is not None, "cu_seqlens": case.offsets}
    options |= {} if case.window is None else {"window": case.window}
    options |= {"qk_l2norm": True} if case.raw else {}
    options |= {} if case.at is None else {"return_states_at": case.at}
    options |= {} if case.bound is None else {"gate_lower_bound": case.bound}
    if case.slots:
        state = type(state)(*(x.copy() for x in state))
        out = fn(**arrays, **options | {"state": state, "overwrite_state": True, "return_state": False})
        return {"out": out} | state._asdict()
    if not case.backward:
        result = fn(**arrays, **options)
        return {"out": result} if state is None else result._asdict()
    result, pullback = la.vjp(fn, **arrays, **options)
    more = () if case.at is None else (None, result.states)
    results = {"out": result} if state is None else result._asdict()
    return results | {f"d{n}": d for n, d in pullback(dout, *more)._asdict().items() if d is not None}


def errors(cp: Any, case: Case) -> Iterator[tuple[str, float]]:
    """The error of each result, of the norm of the exact one; of deltaformer's also of the terms that cancel in it."""
    arrays, state, dout = draw(case)
    exact = compute(case, arrays, state, dout, backend="reference")
    there = {n: cp.asarray(x.astype(_kind(_dtype(case, n)))) for n, x in arrays.items()}
    options = {"precision": "tf32"} if case.dtype == "tf32" else {}
    options |= {} if case.state == "float32" else {"overwrite_state": True}
    if case.slots:
        kinds = {"k": case.dtype, "v": case.dtype}
        begun = type(state)(*(cp.asarray(x.astype(_kind(kinds.get(n, "float32")))) for n, x in state._asdict().items()))
    else:
        begun = None if state is None else cp.asarray(state.astype(_kind(case.state)))
    back = cp.asarray(dout.astype(_kind(case.dtype)))
    found = compute(case, there, begun, back, backend="cuda", **options)
    terms = cancelling(arrays, exact, dout, cu_seqlens=case.offsets) if case.fn == "deltaformer" else {}
    for n, x in exact.items():
        size = np.linalg.norm(x) + ROUNDING.get(case.dtype, 0.0) / BOUND[case.dtype] * terms.get(n, 0.0)
        yield n, float(np.linalg.norm(cp.asnumpy(found[n]).astype(np.float64) - x) / size)


def poisoned(cp: Any) -> Any:
    """An allocator of memory that is all ones, NaN in every format of floats, without a pool."""

    def allocate(size: int) -> Any:
        memory = cp.cuda.Memory(size)
        if size:
            cp.cuda.runtime.memset(memory.ptr, 0xFF, size)
        return cp.cuda.MemoryPointer(memory, 0)

    return allocate


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.sanitized", description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="new memory is not filled with NaN")
    parser.add_argument("--every-lane", action="store_true", help="every lane of a warp arrives at a barrier")
    parser.add_argument("--only", default="", help="the calls whose name this regular expression matches")
    args = parser.parse_args(argv)
    import cupy as cp

    backward = ("reverse_constants", "grads_constants")
    names = [
        (cuda_delta_plan, "constants"),
        (cuda_vector_plan, "constants"),
        (cuda_free_plan, "constants"),
        (cuda_softmax_plan, "constants"),
        (cuda_path_plan, "constants"),
    ]
    names += [(cuda_vector_plan, name) for name in backward]
    for plan, name in names if args.every_lane else ():
        constants = getattr(plan, name)
        setattr(plan, name, lambda *x, constants=constants, **y: (*constants(*x, **y), ("LA_ARRIVALS", 32)))
    cp.cuda.set_allocator(None if args.fresh else poisoned(cp))
    cases, wrong = [c for c in CASES if re.match(args.only, c.name)], 0
    if not cases:
        parser.error(f"--only {args.only!r} matches no call; their names: {'; '.join(c.name for c in CASES)}")
    for case in cases:
        try:
            found = dict(errors(cp, case))
        except ValueError as error:  # kernels that must be requested
            if "does not cover this call" not in str(error):
                raise
            sys.stdout.write(f"not run  {case.name}: {error}\n")
            continue
        worst = max(found, key=lambda n: np.nan_to_num(found[n], nan=np.inf))
        bad = not found[worst] <= BOUND[case.dtype]
        wrong += bad
        sys.stdout.write(f"{'WRONG' if bad else 'ok'}  {case.name}  {worst} {found[worst]:.2g}\n")
        sys.stdout.flush()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
