"""A program: random calls of a bridge, right and wrong ones, beside the same calls on NumPy arrays.

    python -m tests.bridges.arguments.fuzz torch|jax|dask|onnx|transformers SEED COUNT

Where NumPy raises, the bridge must raise a TypeError or ValueError that begins with a function's name; where NumPy
computes, the bridge must compute the same numbers, or refuse in such an error. Prints what does neither, then counts.
"""

from __future__ import annotations

import collections
import faulthandler
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import ml_dtypes
import numpy as np

import linattn_np as la
from linattn_np.call.foreign import leaves
from linattn_np.testing import sampling
from tests.cases import in_dtype

DTYPES = (np.float32, np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
BOUND = {"float64": 1e-9, "float32": 1e-3, "float16": 1e-2, "bfloat16": 6e-2}
ODD: tuple[Any, ...] = (None, "nothing", 3.0, [1.0], {}, True)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "scale": ("x", float("nan"), 1j, True, 0.3), "chunk_size": (0, -1, 2.5, "x", 1, 4, "parallel"),
    "cu_seqlens": ([0, 3, 2], [0, 1 << 40], [-1, 5], [1, 5], [0], [], 5, "a", [0, 1.5]), "reverse": (1, "x", True),
    "return_states_at": ([-1], [99], [3, 1], "all", [1.5], [0], 2), "layout": ("x", 1, "heads_first"),
    "state": ("x", 1.0, (1, 2), np.zeros(3), {}), "num_threads": (0, "2", 1),
    "backend": ("x", 1, "chunks", "reference"),
    "state_rows": ([0], [-2], [99], "a", [0.5]), "overwrite_state": (True, 1), "return_state": (1, True),
    "precision": ("fp16",), "unknown": (1,), "check": (1, True),
}  # fmt: skip
SINGLE = "overwrite_state"  # calls in place are tested elsewhere


class Call(NamedTuple):
    """A function by name, its arguments as NumPy arrays and plain values, and whether they are meant to be wrong."""

    fn: str
    given: dict[str, Any]
    is_wrong: bool


def draw(rng: np.random.Generator, names: tuple[str, ...] = ()) -> Call:
    """A call of a variant."""
    fn = la.VARIANTS[rng.integers(len(la.VARIANTS))] if not names else getattr(la, str(rng.choice(names)))
    lead = ((), (2,), (1,), (2, 1))[rng.integers(4)]
    T, H, K, V = int(rng.choice((0, 1, 1, 2, 5, 17, 40))), *(int(n) for n in rng.integers(1, 5, 3))
    dtype = DTYPES[rng.integers(len(DTYPES))]

    def arrays(T: int) -> dict[str, Any]:
        x = sampling.sample(fn, rng, B=lead, T=T, H=H, K=2 * K, V=V, optional=bool(rng.integers(2)))
        return {n: in_dtype(y, dtype) for n, y in x.items()}

    given: dict[str, Any] = arrays(T)
    if rng.random() < 0.4:
        given["return_state"] = True
    if rng.random() < 0.3:
        with np.errstate(all="ignore"):
            given["state"] = fn(**arrays(3), return_state=True)[1]
    elif rng.random() < 0.3 and lead in ((), (1,)):
        given["cu_seqlens"] = sorted([0, *rng.integers(0, T + 1, 2).tolist(), T])
    if rng.random() < 0.2:
        given["chunk_size"] = int(rng.integers(1, 9))
    wrong = rng.random() < 0.5
    for _ in range(int(rng.integers(1, 3)) if wrong else 0):
        spoil(rng, given)
    return Call(fn.__name__, given, wrong)


def spoil(rng: np.random.Generator, given: dict[str, Any]) -> None:
    """Change one argument."""
    names = [n for n, x in given.items() if isinstance(x, np.ndarray)]
    if rng.random() < 0.3 or not names:
        name = str(rng.choice(list(OPTIONS)))
        given[name] = OPTIONS[name][rng.integers(len(OPTIONS[name]))]
        return
    name = str(rng.choice(names))
    given[name] = changed(rng, given[name])


