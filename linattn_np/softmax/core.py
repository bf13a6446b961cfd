"""The softmax core: the functions of the protocol `linattn_np/core.py:Core`.

    out_i = sum_j p_ij v_j,   p_ij ~ e^{scale q_i . k_j + sum_{j < s <= i} g_s}

The state is a cache of keys and values (types.py): it grows with the tokens, or keeps its slots with overwrite_state.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, log, prod
from typing import Any

from ..core import GROWTH_SLACK, Computed, Core, Explained, Growth, StatesAt, register, register_states
from ..ops.host import has_compiler
from ..runtime.arrays import Array, accumulate, is_cupy, is_numpy
from ..runtime.shapes import Sizes
from . import cache, definition, policy, sequences, states
from .array import tiles
from .lse import apart, with_lse
from .path import definition as path_definition
from .types import (
    DeltaInputs,
    GatedCache,
    HouseholderCache,
    HouseholderInputs,
    Inputs,
    KeyValueCache,
    SoftmaxPlan,
    SoftmaxResiduals,
    StickInputs,
    Ungated,
)


class Softmax(states.GivesStates, Core):
    """Attention over all tokens."""

    BACKENDS = ("reference", "chunks", "numba", "cuda")
    STATE_AXES = {"k": "L Hk K", "v": "L H V", "b": "L Hq", "length": ""}  # noqa: RUF012
    STATE_LIMITS = {"b": (-inf, 0.0), "length": (0.0, inf)}  # noqa: RUF012
    STATE_COUNTS = ("length",)
    NO_SUMMARY = "the state keeps a row of every token"

    def plan(self, fields: dict[str, Any], spec: Any, options: Mapping[str, Any], sizes: Sizes) -> SoftmaxPlan:
        """The plan of a call, with window and normalize."""
        own = {
            "window": options.get("window"),
            "normalize": options.get("normalize", True),
            "strict": not options.get("attend_current", True),
            "slots": slots_of(options["state"]),
            "lse": options.get("return_lse", False),
        }
        return SoftmaxPlan(**fields | own)

    def forward(self, fn: str, x: Inputs, plan: SoftmaxPlan, state: Any, wanted: str | None) -> Computed:
        """(out, final state, residuals)."""
        backend = choose(fn, x, plan, wanted)
        out: Array = None
        logs: Any = None
        kernels = kernels_of(x, plan) if backend == "cuda" else None
        cache.refuse_array_calls(backend, plan, x, state)
        at = states.at_positions(plan, x, state)  # first: kernels may overwrite the state
        if x.q is not None:
            if backend == "numba":
                from .cpu import calls

                out, logs = calls.forward(plan, x, state)
            elif kernels is not None:
                out, logs = kernels.forward(plan, x, state)
            else:
                out, logs = sequences.forward(module_of(backend, x), plan, x, state)
        end = None
        if kernels is not None and plan.overwrite and state is not None and state.v.shape[-3]:
            end = state  # the kernels have appended the tokens
        elif plan.returns_state or x.q is None:
            end = states.final_state(plan, x, state)
        elif plan.gradients:
            end = cache.shapes_after(plan, x, state)
        found = out if out is None else with_lse(plan, x, out, logs)
        return found, end if at is None else StatesAt(end, at), SoftmaxResiduals(x, plan, backend, state, out, logs)

    def backward(self, residuals: SoftmaxResiduals, dout: Array | None, dstate: Any) -> tuple[Any, Any]:
        """Gradients of the inputs and of the initial state."""
        x, plan, backend, state, out, logs = residuals
        dout, dlse = apart(plan, dout)
        if backend == "cuda" and logs is None and dout is not None:  # no kernel computes these gradients
            backend = "chunks"
            out, logs = sequences.forward(module_of(backend, x), plan, x, state)
        if dout is None or x.q is None:
            found = [sequences.zeros(plan, own, row) for _, own, row in sequences.each_sequence(plan, x, state)]
            d = sequences.gathered(plan, x, found)
        elif backend == "numba":
            from .cpu import calls

            d = calls.backward(plan, x, state, (out, logs), dout, dlse)
        elif backend == "cuda":
            kernels = kernels_of(x, plan)
            d = (
                (kernels.backward(plan, x, out, logs, dout), None)
                if state is None
                else kernels.backward_of_cache(plan, x, state, out, logs, dout)
            )
        else:
            d = sequences.backward(module_of(backend, x), plan, x, state, (out, logs), dout, dlse)
        return d if dstate is None else states.with_state(plan, x, state, dstate, d)

    def end_shape(self, plan: SoftmaxPlan, state: Any, part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Slots come with tokens."""
        return shape if part in ("length", "P") else (cache.slots_after(plan, state, 0), *shape[1:])

    def reads_out(self, residuals: SoftmaxResiduals) -> bool:
        """Backward reads the output."""
        return residuals.plan.normalize

    def growth(self, x: Any, plan: SoftmaxPlan) -> Growth | None:
        """The position map I - beta w^T w of the largest beta |w|^2, if that is over 2."""
        if not isinstance(x, (Inputs, HouseholderInputs)) or x.w is None:
            return None
        w, xp = accumulate(plan.xp, x.w), plan.xp
        share = accumulate(xp, x.beta) * xp.sum(w * w, axis=-1)
        n, (T, H) = int(xp.argmax(xp.reshape(share, (-1,)))), share.shape[-2:]
        value = float(xp.max(share))
        if value <= 2 + GROWTH_SLACK:
            return None
        message = f"has beta |w|^2 = {value:.4g} at token {n // H % T}, head {n % H}"
        return Growth("w", message, 1 - value, True, "queries and keys")

    def explain(self, fn: str, x: Inputs, plan: SoftmaxPlan, wanted: str | None, of: Any = None) -> Explained:
        """2 (K + V) operations for each pair of a query and a key, and the operations of position maps.

        of: the inputs of the read-out that x belongs to, where it is not the core's own.
        """
        of = x if of is None else of
        K, V, H = x.k.shape[-1], x.v.shape[-1], max(x.v.shape[-2], x.k.shape[-2] if x.q is None else x.q.shape[-2])
        backend, tokens = choose(fn, of, plan, wanted), sum(s.stop - s.start for s in plan.sequences)
        total = 2.0 * (K + V) * (0 if x.q is None else pairs(plan, x.q.shape[-3])) * prod(x.v.shape[:-3]) * H
        total += path_operations(backend, plan, x)
        others = {name: unsupported_reason(of, plan, name) or "covers the call too" for name in self.BACKENDS}
        del others[backend]
        reason = "requested" if wanted else "the default path"
        reason += f"; from T = {crossover(K, V)} on more operations than linear attention's 4 K V a token"
        C = {"chunks": policy.array_tile, "numba": lambda given: policy.cpu_tile(given)[0],
             "cuda": lambda _: policy.CUDA_TILE}.get(backend)  # fmt: skip
        return Explained(backend, reason, others, "tiles" if C else "recurrent form", C(plan.chunk_size) if C else None,
                         total, total / max(tokens * prod(x.v.shape[:-3]) * H, 1))  # fmt: skip


