"""The pieces of linattn_np.nn on a GPU: their share of the rate at which the device copies the same bytes.

    python -m bench pieces --backend cuda [--only rms_norm] [--no-peers] [--seconds 60] [--write]

bfloat16, arrays of (8, 4096, 4096) numbers. The bytes of a call are those that it must read and write once. Beside the
pieces of the table of aims stand PyTorch's own functions and FLA's Triton modules where they are installed: forward,
and forward with backward by their autograd. Processes compile their kernels side by side before anything is measured;
their tuning runs alone. No peer begins after --seconds, and the record says so.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench import record
from bench.cuda import passes, report, timing

SHAPE, HEAD, WORDS = (8, 4096, 4096), 128, 32768
Peers = dict[str, Callable[..., Any]]


class Case(NamedTuple):
    """A call, the shapes of its arrays, the arrays that its forward and its backward move, in (8, 4096, 4096) numbers.

    aims: the shares of the copy rate that forward and backward should reach, 0 for none; of those, peers are measured.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    moved: tuple[float, float]
    options: dict[str, Any] = {}  # noqa: RUF012
    label: str = ""
    aims: tuple[float, float] | None = None


B, T, D = SHAPE
HEADS = (B, T, D // HEAD, HEAD)
SILU = {"activation": "silu"}
CASES = [
    Case("short_conv", (SHAPE, (D, 4)), (2, 3), SILU, aims=(0.88, 0.65)),
    Case("short_conv", (SHAPE, (D, 4), (D,)), (2, 3), SILU | {"residual": True}, "bias, residual"),
    Case("rms_norm", (HEADS, (HEAD,)), (2, 3), aims=(0.82, 0.75)),
    Case("gated_norm", (HEADS, HEADS, (HEAD,)), (3, 5), aims=(0.82, 0.75)),
    Case("l2_norm", (HEADS,), (2, 3), aims=(0.85, 0)),
    Case("rotary", (HEADS,), (2, 2), aims=(0.85, 0)),
    Case("swiglu", (SHAPE, SHAPE), (3, 5), aims=(0.85, 0)),
    *(Case(n, ((B, T * D // width, width), *((width,),) * arrays), (2, 3), {}, f"rows of {width}")
      for width in (1024, D, 8192) for n, arrays in (("rms_norm", 1), ("layer_norm", 2))),
    Case("group_norm", (SHAPE, (D,), (D,)), (2, 3), {"groups": 32}),
    Case("gated_norm", (SHAPE, SHAPE, (D,)), (3, 5), {"gate_first": True}, "wide, gate first"),
    Case("xpos", (HEADS,), (2, 2), {"scale_base": 1e5}),
    Case("softmax", (HEADS,), (2, 3)),
    Case("token_shift", (SHAPE,), (2, 2)),
    Case("token_shift", (SHAPE, (D,)), (2, 3), {}, "mix"),
    Case("cross_entropy", ((4096, WORDS), (4096,)), (1, 2)),
    Case("embedding", ((B, T), (B * T, D)), (2, 2)),
    Case("dropout", (SHAPE,), (2, 2), {"rng": 0}),
    *(Case(n, (SHAPE,), (2, 3)) for n in ("sigmoid", "silu", "softplus", "gelu", "squared_relu", "log_sigmoid")),
]  # fmt: skip
WHOLE = {"cross_entropy": (1, WORDS), "embedding": (0, B * T)}  # which array has integers, below which number


def torch_peers(case: Case) -> Peers:
    """PyTorch's functions of the arrays of a case."""
    import torch
    import torch.nn.functional as F

    def convolution(x: Any, w: Any, b: Any = None) -> Any:
        y = F.conv1d(x.transpose(1, 2), w[:, None], b, padding=3, groups=len(w))[..., : x.shape[1]]
        y = F.silu(y).transpose(1, 2)
        return y + x if case.options.get("residual") else y

    found: dict[str, Callable[..., Any]] = {
        "short_conv": convolution, "rms_norm": lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
        "layer_norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b), "l2_norm": lambda x: F.normalize(x, dim=-1),
        "group_norm": lambda x, w, b: F.group_norm(x.flatten(0, 1), 32, w, b),
        "gated_norm": lambda x, g, w: F.rms_norm(x, w.shape, w, 1e-6) * F.silu(g),
        "softmax": lambda x: F.softmax(x, -1),
        "swiglu": lambda x, g: x * F.silu(g), "cross_entropy": lambda x, labels: F.cross_entropy(x, labels),
        "sigmoid": torch.sigmoid, "silu": F.silu, "softplus": F.softplus, "gelu": F.gelu, "log_sigmoid": F.logsigmoid,
    }  # fmt: skip
    return {"torch": found[case.name]} if case.name in found else {}


def fla_peers(case: Case) -> Peers:
    """FLA's Triton modules."""
    import torch
    from fla.modules import activations, convolution, fused_norm_gate, l2norm, layernorm, rotary

    place = torch.arange(T, device="cuda")[:, None] * 10000 ** (-torch.arange(HEAD // 2, device="cuda") / (HEAD // 2))
    cos, sin = (f(place).to(torch.bfloat16) for f in (torch.cos, torch.sin))

    def conv(x: Any, w: Any, b: Any = None) -> Any:
        y = convolution.causal_conv1d(x, w, b, residual=x if case.options.get("residual") else None, activation="silu")
        return y[0] if isinstance(y, tuple) else y

    found: dict[str, Callable[..., Any]] = {
        "short_conv": conv, "rms_norm": lambda x, w: layernorm.rms_norm(x, w, None, eps=1e-6),
        "layer_norm": lambda x, w, b: layernorm.layer_norm(x, w, b, eps=1e-5), "l2_norm": lambda x: l2norm.l2norm(x),
        "gated_norm": lambda x, g, w: fused_norm_gate.rms_norm_gated(x, g, w, None, "swish", eps=1e-6),
        "rotary": lambda x: rotary.rotary_embedding(x, cos, sin), "swiglu": lambda x, g: activations.swiglu(g, x),
    }  # fmt: skip
    known = case.name in found and not case.options.get("gate_first")
    return {"fla": found[case.name]} if known else {}


def drawn(cp: Any, case: Case, seed: int) -> list[Any]:
    """The arrays of a case."""
    import ml_dtypes

    rng, (whole, below) = cp.random.default_rng(seed), WHOLE.get(case.name, (None, 0))
    return [rng.integers(0, below, shape) if n == whole
            else rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16)
            for n, shape in enumerate(case.shapes)]  # fmt: skip


def measured(cp: Any, case: Case, copy_gbs: float) -> dict[str, Any]:
    """Milliseconds, and shares of the copy rate."""
    fn, sets = getattr(la.nn, case.name), [drawn(cp, case, seed) for seed in range(2)]
    forwards = [functools.partial(fn, *arrays, **case.options) for arrays in sets]
    backwards = []
    for arrays in sets:
        y, pullback = la.vjp(fn, *arrays, **case.options)
        d = cp.random.default_rng(5).standard_normal(y.shape, dtype=np.float32).astype(y.dtype)
        backwards.append(functools.partial(pullback, d))
        del y
    size = 2 * float(np.prod(SHAPE))
    row: dict[str, Any] = {"piece": name_of(case)}
    for n, (name, calls) in enumerate((("forward", forwards), ("backward", backwards))):
        ms = timing.median_ms(cp, calls * 2)
        row |= {f"{name} ms": ms, f"{name} share": case.moved[n] * size / ms / 1e6 / copy_gbs}
        if case.aims is not None and case.aims[n]:
            row[f"{name} aim"] = case.aims[n]
    return row


def name_of(case: Case) -> str:
    return f"{case.name} {case.label}".strip()


def one_token(cp: Any) -> dict[str, Any]:
    """One token of 128 sequences, with rows of a pool: microseconds in a graph, and of the host."""
    import ml_dtypes

    bf16 = ml_dtypes.bfloat16
    x, taps, pool = (cp.ones(shape, np.float32).astype(bf16) for shape in ((128, 1, D), (D, 4), (256, 3, D)))
    rows = cp.arange(128) * 2
    call = functools.partial(la.nn.short_conv, x, taps, activation="silu", state=pool, state_rows=rows,
                             overwrite_state=True)  # fmt: skip
    return {"piece": "short_conv one token of 128 sequences", "graph us": timing.graph_ms(cp, [call] * 4) * 1e3,
            "host us": timing.host_us(cp, call)}  # fmt: skip


def compiled_peers(cases: list[Case]) -> list[subprocess.Popen[bytes]]:
    """Processes that run each peer once, so that its kernels are in Triton's cache."""
    code = "from bench.cuda import pieces; pieces.run_peers_once({})"
    return [subprocess.Popen([sys.executable, "-c", code.format(CASES.index(case))], stderr=subprocess.DEVNULL)
            for case in cases]  # fmt: skip


def run_peers_once(number: int) -> None:
    """Forward and backward of the peers of a case."""
    import cupy as cp

    timing.median_ms = lambda cp, calls, *_: [call() for call in calls[:1]] and 0.0
    peer_times(cp, CASES[number], [drawn(cp, CASES[number], 0)])


def peer_times(cp: Any, case: Case, sets: list[list[Any]]) -> dict[str, Any]:
    """Milliseconds of peers, forward and with backward, or why there are none."""
    row: dict[str, Any] = {}
    try:
        import torch
    except ImportError:
        return row
    tensors = [[torch.from_dlpack(x if x.dtype.kind == "i" else x.view(cp.int16)) for x in arrays] for arrays in sets]
    tensors = [
        [x if x.dtype == torch.int64 else x.view(torch.bfloat16).requires_grad_() for x in one] for one in tensors
    ]
    for make in (torch_peers, fla_peers):
        try:
            for name, fn in make(case).items():
                with torch.no_grad():
                    row[f"{name} ms"] = timing.median_ms(cp, [functools.partial(fn, *one) for one in tensors * 2])
                y = fn(*tensors[0])
                d = torch.ones_like(y)
                del y

                def both(one: list[Any], fn: Callable[..., Any] = fn, d: Any = d) -> None:
                    torch.autograd.grad(fn(*one), [x for x in one if x.requires_grad], d)

                row[f"{name} both ms"] = timing.median_ms(cp, [functools.partial(both, one) for one in tensors])
        except Exception as error:  # a peer that is not installed, or does not support the case
            row |= {make.__name__: passes.failure(error)["failed"]}
        torch.cuda.empty_cache()
    return row


def main(arguments: list[str]) -> int:
    parser = record.parser("pieces --backend cuda", __doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no peer begins later than this")
    options, began = parser.parse_args(arguments), time.monotonic()
    os.environ.setdefault("FLA_CACHE_RESULTS", "0")  # what is tuned beside other processes is not used
    import cupy as cp

    cases = [case for case in CASES if options.only in ("", case.name)]
    beside = [] if options.no_peers else [case for case in cases if case.aims is not None]
    waiting = compiled_peers(beside)
    for case in cases:  # so that our own kernels are compiled, too
        _first_call(cp, case)
    for process in waiting:
        process.wait()
    copy_gbs = timing.copy_gbs(cp)
    print({"copy GB/s": copy_gbs, "seconds": time.monotonic() - began}, flush=True)
    rows = []
    for case in cases:
        rows.append(measured(cp, case, copy_gbs))
        print(record.cells(rows[-1]), flush=True)
        cp.get_default_memory_pool().free_all_blocks()
    if options.only in ("", "short_conv"):
        rows.append(one_token(cp))
        print(record.cells(rows[-1]), flush=True)
    result = report.device(cp) | {"dtype": "bfloat16", "copy_gbs": copy_gbs, "rows": rows}
    if options.write:
        record.write("cuda_pieces", result)
    for case in beside:
        row = next(row for row in rows if row["piece"] == name_of(case))
        if time.monotonic() - began > options.seconds:
            row["peers"] = f"not measured after {options.seconds:g} s"
            continue
        row |= peer_times(cp, case, [drawn(cp, case, seed) for seed in range(2)])
        print(record.cells(row), flush=True)
        cp.get_default_memory_pool().free_all_blocks()
    if options.write:
        print(record.write("cuda_pieces", result))
    return 0


def _first_call(cp: Any, case: Case) -> None:
    """Forward and backward once."""
    y, pullback = la.vjp(getattr(la.nn, case.name), *drawn(cp, case, 0), **case.options)
    pullback(cp.ones(y.shape, np.float32).astype(y.dtype))
