"""The GPU sections of performance.md, for make_performance.py: tables of bench/results/cuda_*.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import exp
from typing import Any

from performance_pictures import BARS, TOKENS

Table = Callable[[list[str], list[list[str]]], str]
CHUNKS = """\
`python -m bench simple_gla --backend cuda`, (B, T, H, K = V), nanoseconds per token and head.

- forward, both: calls queued back to back; graph: a replayed CUDA graph; loop: a plain loop that includes host time.
- share: bytes that must move (each array once per pass) over the {copy_gbs:.0f} GB/s of a copy.
- MiB: peak memory beyond the inputs, forward and backward.
- Retention and linear attention have no gate gradient; Mamba-2 has dt and A, without D and z; tf32 is float32 with
  `precision="tf32"`; mma.sync in bfloat16 is the portable path, forced."""
ERRORS = """\
Errors relative to the norm, against float64 on the same rounded inputs, with gates of 0, 0.001, 0.05, 5 per token and
resets side by side. The last column is the worst head, relative to its own norm."""
PEERS = """\
Others: kernels of other libraries on the same arrays, forward and both. FLA's autotuner tried every candidate for a
shorter time than by default. FLA rejects a gated backward with this Triton version on Hopper; that check was disabled.
Its float32 products are tf32, Triton's default. SDPA is PyTorch's causal softmax attention, another operator."""
STEPS = """\
`python -m bench step --backend cuda`. Microseconds per call, H = 32, K = V = 128, vectors in bfloat16, gates and states
in float32, states overwritten in place and in rotation. graph: a replayed CUDA graph; loop: a plain loop; host: time of
the host. share: bytes that must move over the {copy_gbs:.0f} GB/s of a copy. FLA's kernel writes a new state and is
autotuned in every process, with varying results (simple_gla at B = 32 took 44 us in one run and 56 in another)."""
STORED = """\
The same with states stored in 16 bits (`--state`):"""
SCALING = """\
`python -m bench scaling --backend cuda`: simple GLA, {dtype}, K = V = {K}. Chunk form and recurrent form, one sequence
of 32 heads, milliseconds:"""
DELTA = """\
`python -m bench gated_delta_rule --backend cuda`. Nanoseconds per token and value head, calls queued back to back;
graph: a replayed CUDA graph. Portable: mma.sync, forced. share: bytes that must move (each array once per pass) over
the {copy_gbs:.0f} GB/s of a copy. MiB: peak memory beyond the inputs, forward and backward, including results."""
DELTA_ERRORS = """\
Errors relative to the norm, against float64 on the same rounded inputs. With equal keys, strength 1 and no decay the
gate gradient is nearly 0, and its relative error is meaningless."""
VECTOR = """\
`python -m bench vector_decay --backend cuda`: one decay per token and key channel, bfloat16, (B, T, H, K = V),
nanoseconds per token and head, calls queued back to back. both: forward and pullback; graph: a replayed CUDA graph of
the forward. Gates: mild ones of 0 to -0.05 per token (`rwkv7`, `dplr`: -0.6); strong: -5 in every channel; exact:
channels of up to 60 nats per token and resets, where every head takes the exact path; declared: `gate_lower_bound=-1`.
share: bytes that must move in the forward (each array once) over the {copy_gbs:.0f} GB/s of a copy. MiB: peak memory
beyond the inputs, results included, forward and both. A first call of `kda` and its pullback take {first:.2g} s with
empty caches, {later:.2g} s in a new process with filled ones."""
VECTOR_ERRORS = """\
Errors relative to the norm, against float64 on the same rounded inputs. none: no decay; equal keys: one key at every
token, erased as a whole."""
TRAINING = """\
`python -m bench training --backend cuda`: byte models of `gated_delta_rule` and SwiGLU, {dtype} with float32 masters,
AdamW with clipping, a batch of random tokens from the host and its loss back in every step. ms: a step as one CUDA
graph; calls: the same step without one, with the same losses. products: the model's dense products alone, forward and
both gradients, in one graph."""
STATE_LOG = """\
A `StateLog` of the gated delta rule on {gpu}, {date}: H = {H}, K = V = {D}, float32 tokens, logs of {length} tokens;
times of CUDA graphs (`python -m bench state_log --backend cuda`). A token is the mean of the {length} between two
flushes; trees and chains are {nodes} nodes. Times its bytes: checkpoint, tokens and entries of the log at the rate of a
copy, {copy_gbs:.0f} GB/s."""
STATES = """\
`python -m bench states --backend cuda`: calls with states at {states} positions relative to calls with none, {B} x {H}
heads, {dtype}, every T / {states} tokens. floor: the bytes of these float32 states, written by the forward and read
once more by its backward, at the {copy_gbs:.0f} GB/s of a copy, as a share of the call without them. A call that is
bound by memory cannot cost less."""
VECTOR_PEERS = """\
Others: kernels of other libraries in the run of the row, on the same arrays, forward and both; cuDNN's gradients take g
as float32. FLA's autotuner had few candidates (4 warps, 2 or 3 stages); with all of them its kernels have been faster
than here. It rejects a gated backward with this Triton version on Hopper; that check was disabled."""
VECTOR_MORE = """\
Other widths and slots (64), (B, T, H, K, V), {date}, before portable chunks of 16 tokens existed. Where both is
missing, gradients are computed by array calls."""
ATTENTION = """\
`python -m bench softmax --backend cuda`: causal attention, (B, T, H / heads of keys and values, K = V), nanoseconds per
token and query head, calls queued back to back; both: forward and pullback. TFLOP/s count 2 (K + V) operations for each
pair that is read, 2.5 times as many backward, also for pairs without weights, which calls with gates skip
([why](../decisions/softmax.md)). Where nothing is said gates are sigmoids around 0.95. Peers on the same arrays in the
same run, and their time relative to ours; FLA's autotuner had few candidates. A product of square bfloat16 matrices
runs at {matrix_tflops:.0f} TFLOP/s."""
ATTENTION_ERRORS = """\
Errors relative to the norm, against float64 on the same rounded inputs, T = 1023:"""
PATH = """\
`python -m bench path_attention --backend cuda`: (B, T, H, K = V), bfloat16, nanoseconds per token and head; both:
forward and pullback. FLA's kernels on the same arrays in the same run, w and beta in float32, its few tuned kernels
with two candidates; what it was not timed for is empty. Errors of our gradients are at most {error:.2g} of the norm."""
SYSTEM = """\
`python -m bench deltaformer --backend cuda`: (B, T, H, K = V), w = q, strengths that are sigmoids of normal numbers,
bfloat16, nanoseconds per token and head; array calls on the same arrays in the same run. Errors are at most {error:.2g}
of the norm."""
CACHES = """\
`python -m bench portable_attention --backend cuda`: T tokens after a full cache of L slots, which is overwritten,
(B, L, T, H / heads of keys and values, K = V), microseconds per call, caches in rotation. graph: a replayed CUDA graph;
loop: a plain loop; host: time of the host. floor: the graph's time over that of reading the cache at 4.8 TB/s, the
vendor's rate (with decays, $b$ is read and written). PyTorch attends to the same arrays in the same run and appends
nothing."""
PIECES = """\
`python -m bench pieces --backend cuda`: `la.nn`, {dtype}, arrays of 8 x 4096 x 4096 numbers (the loss: 4096 x 32768),
on an H200, calls queued back to back. share: bytes that must move, each array once per pass, over the
{copy_gbs:.0f} GB/s of a copy. aims: the shares that were asked for. {token[piece]}: {token[graph us]:.1f} us in a
replayed CUDA graph, {token[host us]:.0f} us of the host a call."""
PORTABLE = """\
Causal calls by portable kernels, as in the section before:"""


def sections(results: dict[str, Any], machine: Callable[[dict[str, Any]], str], table: Table) -> list[str]:
    """A section for each result file in NAMES that exists."""
    parts: list[str] = []
    for name, words in NAMES.items():
        if name in results:
            title, *more = words(results[name], table)
            parts += [f"## {title}", machine(results[name]), *more]
    return parts


def ns(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}" if x >= 1 else f"{x:.3f}"


def _case(row: dict[str, Any]) -> str:
    return "({B}, {T}, {H}, {K})".format(**row) + f" {row['dtype']}"


def chunks(result: dict[str, Any], table: Table) -> Iterator[str]:
    """Scalar decay: this library, then peers."""
    yield "On a GPU: scalar decay"
    yield CHUNKS.format(**result)
    body = []
    for row in result["rows"]:
        tokens, times = row["B"] * row["T"] * row["H"] / 1e6, row["times"]
        apart = " *" if "measured_apart" in row else ""
        cells = [f"`{row['function']}` {_case(row)}, {row['passes']}{apart}"]
        for name in ("forward", "both"):
            x = times[name]
            cells += [ns(x["ns"]), ns(x["graph_ms"] / tokens), ns(x["eager_ms"] / tokens)]
            cells.append(f"{100 * x['share_of_copy']:.0f}")
        body.append([*cells, f"{times['both']['peak_bytes'] / 2**20:.0f}", _others(times)])
    head = ["case", "forward", "graph", "loop", "share, %", "both", "graph", "loop", "share, %", "MiB", "others"]
    yield table(head, body)
    yield PEERS
    yield from _apart(result)
    yield from _published_and_first_calls(result, table)
    errors = [[name, *(f"{x[n]:.2g}" for n in ("out", "dq", "dk", "dv", "dg")), f"{max(x['dg by head']):.2g}"]
              for name, x in result["errors"].items()]  # fmt: skip
    yield ERRORS
    yield table(["dtype", "out", "dq", "dk", "dv", "dg", "dg by head"], errors)


def _published_and_first_calls(result: dict[str, Any], table: Table) -> Iterator[str]:
    if "published" in result:
        yield f"Published, not measured here: {result['published']['source']}."
        yield table(
            ["(B, T, heads of q and k, of v)", "pass", "library", "ns per token and value head"],
            [[str(tuple(x["case"])), x["what"], x["library"], ns(x["ns"])] for x in result["published"]["rows"]],
        )
    first = {name: " + ".join(f"{1e3 * s:.0f} ms" for s in x.values()) for name, x in result["first_call"].items()}
    yield "First call of a fresh process, forward + backward: " + "; ".join(f"{n}: {x}" for n, x in first.items()) + "."


def _apart(result: dict[str, Any]) -> Iterator[str]:
    if any("measured_apart" in row for row in result["rows"]):
        yield "\\* measured in a separate run; its peers in an earlier one (at most a day before)."


def delta(result: dict[str, Any], table: Table) -> Iterator[str]:
    """The delta rule: this library and FLA."""
    yield "On a GPU: the gated delta rule"
    yield DELTA.format(**result)
    body = []
    columns = ("forward", "backward", "backward, recomputed", "forward, portable", "backward, portable")
    missing = [n for n in columns if not any(n in row["times"] for row in result["rows"])]
    if missing:
        raise KeyError(f"cuda_gated_delta_rule.json: no row has {missing}")
    for row in result["rows"]:
        times = row["times"]
        of_peer = {w: next((x for n, x in times.items() if n.startswith(f"{w}: ")), {}) for w in ("forward", "both")}
        case = _case(row) + (f", {row['Hk']} key heads" if row["Hk"] < row["H"] else "")
        case += " *" if "measured_apart" in row else ""
        found = [times.get(n, {}) for n in columns]
        body.append(
            [
                case,
                *(ns(x.get("ns")) for x in found[:1]),
                ns(times["forward"]["graph_ns"]),
                f"{100 * times['forward']['share_of_copy']:.0f}",
                *(ns(x.get("ns")) for x in found[1:]),
                f"{times['both']['peak_bytes'] / 2**20:.0f}",
                ns(of_peer["forward"].get("ns")),
                ns(of_peer["both"].get("ns")),
            ]
        )
    yield table(
        [
            "case",
            "forward",
            "graph",
            "share, %",
            "backward",
            "blocks recomputed",
            "forward, portable",
            "backward, portable",
            "MiB",
            "FLA forward",
            "FLA both",
        ],
        body,
    )
    yield from _apart(result)
    yield from _published_and_first_calls(result, table)
    names = ("out", "dq", "dk", "dv", "dg", "dbeta")
    yield DELTA_ERRORS
    if any("measured_apart" in row for row in result["rows"]):
        yield "FLA's errors are from another run that day, with another draw of the same inputs."
    yield table(["dtype", "inputs", "library", *names], [
        [dtype, kind, library.split(" chunk")[0], *(f"{x[n]:.3g}" if n in x else "" for n in names)]
        for dtype, kinds in result["errors"].items() for kind, found in kinds.items() for library, x in found.items()
    ])  # fmt: skip


def _others(times: dict[str, Any]) -> str:
    """Other libraries' times, forward and both, by name."""
    found = []
    for name in dict.fromkeys(n.split(": ", 1)[1] for n in times if ": " in n):
        each = [ns(times.get(f"{what}: {name}", {}).get("ns")) for what in ("forward", "both")]
        found.append(f"{'SDPA' if 'SDPA' in name else _short(name)} {', '.join(filter(None, each))}")
    return "; ".join(found)