def slots_of(state: Any) -> int:
    """L of a cache of any library; 0 without one."""
    return 0 if state is None else (0, 0, 0, *getattr(state[1], "shape", ()))[-3]


def pairs(plan: SoftmaxPlan, queries: int) -> int:
    """Pairs of a query and a key that it reads, in a cache of full slots too. queries: their number if not causal."""
    total, L = 0, plan.slots
    for s in plan.sequences:
        T = s.stop - s.start
        if not plan.causal:
            total += (T if s.row is not None else queries) * (L + T)
            continue
        few = T if plan.window is None else min(max(plan.window - L, 0), T)  # queries that read all tokens before them
        total += L * few + few * (few + 1) // 2 + (T - few) * (plan.window or 0) - plan.strict * T
    return total


def module_of(backend: str, x: Inputs) -> Any:
    """The array calls of a backend."""
    return tiles if backend == "chunks" else definition if x.w is None else path_definition


def kernels_of(x: Any, plan: SoftmaxPlan) -> Any:
    """The CUDA kernels for a call: for position maps, linear systems or warpgroup products, or the portable ones."""
    from .cuda import calls, path, portable, stick, system

    if isinstance(x, DeltaInputs):
        return system
    if isinstance(x, StickInputs):
        return stick
    if isinstance(x, Inputs) and x.w is not None:
        return path
    return calls if not policy.PORTABLE and calls.unsupported_reason(x, plan) is None else portable