def changed(rng: np.random.Generator, x: np.ndarray) -> Any:
    """Another argument in the place of an array."""
    how, axis = int(rng.integers(9)), int(rng.integers(max(x.ndim, 1)))
    if how == 0 or not x.ndim:
        return ODD[rng.integers(len(ODD))]
    if how == 1:
        return x.take(range(max(x.shape[axis] - 1, 0)), axis)
    if how == 2:
        return np.concatenate([x, x[(slice(None),) * axis + (slice(0, 1),)]], axis)
    if how == 3:
        return x[(slice(None),) * axis + (slice(0, 0),)]
    if how == 4:
        return x[..., None] if rng.random() < 0.5 else x[None]
    if how == 5:
        return x.sum(axis)
    if how == 6:
        return x.astype((np.int32, np.complex64, np.bool_, np.int64, np.uint8)[rng.integers(5)])
    return np.swapaxes(x, axis, int(rng.integers(x.ndim))) if how == 7 else x.astype(DTYPES[rng.integers(5)])


# outcomes


def outcome(call: Callable[[], Any]) -> Any:
    """The numbers of a result as a list of arrays, or its error."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return [None if x is None else numbers(x) for x in leaves(call())]  # (dtype, numbers) of each
        except Exception as error:
            return error


def numbers(x: Any) -> tuple[str, np.ndarray]:
    """The dtype by name and the numbers, in double precision, of an array of any library."""
    kind = str(x.dtype).rsplit(".", 1)[-1]
    if type(x).__module__.partition(".")[0] == "torch":
        x = x.detach().double().numpy()
    x = np.asarray(x.compute() if hasattr(x, "compute") else x)
    return kind, x.astype(np.float64)


def difference(found: Any, wanted: Any, names: tuple[str, ...], bound: float) -> str | None:
    """What is wrong with an outcome beside NumPy's; "refused" where only the bridge refuses a call."""
    if isinstance(found, Exception):
        clear = isinstance(found, TypeError | ValueError) and str(found).partition(":")[0] in names
        if not clear:
            return f"unclear {type(found).__name__}: {str(found)[:200]}"
        return None if isinstance(wanted, Exception) else f"refused: {str(found)[:160]}"
    if isinstance(wanted, Exception):
        return f"accepted, where NumPy says {str(wanted)[:160]}"
    if len(found) != len(wanted):
        return f"{len(found)} results, expected {len(wanted)}"
    for x, y in zip(found, wanted, strict=True):
        if x is None or y is None:
            if x is not y:
                return "a result is None"
            continue
        (kind, a), (like, b) = x, y
        if (kind, a.shape) != (like, b.shape) and like is not None:
            return f"{kind}{a.shape}, expected {like}{b.shape}"
        if a.size:
            scale = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))
            if not np.allclose(a, b, 0, bound * scale, equal_nan=True):
                return f"numbers differ by {np.nanmax(np.abs(a - b))} of {scale}"
    return None


def bound_of(call: Call) -> float:
    kinds = {str(x.dtype) for part in call.given.values() for x in leaves(part) if isinstance(x, np.ndarray)}
    return max([BOUND[kind] for kind in kinds if kind in BOUND], default=1e-3)


# bridges: each yields (a name, its outcome, that of NumPy, names of functions in errors, bound)

Outcome = tuple[str, Any, Any, tuple[str, ...], float]


def variants(
    rng: np.random.Generator, bring: Callable[[np.random.Generator, np.ndarray], Any], own: Callable[..., Iterator[Any]]
) -> Outcome:
    """A variant on arrays of a library, by one of several ways: own(rng, fn, given, NumPy's) yields (call, NumPy's)."""
    call = draw(rng)
    fn = getattr(la, call.fn)
    theirs = {n: brought(x, lambda y: bring(rng, y)) for n, x in call.given.items()}
    way, found, wanted = own(rng, fn, theirs, call.given)
    return f"{call.fn} {way} {shown(call.given)}", outcome(found), outcome(wanted), (call.fn, "vjp"), bound_of(call)