def vector(result: dict[str, Any], table: Table) -> Iterator[str]:
    """A decay per channel."""
    yield "On a GPU: vector decay"
    seconds = [sum(run.values()) for run in result["first_call"].values()]
    yield VECTOR.format(**result, first=seconds[0], later=seconds[1])
    body: list[list[str]] = []
    for row in result["rows"]:
        x, both = row["times"]["forward"], row["times"]["both"]
        sizes = "({B}, {T}, {H}, {K})".format(**row)
        sizes += "" if row.get("dtype", "bfloat16") == "bfloat16" else f" {row['dtype']}"
        sizes += " *" * ("measured_apart" in row)
        body.append([f"`{row['function']}` {sizes}", row["gate"],
                     row["gates"] + ", declared" * (row.get("bound") is not None), ns(x["ns"]), ns(x["graph_ns"]),
                     ns(both["ns"]), f"{100 * x['share_of_copy']:.0f}",
                     *(f"{y['peak_bytes'] / 2**20:.0f}" for y in (x, both)), _others(row["times"])])  # fmt: skip
    head = ["case", "dtype of g", "gates", "forward", "graph", "both", "share, %", "MiB", "MiB, both", "others"]
    yield table(head, body)
    yield from _apart(result)
    yield f"![Time of each function, of other libraries, the least time for the bytes](pictures/{BARS})"
    names = ["out", "dq", "dk", "dv", "dg", "dbeta", "du", "da", "db", "dw"]
    yield VECTOR_PEERS
    yield VECTOR_ERRORS
    yield table(["case", "library", *names],
                [[name, _short(library), *(f"{x[n]:.3g}" if n in x else "" for n in names)]
                 for name, found in result["errors"].items() for library, x in found.items()])  # fmt: skip
    if "apart" in result:
        yield from _vector_apart(result["apart"], table)