def path_operations(backend: str, plan: SoftmaxPlan, x: Inputs) -> float:
    """Of position maps: 4 K for a pair token by token; in blocks 2 K^2 for a query and a block, and their factors."""
    if x.w is None or x.q is None:
        return 0.0
    K, heads, total = x.k.shape[-1], max(x.q.shape[-2], x.k.shape[-2]), 0.0
    tile = policy.CUDA_TILE if backend == "cuda" else policy.cpu_tile(plan.chunk_size)[0]
    tile = policy.array_tile(plan.chunk_size) if backend == "chunks" else tile
    for s in plan.sequences:
        T = s.stop - s.start
        C, n = max(min(tile, T), 1), -(-T // max(min(tile, T), 1))
        passed = min((n - 1) / 2, 3.5 * log(n, 8)) if backend == "cuda" else (n - 1) / 2  # blocks or groups, of a query
        maps = 2.0 * K * min(K, 2 * C) * T * passed + T * (11 * C * K + 3 * C * C + 2 * K * K)
        total += heads * (4.0 * K * T * (T - 1) / 2 if backend == "reference" else maps)
        one_by_one = backend == "reference" or T <= policy.FEW_TOKENS
        total += x.k.shape[-2] * plan.slots * (4.0 * K * T if one_by_one else 2.0 * K * K)
    return total * prod(x.v.shape[:-3])


def crossover(K: int, V: int) -> int:
    """The T from which 2 (K + V) (T + 1) / 2 operations a token are more than the 4 K V of a state (K, V)."""
    return 4 * K * V // (K + V) if K + V else 0


def unsupported_reason(x: Any, plan: SoftmaxPlan, backend: str) -> str | None:
    """Why a backend does not compute a call; None if it does."""
    if backend == "cuda":
        if not is_cupy(plan.xp):
            return "the arrays are not CuPy arrays"
        if plan.lse:
            return "its kernels give no log sums; return_lse=True makes array calls"
        return kernels_of(x, plan).unsupported_reason(x, plan)
    if backend == "reference" and plan.chunk_size == "parallel":
        return "the definition goes token by token; chunk_size='parallel' needs tiles"
    if backend == "numba" and not is_numpy(plan.xp):
        return "it takes NumPy arrays"
    if backend == "numba" and not has_compiler():
        return "Numba, the compiler of its loops, is not installed"
    return None


def choose(fn: str, x: Any, plan: SoftmaxPlan, wanted: str | None) -> str:
    """The backend of a call.   Raises ValueError if the one that is wanted does not compute it."""
    if wanted is None:
        wanted = next((n for n in ("numba", "cuda") if unsupported_reason(x, plan, n) is None), None)
    elif (reason := unsupported_reason(x, plan, wanted)) is not None:
        raise ValueError(f"{fn}: backend {wanted!r} does not cover this call: {reason}")
    found = wanted or "chunks"
    return "reference" if found == "chunks" and plan.chunk_size == 1 else found


CORE = Softmax()
register(CORE, Inputs, Ungated)
register_states(CORE, KeyValueCache, GatedCache, HouseholderCache)
