"""Variants on a CPU and their peers; bench/compare.py has the method.

gated_delta_rule: transformers' fallbacks, torch's softmax attention and a plain loop. simple_gla: transformers'
MiniMax and Mamba-2 paths; the decay is constant per head because MiniMax accepts no other, but this library and
Mamba-2 receive it per token. kda: transformers' chunk form. gla, rwkv6, rwkv7: softmax attention only, since
transformers has no CPU path for them. step: one token of the gated delta rule (H = 16, D = 128) that overwrites its
state, compared with a copy of the state, which is B MiB, read and written once.
"""

from __future__ import annotations

import numpy as np

import linattn_np as la
from bench import compare, peers
from linattn_np.matrix_state.types import Erase
from linattn_np.spec import VariantSpec

Shape = tuple[int, int, int, int]
SHAPES: list[Shape] = [(1, 2048, 8, 64), (1, 4096, 8, 128), (1, 8192, 4, 128), (1, 2048, 32, 128)]  # (B, T, H, D)
SMALL: list[Shape] = [(2, 777, 6, 96), (1, 512, 4, 64)]
SHORT: list[Shape] = [(1, 2048, 8, 64), (1, 2048, 8, 128)]


def draw_gated(shape: Shape) -> compare.Arrays:
    """q, k, v, g, beta of the gated delta rule: unit keys, log decays of 0 to -0.1 per token."""
    B, T, H, D = shape
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, B, T, H, D)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = -rng.uniform(0, 0.1, (B, T, H)).astype(np.float32)
    return {"q": q, "k": k, "v": v, "g": g, "beta": rng.uniform(0, 1, (B, T, H)).astype(np.float32)}


def draw_constant(shape: Shape) -> compare.Arrays:
    """q, k, v, g of simple GLA: one constant log decay per head."""
    B, T, H, D = shape
    q, k, v = np.random.default_rng(0).standard_normal((3, B, T, H, D)).astype(np.float32)
    g = np.broadcast_to(-(2.0 ** (-8 * np.arange(1, H + 1) / H)), (B, T, H)).astype(np.float32)
    return {"q": q, "k": k, "v": v, "g": g}


def step_calls(arrays: compare.Arrays, backward: bool) -> compare.Calls:
    """One token that overwrites its state, a copy of the state, and peers."""
    B, _, H, D = arrays["q"].shape
    state = 0.1 * np.random.default_rng(1).standard_normal((B, H, D, D)).astype(np.float32)
    other = np.empty_like(state)

    def ours(backend: str | None) -> None:
        la.gated_delta_rule(**arrays, state=state, return_state=True, overwrite_state=True, backend=backend)

    found = {"linattn_np": lambda: ours(None), "linattn_np_numba": lambda: ours("numba"),
             "copy_of_the_state": lambda: np.copyto(other, state)}  # fmt: skip
    return found | peers.step(arrays, state)


def step_work(D: int, backward: bool) -> float:
    """Operations of decay, read, write and read."""
    return 7 * D * D


def _case(name: str, shapes: list[Shape], draw: compare.Draw, peer: compare.Peers, useful: compare.Useful
          ) -> compare.Case:  # fmt: skip
    """A variant, all backends, and its peers."""

    def calls(arrays: compare.Arrays, backward: bool) -> compare.Calls:
        return compare.ours(name, arrays, backward) | peer(arrays, backward)

    return compare.Case(name, shapes, draw, calls, useful, compare.exact(name))


CASES = {case.name: case for case in (
    _case("gated_delta_rule", SMALL + SHAPES, draw_gated, peers.gated_delta_rule, compare.delta_work),
    _case("gla", SHORT, compare.draw_sample("gla", "gv"), peers.gla, compare.plain_work),
    _case("kda", SHORT, compare.draw_sample("kda"), peers.kda, compare.delta_work),
    _case("rwkv6", SHORT, compare.draw_sample("rwkv6"), peers.softmax, compare.plain_work),
    _case("rwkv7", SHORT, compare.draw_sample("rwkv7"), peers.softmax, compare.free_work),
    _case("simple_gla", SHAPES[:2], draw_constant, peers.simple_gla, compare.plain_work),
    compare.Case("step", [(1, 1, 16, 128), (32, 1, 16, 128)], draw_gated, step_calls, step_work, small=(1, 1, 2, 128)),
)}  # fmt: skip


def by_spec(name: str) -> compare.Case:
    """Any other variant: arrays by its spec, softmax attention as the peer."""
    work = {Erase.NONE: compare.plain_work, Erase.DELTA: compare.delta_work, Erase.FREE: compare.free_work}
    spec = getattr(la, name).spec
    optional = [n for n, arg in spec.arrays.items() if arg.optional]
    return _case(name, SHORT, compare.draw_sample(name, *optional), _softmax_of(spec), work[spec.erase])


def _softmax_of(spec: VariantSpec) -> compare.Peers:
    """Softmax attention on the queries, keys and values of a variant that has all three."""
    change = spec.change

    def calls(arrays: compare.Arrays, backward: bool) -> compare.Calls:
        names = {"q": change.query, "k": change.key, "v": change.value}
        known = {n: arrays[name] for n, name in names.items() if name is not None}
        same = len(known) == 3 and all(x.ndim == 4 for x in known.values())
        return peers.softmax(known, backward) if same else {}

    return calls


def main(arguments: list[str]) -> int:
    name, *options = arguments
    return compare.main(CASES.get(name) or by_spec(name), options)