def _short(library: str) -> str:
    """Name, version and function of a library, without what else its name says."""
    return library.split(", ")[0]


def _vector_apart(apart: dict[str, Any], table: Table) -> Iterator[str]:
    """Other widths."""
    yield VECTOR_MORE.format(**apart)
    yield table(["case", "dtype", "forward", "both"],
                [[f"`{row['function']}` " + "({B}, {T}, {H}, {K}, {V})".format(**row), row["dtype"],
                  ns(row["forward_ns"]), ns(row.get("both_ns"))] for row in apart["rows"]])  # fmt: skip


def steps(result: dict[str, Any], table: Table) -> Iterator[str]:
    """One token: this library and FLA."""
    yield "On a GPU: one token"
    yield STEPS.format(**result)
    head = ["variant", "B", "T", "graph", "share, %", "loop", "host", "copy of the state"]
    body = []
    for row in result["rows"]:
        peer = row.get("peer", {})
        body.append(_step(row) + [f"{peer[n]:.1f}" if n in peer else "" for n in ("graph_us", "host_us")])
    if "peers_measured_apart" in result:
        yield "FLA's figures are from another run that day."
    yield table([*head, "FLA, graph", "FLA, host"], body)
    if "stored_states" in result:
        yield STORED
        yield table(
            [head[0], "state", *head[1:]],
            [[x[0], row["state"], *x[1:]] for row in result["stored_states"] for x in [_step(row)]],
        )