def brought(x: Any, bring: Callable[[np.ndarray], Any]) -> Any:
    """Arrays, and those in tuples, in another library."""
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(brought(y, bring) for y in x))
    return bring(x) if isinstance(x, np.ndarray) else x


def shown(given: dict[str, Any]) -> str:
    return ", ".join(f"{n}={x.dtype}{x.shape}" if isinstance(x, np.ndarray) else
                     f"{n}=({type(x).__name__})" if isinstance(x, tuple) else f"{n}={x!r}"
                     for n, x in given.items())  # fmt: skip


def pulled(fn: Any, given: dict[str, Any], cotangent: Callable[[Any], Any]) -> Callable[[], Any]:
    """The gradients of a call for a cotangent of ones."""

    def call() -> Any:
        result, pullback = la.vjp(fn, **given)
        out = result[0] if isinstance(result, tuple) else result
        return () if out is None else tuple(pullback(cotangent(out)))

    return call


def several(cotangent: Callable[[Any], Any]) -> Callable[..., Any]:
    """Plain calls and pullbacks."""

    def own(rng: np.random.Generator, fn: Any, theirs: dict[str, Any], plain: dict[str, Any]) -> Any:
        if rng.random() < 0.7 or SINGLE in plain:
            return "", lambda: fn(**theirs), lambda: fn(**plain)
        return "vjp", pulled(fn, theirs, cotangent), pulled(fn, plain, np.ones_like)

    return own


def torch_calls(rng: np.random.Generator) -> Outcome:
    import torch

    plain = several(torch.ones_like)

    def own(rng: np.random.Generator, fn: Any, theirs: dict[str, Any], given: dict[str, Any]) -> Any:
        tensors = [n for n, x in theirs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if rng.random() < 0.7 or not tensors or "return_states_at" in given:
            return plain(rng, fn, theirs, given)
        theirs = theirs | {n: theirs[n].clone().requires_grad_() for n in tensors}

        def followed() -> Any:
            result = fn(**theirs)
            out = result[0] if isinstance(result, tuple) else result
            return torch.autograd.grad(out, [theirs[n] for n in tensors], torch.ones_like(out), allow_unused=True,
                                       materialize_grads=True)  # fmt: skip

        def wanted() -> Any:
            result, pullback = la.vjp(fn, **given)
            grads = pullback(np.ones_like(result[0] if isinstance(result, tuple) else result))
            return tuple(getattr(grads, n) for n in tensors)

        return "autograd", followed, wanted

    return variants(rng, to_torch, own)


def to_torch(rng: np.random.Generator, x: np.ndarray) -> Any:
    import torch

    if x.dtype == ml_dtypes.bfloat16:
        y = torch.from_numpy(np.array(x.view(np.int16))).view(torch.bfloat16)
    else:
        y = torch.from_numpy(np.array(x))
    if y.ndim > 1 and rng.random() < 0.3:  # strides of another order
        y = y.transpose(0, -1).contiguous().transpose(0, -1)
    return y


def jax_calls(rng: np.random.Generator) -> Outcome:
    import jax
    import jax.numpy as jnp

    plain = several(jnp.ones_like)

    def own(rng: np.random.Generator, fn: Any, theirs: dict[str, Any], given: dict[str, Any]) -> Any:
        arrays = {n: x for n, x in theirs.items() if isinstance(x, jax.Array) and n != "state"}
        if rng.random() < 0.95 or not arrays:
            return plain(rng, fn, theirs, given)
        rest = {n: x for n, x in theirs.items() if n not in arrays}
        return "jit", lambda: jax.jit(lambda given: fn(**given, **rest))(arrays), lambda: fn(**given)

    return variants(rng, lambda _, x: jnp.asarray(x), own)


def dask_calls(rng: np.random.Generator) -> Outcome:
    import dask
    import dask.array as da

    dask.config.set(scheduler="synchronous")

    def bring(rng: np.random.Generator, x: np.ndarray) -> Any:
        return da.from_array(x, chunks=tuple(max(1, n - int(rng.integers(2))) for n in x.shape))

    return variants(rng, bring, several(da.ones_like))


def onnx_calls(rng: np.random.Generator) -> Outcome:
    from onnx.reference.ops import op_linear_attention as standard

    from linattn_np.bridges.onnx import NEEDS, linear_attention

    rule, (B, T, H, K, V) = str(rng.choice(list(NEEDS))), (int(n) for n in rng.integers(1, 6, 5))
    Hq = H * int(rng.integers(1, 3))
    x = {"query": (B, T, Hq * K), "key": (B, T, H * K), "value": (B, T, H * V)}
    x |= {"decay": (B, T, H * (K if rng.integers(2) else 1))} if "decay" in NEEDS[rule] else {}
    x |= {"beta": (B, T, H)} if "beta" in NEEDS[rule] else {}
    x |= {"past_state": (B, H, K, V)} if rng.integers(2) else {}
    given: dict[str, Any] = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in x.items()}
    given |= {n: -np.abs(given[n]) for n in ("decay",) if n in given} | {"update_rule": rule}
    given |= {"q_num_heads": Hq, "kv_num_heads": H}
    wrong = rng.random() < 0.5
    if wrong:
        name = str(rng.choice(list(given)))
        odd = (0, -1, 2.5, "x", None, 7)
        given[name] = changed(rng, given[name]) if isinstance(given[name], np.ndarray) else odd[rng.integers(6)]
    operator = standard.LinearAttention.__new__(standard.LinearAttention)
    found = outcome(lambda: linear_attention(**given))
    wanted = found if wrong and not isinstance(found, Exception) else outcome(lambda: operator._run(**given))
    names = ("LinearAttention", *(fn.__name__ for fn in la.VARIANTS))
    return f"LinearAttention {shown(given)}", found, wanted, names, 1e-3


