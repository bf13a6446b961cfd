"""transformers' models on a CPU with linattn_np and without: one layer's operations, and a small model end to end.

    python -m bench transformers [--threads 2] [--rounds 5] [--tokens 2048] [--prompt 512] [--write]

The layer has Qwen3-Next's shape, 16 key and 32 value heads of 128: the chunk form forward, forward and backward, and
one cached token with the update of the cache, which are the operations that the model calls. The model is a Qwen3-Next
of 4 layers and hidden size 256, float32: prefill of a prompt, cached decoding of single tokens, one training step.
Calls alternate; of every number the least of all rounds counts, of wall time and of the process's CPU time, since
other programs only add to them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

HEADS, KEY_HEADS, D = 32, 16, 128
DECODED = 8  # tokens of a decoding sample
Sample = tuple[float, float]  # wall and CPU milliseconds
Calls = dict[str, Callable[[], Sample]]  # by "ours" and "theirs"


def timed(call: Callable[[], Any], repeats: int = 1) -> Sample:
    """Milliseconds of one call, of `repeats` in a row after one that is not counted if there are several."""
    if repeats > 1:
        call()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - wall) * 1e3 / repeats, (time.process_time() - cpu) * 1e3 / repeats


def compared(calls: Calls, rounds: int) -> dict[str, Any]:
    """Least wall and CPU milliseconds of alternating calls, and the ratios theirs / ours."""
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    for n in range(rounds + 1):
        for name, call in calls.items():
            sample = call()
            samples[name] += [sample] if n else []  # the first one compiles and allocates
    least = {name: [min(s[i] for s in found) for i in (0, 1)] for name, found in samples.items()}
    row: dict[str, Any] = {name: {"wall_ms": wall, "cpu_ms": cpu} for name, (wall, cpu) in least.items()}
    return row | {"ratio": least["theirs"][0] / least["ours"][0], "cpu_ratio": least["theirs"][1] / least["ours"][1]}


def layer(tokens: int) -> dict[str, Calls]:
    """The operations of one layer, ours and transformers' torch functions."""
    import torch
    from transformers.cache_utils import LinearAttentionLayer
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    from linattn_np.bridges.transformers import patch_transformers

    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn")
    theirs = {n: getattr(qwen, n).__wrapped__ for n in names}
    with patch_transformers(["qwen3_next"]):
        ours = {n: getattr(qwen, n) for n in names}
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, tokens, KEY_HEADS, D)
    v, g, beta = torch.randn(1, tokens, HEADS, D), -torch.rand(1, tokens, HEADS), torch.rand(1, tokens, HEADS)
    mixed, weight = torch.randn(1, tokens, (2 * KEY_HEADS + HEADS) * D), torch.randn((2 * KEY_HEADS + HEADS) * D, 4)

    def forward(fns: Any) -> Any:
        with torch.no_grad():
            return fns[names[0]](q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=True)

    def both(fns: Any) -> None:
        x = [y.clone().requires_grad_() for y in (q, k, v, g, beta)]
        fns[names[0]](*x[:3], g=x[3], beta=x[4], use_qk_l2norm_in_kernel=True)[0].sum().backward()

    def token(fns: Any) -> Callable[[], None]:
        cache = LinearAttentionLayer()
        cache.update_recurrent_state(torch.zeros(1, HEADS, D, D))
        one = [y[:, :1].contiguous() for y in (q, k, v, g, beta)]

        def call() -> None:
            with torch.no_grad():
                _, state = fns[names[1]](*one[:3], g=one[3], beta=one[4], initial_state=cache.recurrent_states[0],
                                         output_final_state=True, use_qk_l2norm_in_kernel=True)  # fmt: skip
                cache.update_recurrent_state(state)

        return call

    def convolution(fns: Any) -> Any:
        with torch.no_grad():
            return fns[names[2]](mixed.transpose(1, 2), weight, None, activation="silu")

    tokens_of = {"ours": token(ours), "theirs": token(theirs)}
    pairs = {"ours": ours, "theirs": theirs}
    return {
        "layer forward": {n: lambda f=f: timed(lambda: forward(f)) for n, f in pairs.items()},
        "layer forward and backward": {n: lambda f=f: timed(lambda: both(f)) for n, f in pairs.items()},
        "layer, one cached token": {n: lambda f=f: timed(f, 20) for n, f in tokens_of.items()},
        "short convolution": {n: lambda f=f: timed(lambda: convolution(f)) for n, f in pairs.items()},
    }


def model(tokens: int, heads: tuple[int, int, int]) -> dict[str, Calls]:
    """A small Qwen3-Next; heads: (key heads, value heads, width)."""
    import torch
    import transformers

    from linattn_np.bridges.transformers import patch_transformers

    keys, values, width = heads
    config = transformers.Qwen3NextConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, linear_num_key_heads=keys, linear_num_value_heads=values, linear_key_head_dim=width,
        linear_value_head_dim=width, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
        shared_expert_intermediate_size=128, pad_token_id=0, eos_token_id=None)  # fmt: skip
    torch.manual_seed(0)
    net, ids = transformers.Qwen3NextForCausalLM(config).float(), torch.randint(1, 512, (1, tokens))

    def prefill() -> Sample:
        with torch.no_grad():
            return timed(lambda: net.eval()(ids, use_cache=True))

    def decode() -> Sample:
        with torch.no_grad():
            past = net.eval()(ids[:, :64], use_cache=True).past_key_values
            return timed(lambda: net(ids[:, :1], past_key_values=past, use_cache=True), DECODED)

    def train() -> Sample:
        net.train().zero_grad()
        return timed(lambda: net(ids, labels=ids, use_cache=False).loss.backward())

    def patched(call: Callable[[], Sample]) -> Sample:
        with patch_transformers(["qwen3_next"]):
            return call()

    calls = {"prefill": prefill, "decoding, one token": decode, "training step": train}
    return {f"{name}, {keys}/{values} heads of {width}": {"ours": lambda f=f: patched(f), "theirs": f}
            for name, f in calls.items()}  # fmt: skip


def main(argv: list[str]) -> int:
    from bench import record

    parser = record.parser("transformers", __doc__)
    parser.add_argument("--threads", default="2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048, help="of the layer")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the model")
    args = parser.parse_args(argv)
    os.environ.update(dict.fromkeys(("LINATTN_NUM_THREADS", "OMP_NUM_THREADS"), args.threads))
    import torch
    import transformers

    torch.set_num_threads(int(args.threads))
    transformers.utils.logging.set_verbosity_error()
    rows: dict[str, Any] = {}
    result = {"threads": int(args.threads), "tokens": args.tokens, "prompt": args.prompt, "compared": rows, "peers": {
        "torch": torch.__version__, "transformers": transformers.__version__}}  # fmt: skip
    for name, calls in (*layer(args.tokens).items(), *model(args.prompt, (4, 8, 64)).items(),
                        *model(args.prompt, (KEY_HEADS, HEADS, D)).items()):  # fmt: skip
        rows[name] = row = compared(calls, args.rounds)
        times = [f"{who} {row[who]['wall_ms']:9.3f} ms (CPU {row[who]['cpu_ms']:9.3f})" for who in ("ours", "theirs")]
        print(f"{name:42s} {'  '.join(times)}  ratio {row['ratio']:5.1f} (CPU {row['cpu_ratio']:5.1f})", flush=True)
        if args.write:  # after every row: a run on a busy machine may be stopped
            record.write("transformers", record.rounded(result))
    return 0