def _step(row: dict[str, Any]) -> list[str]:
    return [
        f"`{row['variant']}`",
        str(row["B"]),
        str(row["T"]),
        f"{row['graph_us']:.1f}",
        f"{100 * row['share_of_copy']:.0f}",
        f"{row['eager_us']:.1f}",
        f"{row['host_us']:.1f}",
        f"{row['copy_of_state_us']:.1f}",
    ]


def states(result: dict[str, Any], table: Table) -> Iterator[str]:
    """Calls with states at positions."""
    yield "On a GPU: states at positions"
    yield STATES.format(**result)
    body = [[f"`{row['function']}` T = {row['T']}, K = V = {row['D']}, {row['where']}, {row['what']}",
             f"{row['none_ms']:.3f}", f"{row['states_ms']:.3f}", f"{row['percent']:.1f} %",
             f"{row['floor_percent']:.1f} %"] for row in result["rows"]]  # fmt: skip
    yield table(["call", "none, ms", "with states, ms", "more", "floor"], body)


def state_log(result: dict[str, Any], table: Table) -> Iterator[str]:
    """A StateLog: tokens, flushes, trees and chains."""
    yield "On a GPU: `StateLog`"
    yield STATE_LOG.format(**result)
    body = [[row["state"], row["what"], str(row["rows"]), f"{row['us']:.1f}",
             f"{row['bytes'] / 1e6:.0f}" if "bytes" in row else "",
             f"{row['times_floor']:.2f}" if "times_floor" in row else "",
             f"{row['la.step / this']:.2f}" if "la.step / this" in row else ""]
            for row in result["rows"]]  # fmt: skip
    yield table(["state", "what", "sequences", "us", "MB", "times its bytes", "`la.step` / this"], body)