CALLED = {"chunk_gated_delta_rule": "gated_delta_rule", "fused_recurrent_gated_delta_rule": "gated_delta_rule",
          "chunk_kda": "kda", "fused_recurrent_kda": "kda", "chunk_gla": "gla", "chunk_delta_rule": "delta_rule",
          "chunk_simple_gla": "simple_gla", "chunk_gdn2": "gdn2", "chunk_comba": "comba",
          "mamba_chunk_scan_combined": "mamba2"}  # fmt: skip


def transformers_calls(rng: np.random.Generator) -> Outcome:
    """What patched layers call: functions of FLA, mamba_ssm and causal_conv1d."""
    from linattn_np.bridges import fla, mamba_ssm

    if rng.random() < 0.3:
        return conv_calls(rng)
    theirs = str(rng.choice(list(CALLED)))
    fn = getattr(la, CALLED[theirs])
    B, T, H, K, V = (int(n) for n in rng.integers(1, 6, 5))
    given: dict[str, Any] = sampling.sample(fn, rng, B=(B,), T=T, H=H, K=K, V=V, optional=False)
    if "g" in fn.spec.arrays:
        given |= sampling.sample(fn, rng, B=(B,), T=T, H=H, K=K, V=V) if "g" not in given else {}
    given = {n: x.astype(np.float32) for n, x in given.items() if n not in ("A_log", "dt_bias", "gv")}
    if rng.random() < 0.5:
        names = list(given)
        for name in rng.choice(names, int(rng.integers(1, 3))):
            given[name] = changed(rng, given[name]) if isinstance(given[name], np.ndarray) else 3
    tensors = {n: brought(x, lambda y: to_torch(rng, y)) for n, x in given.items()}
    if theirs.startswith("mamba"):
        found = outcome(lambda: mamba_ssm.mamba_chunk_scan_combined(**tensors, chunk_size=8))
        wanted = outcome(lambda: fn(**given))
    else:
        call = getattr(fla, theirs)
        found = outcome(lambda: call(**tensors, scale=0.5, output_final_state=True))
        wanted = outcome(lambda: fn(**given, scale=0.5, return_state=True))
    if any(given.get(n, 0) is None for n in ("g", "beta")) and not isinstance(found, Exception):
        wanted = found  # None means no decay and ones there
    return f"{theirs} {shown(given)}", found, wanted, (theirs,), 1e-3


