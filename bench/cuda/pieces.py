"""The pieces of linattn_np.nn on a GPU: their share of the rate at which the device copies the same bytes.

    python -m bench pieces --backend cuda [--only rms_norm] [--no-peers] [--write]

bfloat16, arrays of (8, 4096, 4096) numbers. The bytes of a call are those that it must read and write once. Beside each
piece stand PyTorch's own functions and FLA's Triton modules where they are installed: forward, and forward with
backward by their autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench import record
from bench.cuda import passes, timing

SHAPE, HEAD, WORDS = (8, 4096, 4096), 128, 32768
Peers = dict[str, Callable[..., Any]]


class Case(NamedTuple):
    """A call, the shapes of its arrays, the arrays that its forward and its backward move, peers by name."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    moved: tuple[float, float]
    options: dict[str, Any] = {}  # noqa: RUF012
    label: str = ""


B, T, D = SHAPE
HEADS = (B, T, D // HEAD, HEAD)
CASES = [
    Case("short_conv", (SHAPE, (D, 4)), (2, 3), {"activation": "silu"}),
    Case("short_conv", (SHAPE, (D, 4), (D,)), (2, 3), {"activation": "silu", "residual": True}, "bias, residual"),
    Case("rms_norm", (HEADS, (HEAD,)), (2, 3)),
    Case("rms_norm", (SHAPE, (D,)), (2, 3), {}, "wide"),
    Case("layer_norm", (SHAPE, (D,), (D,)), (2, 3), {}, "wide"),
    Case("group_norm", (SHAPE, (D,), (D,)), (2, 3), {"groups": 32}),
    Case("l2_norm", (HEADS,), (2, 3)),
    Case("gated_norm", (HEADS, HEADS, (HEAD,)), (3, 5)),
    Case("gated_norm", (SHAPE, SHAPE, (D,)), (3, 5), {"gate_first": True}, "wide, gate first"),
    Case("rotary", (HEADS,), (2, 2)),
    Case("xpos", (HEADS,), (2, 2), {"scale_base": 1e5}),
    Case("swiglu", (SHAPE, SHAPE), (3, 5)),
    Case("softmax", (HEADS,), (2, 3)),
    Case("token_shift", (SHAPE, (D,)), (2, 3)),
    Case("cross_entropy", ((4096, WORDS), (4096,)), (1, 2)),
    *(Case(n, (SHAPE,), (2, 3)) for n in ("sigmoid", "silu", "softplus", "gelu", "squared_relu", "log_sigmoid")),
]


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
    """The arrays of a case; the second one of cross_entropy is its labels."""
    import ml_dtypes

    rng = cp.random.default_rng(seed)
    arrays = [rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16) for shape in case.shapes]
    if case.name == "cross_entropy":
        arrays[1] = rng.integers(0, WORDS, case.shapes[1])
    return arrays


def measured(cp: Any, case: Case, copy_gbs: float, peers: bool) -> dict[str, Any]:
    """Milliseconds, and shares of the copy rate."""
    fn, sets = getattr(la.nn, case.name), [drawn(cp, case, seed) for seed in range(2)]
    forwards = [functools.partial(fn, *arrays, **case.options) for arrays in sets]
    backwards = []
    for arrays in sets:
        y, pullback = la.vjp(fn, *arrays, **case.options)
        backwards.append(functools.partial(pullback, drawn(cp, case, 5)[0] if y.ndim else cp.ones_like(y)))
        del y
    size = 2 * float(np.prod(case.shapes[0]))
    row: dict[str, Any] = {"piece": f"{case.name} {case.label}".strip()}
    for name, calls, moved in zip(("forward", "backward"), (forwards, backwards), case.moved, strict=True):
        ms = timing.median_ms(cp, calls * 2)
        row |= {f"{name} ms": ms, f"{name} share": moved * size / ms / 1e6 / copy_gbs}
    del forwards, backwards
    if peers:
        row |= peer_times(cp, case, sets)
    return row


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
    options, rows = parser.parse_args(arguments), []
    import cupy as cp

    copy_gbs = timing.copy_gbs(cp)
    print({"copy GB/s": copy_gbs}, flush=True)
    for case in CASES:
        if options.only in ("", case.name):
            rows.append(measured(cp, case, copy_gbs, not options.no_peers))
            print(record.cells(rows[-1]), flush=True)
            cp.get_default_memory_pool().free_all_blocks()
    if options.write:
        print(record.write("cuda_pieces", {"dtype": "bfloat16", "copy_gbs": copy_gbs, "rows": rows}))
    return 0