def training(result: dict[str, Any], table: Table) -> Iterator[str]:
    """A step of training, and what its products take."""
    yield "On a GPU: a step of training"
    yield TRAINING.format(**result)
    yield table(
        ["model", "parameters", "tokens", "ms", "calls, ms", "products, ms", "share, %", "tokens/s"],
        [[row["case"], f"{row['parameters']:,}", f"{row['tokens']:,}", f"{row['ms']:.2f}",
          f"{row['ms without a graph']:.1f}", f"{row['products ms']:.2f}", f"{100 * row['share']:.0f}",
          f"{row['tokens/s']:.3g}"] for row in result["rows"]],
    )  # fmt: skip


def scaling(result: dict[str, Any], table: Table) -> Iterator[str]:
    """Chunk form and recurrent form, segments, length."""
    yield "On a GPU: scaling"
    yield SCALING.format(**result)
    yield f"![Time against T, both axes logarithmic](pictures/{TOKENS})"
    yield table(["T", *(str(row["T"]) for row in result["tokens"])],
                [[name, *(f"{row[key]:.3g}" for row in result["tokens"])]
                 for name, key in (("chunks", "chunks_ms"), ("recurrence", "recurrence_ms"))])  # fmt: skip
    yield "One sequence of 8192 tokens, with automatic segments and without segments; milliseconds:"
    cells = [(f"{how.replace('_', ' ')}, {what}", how, f"{what}_ms") for how in ("as_chosen", "uncut")
             for what in ("forward", "both") if f"{what}_ms" in result["heads"][0][how]]  # fmt: skip
    yield table(
        ["heads", *(str(row["heads"]) for row in result["heads"])],
        [[name, *(f"{row[how][key]:.3g}" for row in result["heads"])] for name, how, key in cells],
    )
    yield "2^20 tokens of 4 heads, in sequences of T tokens; millions of tokens per second:"
    yield table(["T", *(str(row["T"]) for row in result["length"])],
                [[what, *(f"{row[f'{what}_tokens_s'] / 1e6:.0f}" for row in result["length"])]
                 for what in ("forward", "both")])  # fmt: skip


def attention(result: dict[str, Any], table: Table) -> Iterator[str]:
    """Softmax attention and its peers."""
    yield "On a GPU: softmax attention"
    yield ATTENTION.format(**result)
    body: list[list[str]] = []
    for row in result["rows"]:
        call = f"`{row['function']}` ({row['B']}, {row['T']}, {row['H']} / {row['Hk']}, {row['K']}) {row['dtype']}"
        call += f", window {row['window']}" if row["window"] else ""
        call += f", gates around {1 / (1 + exp(-row['bias'])):.4f}" if row.get("bias", 3) != 3 else ""
        call += " *" if "measured_apart" in row else ""
        call += " **" if row.get("measured_apart", {}).get("how") else ""
        names = dict.fromkeys(n.partition(": ")[2] for n in row["times"] if ": " in n)
        body += [_attention(row["times"], call, name) for name in ("", *names)]
    yield table(["call", "library", "forward", "TFLOP/s", "ratio", "both", "TFLOP/s", "ratio"], body)
    yield from _apart(result)
    for how in dict.fromkeys(row.get("measured_apart", {}).get("how") for row in result["rows"]):
        yield from [f"\\*\\*: {how}."] * bool(how)
    yield ATTENTION_ERRORS
    names = ["out", "dq", "dk", "dv", "dg"]
    yield table(["call", "library", *names],
                [[f"`{case.partition(',')[0]}`{case.partition(',')[1]}{case.partition(',')[2]}", library,
                  *(f"{e[n]:.2g}" if n in e else "" for n in names)]
                 for case, each in result["errors"].items() for library, e in each.items()])  # fmt: skip