def conv_calls(rng: np.random.Generator) -> Outcome:
    """The convolution, by the formula, and updates of its state."""
    from linattn_np.bridges.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

    B, D, T, W = (int(n) for n in rng.integers(1, 7, 4))
    given: dict[str, Any] = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in (
        ("x", (B, D, T)), ("weight", (D, W)), ("bias", (D,)), ("conv_state", (B, D, W - 1)))}  # fmt: skip
    steps = bool(rng.integers(2))
    if rng.random() < 0.5:
        name = str(rng.choice(list(given)))
        given[name] = changed(rng, given[name])
    tensors = {n: brought(x, lambda y: to_torch(rng, y)) for n, x in given.items()}

    def found() -> Any:
        if steps:
            return causal_conv1d_update(**tensors, activation="silu"), tensors["conv_state"]
        rest = {n: x for n, x in tensors.items() if n != "conv_state"}
        return causal_conv1d_fn(**rest, initial_states=tensors["conv_state"], return_final_states=True,
                                activation="silu")  # fmt: skip

    def wanted() -> Any:
        x, w, b, S = (given[n] for n in ("x", "weight", "bias", "conv_state"))
        if steps and getattr(x, "ndim", 0) == 2:
            y, end = formula(x[..., None], w, b, S, steps)
            return y[..., 0], end
        return formula(x, w, b, S, steps)

    fn = "causal_conv1d_update" if steps else "causal_conv1d_fn"
    return f"{fn} {shown(given)}", outcome(found), outcome(wanted), (fn,), bound_of(Call(fn, given, False))


def formula(x: Any, w: Any, b: Any, S: Any, steps: bool) -> Any:
    """(y, the last inputs) token by token. Raises ValueError for shapes that do not fit."""
    each = [y for y in (x, w, S, b) if y is not None or y is not b]
    floats = all(isinstance(y, np.ndarray) and str(y.dtype) in BOUND for y in each)
    optional = S is None and not steps
    if not (floats or (optional and all(isinstance(y, np.ndarray) and str(y.dtype) in BOUND for y in (x, w)))):
        raise ValueError("no arrays")
    if x.ndim != 3 or w.ndim != 2 or w.shape[1] < 1:
        raise ValueError("axes")
    (B, D, T), W = x.shape, w.shape[1]
    S = np.zeros((B, D, W - 1), x.dtype) if optional else S
    fits = S.ndim == 3 and S.shape[:2] == (B, D) and (S.shape[2] >= W - 1 if steps else S.shape[2] == W - 1)
    if w.shape[0] != D or not fits or (b is not None and b.shape != (D,)):
        raise ValueError("sizes")
    past = np.concatenate([S, x], -1).astype(np.float64)
    first = S.shape[2] - (W - 1)
    y = np.stack([(past[..., first + t : first + t + W] * w).sum(-1) for t in range(T)], -1) if T else x * 1.0
    y = y if b is None else y + b[:, None].astype(np.float64)
    end = past[..., past.shape[-1] - S.shape[2] :]
    return (y / (1 + np.exp(-y))).astype(x.dtype), end.astype((S if steps else x).dtype)


BRIDGES = {"torch": torch_calls, "jax": jax_calls, "dask": dask_calls, "onnx": onnx_calls,
           "transformers": transformers_calls}  # fmt: skip


def main(bridge: str, seed: int, count: int) -> int:
    faulthandler.enable()
    counts: collections.Counter[str] = collections.Counter()
    for n in range(seed, seed + count):
        what, found, wanted, names, bound = BRIDGES[bridge](np.random.default_rng(n))
        text = difference(found, wanted, names, bound)
        kind = "clear error" if isinstance(found, Exception) and text is None else "right" if text is None else "other"
        counts["refused by the bridge alone" if text and text.startswith("refused") else kind] += 1
        if text is not None:
            print(f"{n}: {what}: {text}", file=sys.stderr if text.startswith("refused") else sys.stdout)
    print(f"{bridge}: {count} calls from seed {seed}: {dict(counts)}", file=sys.stderr)
    return int(counts["other"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
