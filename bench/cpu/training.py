"""A step of training on a CPU against the same model in PyTorch, whose gated delta rule is transformers' fallback.

    python -m bench training [--threads 1 2] [--rounds 15] [--steps 200] [--write]

A byte model of 0.1 M parameters (2 layers of 64 channels, 2 heads), 8 x 256 random bytes a step, float32, AdamW with
clipping. Steps alternate. `ours, ranks`: as many ranks as threads, each of which has a thread and a part of the batch.
First both train for --steps steps from the same parameters; the largest difference of their losses is printed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench import record, timing
from linattn_np.call import replay
from linattn_np.distributed import in_threads
from linattn_np.runtime import threads

V, D, HEADS, LAYERS, B, T = 256, 64, 2, 2, 8, 256
RATE, REPEATS = 1e-3, 4  # steps of a call
Delta = Callable[..., Any]  # q, k, v, g, beta of torch (B, T, H, K) or (B, T, H): the outputs


class Twin(NamedTuple):
    """The model in torch; delta normalises q and k."""

    heads: int
    layers: int
    delta: Delta

    def loss(self, P: dict[str, Any], ids: Any, labels: Any) -> Any:
        """The mean cross-entropy."""
        import torch.nn.functional as F

        x = P["embedding/weight"][ids]
        for n in range(self.layers):
            p = below(P, f"blocks/{n}/")
            x = x + self.mixed(below(p, "mixer/"), normalised(x, p["norm1/weight"]))
            h = normalised(x, p["norm2/weight"])
            x = x + (h @ p["mlp/project/up/weight"] * F.silu(h @ p["mlp/project/gate/weight"])) @ p["mlp/down/weight"]
        logits = normalised(x, P["norm/weight"]) @ P["head/weight"]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def mixed(self, p: dict[str, Any], x: Any) -> Any:
        """The layer of Gated DeltaNet."""
        import torch.nn.functional as F

        heads = lambda y: y.unflatten(-1, (self.heads, -1))  # noqa: E731
        q, k, v = (heads(convolved(x @ p[f"project/{n}/weight"], p[f"{n}/conv/weight"])) for n in "qkv")
        g = -p["o/A_log"].exp() * F.softplus(x @ p["project/g/weight"] + p["o/dt_bias"])
        o = self.delta(q, k, v, g, (x @ p["project/beta/weight"]).sigmoid())
        return (normalised(o, p["norm/weight"]) * F.silu(heads(x @ p["project/z/weight"]))).flatten(-2) @ p[
            "out/weight"
        ]


def below(P: dict[str, Any], head: str) -> dict[str, Any]:
    return {path.removeprefix(head): x for path, x in P.items() if path.startswith(head)}


def convolved(x: Any, weight: Any) -> Any:
    import torch.nn.functional as F

    padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], groups=len(weight))).transpose(1, 2)


def normalised(x: Any, weight: Any) -> Any:
    import torch.nn.functional as F

    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


class Torch:
    """Training of the twin from the parameters of a run."""

    def __init__(self, twin: Twin, run: la.train.Run):
        import torch

        self.twin, self.losses = twin, list[float]()
        self.P = {n: torch.tensor(x, requires_grad=True) for n, x in run.params.arrays.items()}
        groups = [{"params": [x for x in self.P.values() if (x.ndim > 1) == decays], "weight_decay": 0.1 * decays}
                  for decays in (True, False)]  # fmt: skip
        self.optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def step(self, ids: np.ndarray, labels: np.ndarray, rate: float) -> None:
        """One step, with clipping at norm 1."""
        import torch

        loss = self.twin.loss(self.P, torch.tensor(ids), torch.tensor(labels))
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.P.values(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.losses.append(loss.item())


def fallback(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
    """transformers' chunk form."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    own = qwen.torch_chunk_gated_delta_rule
    chunk = getattr(own, "__wrapped__", own)
    return chunk(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=False)[0]


MODEL = la.layers.language_model(V, D=D, layers=LAYERS, heads=HEADS)


TEXT = la.train.Tokens([np.random.default_rng(0).integers(0, V, 400_000).astype(np.uint8)])


def trained(run: la.train.Run, count: int, rows: int = B, **options: Any) -> None:
    """`count` more steps of ours, of `rows` sequences each."""
    rate = la.train.constant(RATE)
    la.train.fit(MODEL.loss, run, TEXT.batches(rows, T), run.step + count, rate, bar=False, **options)


def difference(steps: int) -> float:
    """The largest difference of losses over steps from the same parameters."""
    run, batches = la.train.Run.start(MODEL.loss), TEXT.batches(B, T)
    peer = Torch(Twin(HEADS, LAYERS, fallback), run)
    trained(run, steps)
    for n in range(steps):
        peer.step(*batches(n), RATE)
    return float(np.abs(np.subtract(run.losses, peer.losses)).max())


def measure(count: int, rounds: int) -> dict[str, Any]:
    """A row: milliseconds of a step of each on `count` threads."""
    import torch

    os.environ["LINATTN_NUM_THREADS"] = str(count)
    replay.clear()  # plans are made for a number of threads
    torch.set_num_threads(count)
    run, each = la.train.Run.start(MODEL.loss), [la.train.Run.start(MODEL.loss) for _ in range(count)]
    peer = Torch(Twin(HEADS, LAYERS, fallback), run)
    batch = TEXT.batches(B, T)(0)

    def rank(comm: Any) -> None:
        with threads.limited(1):
            trained(each[comm.rank], REPEATS, B // count, accumulate=count, comm=comm)

    calls = {"ours": lambda: trained(run, REPEATS), "torch": lambda: [peer.step(*batch, RATE) for _ in range(REPEATS)]}
    if count > 1:
        calls["ours, ranks"] = lambda: in_threads(count, rank)
    found = timing.interleaved(calls, rounds)
    row: dict[str, Any] = {"threads": count}
    for name, x in found.items():
        row |= {f"{name}: {kind}": x[key] / REPEATS for kind, key in (("CPU ms", "cpu_ms"), ("ms", "wall_ms"))}
        row[f"{name}: quiet"] = x["quiet"]
    return row


def main(arguments: list[str]) -> int:
    parser = record.parser("training", __doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    what: dict[str, Any] = {"parameters": MODEL.loss.count, "batch": [B, T], "steps": options.steps}
    what["largest difference of losses"] = difference(options.steps)
    print(record.cells(what), flush=True)
    rows = []
    for count in options.threads:
        rows.append(measure(count, options.rounds))
        print(record.cells(rows[-1]), flush=True)
    if options.write:
        print(record.write("training", record.rounded(what | {"rows": rows})))
    return 0