def _attention(times: dict[str, Any], call: str, name: str) -> list[str]:
    """A row of this library (no name) or of a peer."""
    cells = [call if not name else "", name or "linattn_np"]
    for what in ("forward", "both"):
        own, x = times[what], times[f"{what}: {name}" if name else what]
        failed = "ms" not in x
        cells += [""] * 3 if failed else [f"{x['ns']:.2f}", f"{own['tflops'] * own['ms'] / x['ms']:.0f}",
                                          f"{x['ms'] / own['ms']:.2f}" if name else ""]  # fmt: skip
    return cells


def path(
    result: dict[str, Any], table: Table, title: str = "PaTH attention", words: str = PATH, peers: str = "FLA"
) -> Iterator[str]:
    """PaTH attention and FLA; DeltaFormer and array calls."""
    yield f"On a GPU: {title}"
    yield words.format(error=max(max(each.values()) for each in result["errors"].values()))
    body = []
    for row in result["rows"]:
        call = f"({row['B']}, {row['T']}, {row['H']}, {row['K']})" + ", with a gate" * row.get("gated", False)
        cells = [call + " *" * ("measured_apart" in row)]
        for what in ("forward", "both"):
            own = row["times"].get(what, {})
            peer = next((x for n, x in row["times"].items() if n.startswith(f"{what}: ")), {})
            cells += [ns(own.get("ns")), ns(peer.get("ns")), f"{peer['times_ours']:.2f}" if "ms" in peer else ""]
        body.append(cells)
    yield table(["call", "forward", peers, "ratio", "both", peers, "ratio"], body)
    yield from ["\\* measured in an earlier run."] * any("measured_apart" in row for row in result["rows"])


def caches(result: dict[str, Any], table: Table) -> Iterator[str]:
    """Tokens after a cache, and other calls by portable kernels."""
    yield "On a GPU: softmax attention with a cache"
    yield CACHES
    body = []
    for row in result["rows"]:
        call = f"`{row['function']}` ({row['B']}, {row['L']}, {row['T']}, {row['H']} / {row['Hk']}, {row['K']})"
        others = [
            f"{_sdpa(peer['name'])} {peer['graph_us']:.1f}" for peer in row.get("peers", ()) if "failed" not in peer
        ]
        body.append([f"{call} {row['dtype']}", f"{row['graph_us']:.1f}", f"{row['times_floor']:.2f}",
                     f"{row['eager_us']:.1f}", f"{row['host_us']:.1f}", ", ".join(others)])  # fmt: skip
    yield table(["call", "graph", "floor", "loop", "host", "others, graph"], body)
    if result["tiles"]:
        yield PORTABLE
        body = []
        for row in result["tiles"]:
            call = f"`{row['function']}` ({row['B']}, {row['T']}, {row['H']} / {row['Hk']}, {row['K']}) {row['dtype']}"
            names = dict.fromkeys(n.partition(": ")[2] for n, x in row["times"].items() if ": " in n and "ms" in x)
            body += [_attention(row["times"], call, name) for name in ("", *names)]
        yield table(["call", "library", "forward", "TFLOP/s", "ratio", "both", "TFLOP/s", "ratio"], body)


def _sdpa(name: str) -> str:
    """PyTorch's attention by what computes it: 'SDPA', 'SDPA by FLASH'."""
    return "SDPA" + name.partition("SDPA")[2].removesuffix("_ATTENTION")


def pieces(result: dict[str, Any], table: Table) -> Iterator[str]:
    """Pieces of layers against a copy."""
    yield "On a GPU: pieces of layers"
    rows, token = [row for row in result["rows"] if "forward ms" in row], result["rows"][-1]
    yield PIECES.format(**result, token=token)
    passes, percent = ("forward", "backward"), lambda x: "" if x is None else f"{100 * x:.0f}"
    peers = [f"{name}{what} ms" for name in ("torch", "fla") for what in ("", " both")]
    yield table(
        ["piece", *(f"{name}, {unit}" for name in passes for unit in ("ms", "share %", "aim %")),
         *(f"{name}, {what}, ms" for name in ("PyTorch", "FLA") for what in ("forward", "both"))],
        [[row["piece"], *(cell for name in passes for cell in (f"{row[f'{name} ms']:.3f}",
          percent(row[f"{name} share"]), percent(row.get(f"{name} aim")))),
          *(f"{row[name]:.3f}" if name in row else "" for name in peers)] for row in rows],
    )  # fmt: skip


SCANS = """\
`python -m bench scans --backend cuda`: h_t = a_t h_{{t-1}} + x_t. share: the bytes of three arrays forward and
of five backward over the {copy_gbs:.0f} GB/s of a copy."""
SELECTIVE = """\
`python -m bench selective_scan --backend cuda`: {N} states a channel, {dtype}; ps of a token and channel. One token
of a batch: its share is that of a copy of the same bytes."""


def scans(result: dict[str, Any], table: Table) -> Iterator[str]:
    """The recurrence of the elementwise core against a copy."""
    yield "On a GPU: recurrences of channels"
    yield SCANS.format(**result)
    yield table(
        ["(B, T, D)", "dtype", "gate", "forward, ms", "share %", "backward, ms", "share %", "FLA hgrn, ms"],
        [[str(tuple(row["shape"])), row["dtype"], row["gate"],
          *(f"{row[f'{name} ms']:.3f}" if what == "ms" else f"{100 * row[f'{name} share']:.0f}"
            for name in ("forward", "backward") for what in ("ms", "share")),
          f"{row['fla ms']:.3f}" if "fla ms" in row else ""] for row in result["rows"]],
    )  # fmt: skip


def selective(result: dict[str, Any], table: Table) -> Iterator[str]:
    """Mamba's scan."""
    yield "On a GPU: selective scan"
    yield SELECTIVE.format(**result)
    calls, tokens = ([row for row in result["rows"] if key in row] for key in ("(B, T, D)", "(B, D)"))
    yield table(
        ["(B, T, D)", "forward, ms", "ps", "forward and backward, ms", "ps"],
        [[row["(B, T, D)"], *(cell for name in ("forward", "both")
          for cell in (f"{row[f'{name} ms']:.3f}", f"{row[f'{name} ps']:.1f}"))] for row in calls],
    )  # fmt: skip
    yield table(
        ["one token, (B, D)", "us", "share %"],
        [[row["(B, D)"], f"{row['us']:.1f}", f"{100 * row['share of a copy of these bytes']:.0f}"] for row in tokens],
    )


EVERY = """\
`python -m bench all --backend cuda`: bfloat16, gates, strengths and parameters of a head in float32. Large: 8 x 4096
tokens, 32 heads of 128, GPU ns a token and head; predicted: the larger of bytes at {copy_gbs:.0f} GB/s, the rate of a
copy, and operations at {matrix_tflops:.0f} TFLOP/s, the rate of a matrix product, forward. Small: 2 x 1000 tokens, 8
heads of 64, us of calls made one by one, host time where it is longer. Memory: the peak beside the inputs over their
bytes. chunks: array calls. Variants that are not here were not measured."""


def every(result: dict[str, Any], table: Table) -> Iterator[str]:
    """Every variant, by its default call."""
    yield "On a GPU: variants"
    yield EVERY.format(**result)
    names, memory = ("forward", "both"), lambda row: f"{row['both_peak']:.1f}" if "both_peak" in row else ""
    yield table(
        ["variant", "backend", "large: predicted, ns", *(f"{name}, ns" for name in names), "memory",
         *(f"small: {name}, us" for name in names), "memory"],
        [[f"`{row['function']}`", row["large"]["backend"], ns(row["large"]["predicted_ns"]),
          *(ns(row["large"].get(f"{name}_ns")) for name in names), memory(row["large"]),
          *(f"{row['small'][f'{name}_us']:.0f}" for name in names), memory(row["small"])]
         for row in sorted(result["rows"], key=lambda row: row["function"])],
    )  # fmt: skip


NAMES = {
    "cuda_all": every,
    "cuda_simple_gla": chunks, "cuda_gated_delta_rule": delta, "cuda_vector_decay": vector, "cuda_step": steps,
    "cuda_softmax": attention, "cuda_path_attention": path,
    "cuda_deltaformer": partial(path, title="DeltaFormer", words=SYSTEM, peers="array calls"),
    "cuda_portable_attention": caches, "cuda_scaling": scaling, "cuda_states": states,
    "cuda_state_log": state_log,
    "cuda_training": training, "cuda_pieces": pieces, "cuda_scans": scans, "cuda_selective_scan": selective,
}  # fmt: skip
