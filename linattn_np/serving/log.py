"""A state as a checkpoint and a log of the tokens after it, so that the last tokens can be taken back.

    S_n = Diag(e^{g_n}) S_{n-1} + k_n^T u_n        u_n: the value written; of delta rules beta_n (v_n - r_n S~_n)

A reader x of S_n, all of whose tokens j = 1..n are in the log of the checkpoint S_0:

    x S_n = (x o e^{G_1}) S_0 + sum_j x . (k_j o e^{G_{j+1}}) u_j        G_i = g_n + g_{n-1} + ... + g_i

Sums go from token n backwards, along the parents of a tree. So the bits of a token's output depend on the checkpoint
and on the tokens after it alone: not on other branches, on tokens that were taken back, or on how tokens came in calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..call.binding import Prepared, prepare, spec_of
from ..call.results import finish
from ..core import Core
from ..matrix_state import core as matrix_state
from ..matrix_state.readouts.mapped import MappedInputs
from ..matrix_state.types import Erase, Inputs, ReadState
from ..runtime.arrays import cast, is_numpy, shared_heads
from ..runtime.values import is_whole, shown
from . import pools

WITHOUT = ("state", "return_state", "overwrite_state", "state_rows", "fresh", "return_states_at", "reverse",
           "cu_seqlens", "backend", "chunk_size")  # fmt: skip
Array = np.ndarray
Rows = Array | slice


class Token(NamedTuple):
    """One token of each row, in the dtype of the computation, every array with the heads of the state."""

    q: Array  # (R, H, M, K)  the queries that read one state; M = 0 without queries
    k: Array  # (R, H, K)
    v: Array  # (R, H, V)
    g: Array  # (R, H, 1 or K)
    r: Array | None = None  # (R, H, K), beta (R, H, 1)
    beta: Array | None = None


class Tokens(NamedTuple):
    """The tokens of a call."""

    call: Prepared
    plan: Any  # of inputs that are computed
    bonus: Array | None  # (H, K), on a token's own write
    each: list[Token]


class Tree(NamedTuple):
    """The nodes of the last `verify`, which none of them has been accepted of."""

    rows: Array  # (R,)
    paths: Array  # (R, N, depth) slots of a node, its parent, ... and of the log; the last ones are NONE
    depths: Array  # (R, N) nodes from the root to this one


class StateLog:
    """States in a pool, and a log of the tokens after them: drafts are verified and taken back without copied states.

        log = la.StateLog(la.gated_delta_rule, pool, length=16, qk_l2norm=True)
        out = log.step(q, k, v, g, beta)                     # the next tokens of every row
        out = log.verify(*arrays, parents=[-1, 0, 0, 1])     # a tree of drafts, after the tokens of each row
        log.accept(3)                                        # the path to node 3 is what follows; the rest is dropped
        log.rollback(2)                                      # take the last two tokens back

    fn: a variant whose step is S <- Diag(e^g) S + k^T u with one array as its state: all of the matrix-state core but
    free erase, micro-steps, rotated states, states of several parts and, in gla, gv. state: the pool (P, H, K, V), the
    states before the first token. It belongs to the log, which writes to it at flushes alone, in place: NumPy, float32,
    float64, float16, bfloat16, or the SmallState of `pack_state`; 16 bits and less are rounded at flushes alone.
    length: a row is flushed before a token as soon as so many are in its log. options: those of fn.

    Arrays are fn's, of NumPy, (R, T, ...) with a batch row for each row of the pool; rows: which, (R,) numbers, all by
    default.

    live: (P,) tokens in the log of each row. position: (P,) tokens since the row began.
    Raises TypeError for a variant without such a step, ValueError for options about states, and every error of fn.
    """

    def __init__(self, fn: Callable[..., Any], state: Any, *, length: int = 16, **options: Any):
        self._spec = spec = spec_of("StateLog", fn)
        if (why := unsupported_reason(spec, {**spec.options.defaults, **options})) is not None:
            raise TypeError(f"StateLog: fn is {spec.name}, {why}")
        if not is_whole(length):
            raise ValueError(f"StateLog: length is {shown(length)}, expected a whole number from 1")
        for name in WITHOUT:
            if name in options:
                raise ValueError(f"StateLog: {name} is given, expected none: the log has the states")
        if options.get("causal") is False:
            raise ValueError("StateLog: causal is False, expected True")
        pools.check("StateLog", state)
        self.state, self.length = state, int(length)
        self._options, self._dtype = options, pools.compute_dtype(state)
        P = pools.shape_of(state)[0]
        self.live, self.position = np.zeros(P, np.int64), np.zeros(P, np.int64)
        self._start = np.zeros(P, np.int64)  # of the ring: the slot of the oldest token
        self._size = 2 * self.length  # slots of the ring; then NONE, zeros, and one for each node of a tree
        self._logs: dict[str, Array] = {}  # k (P, slots, H, K), u (P, slots, H, V), g (P, slots, H, 1 or K)
        self._tree: Tree | None = None

    # tokens

    def step(self, *arrays: Any, rows: Any = None, **named: Any) -> Any:
        """The outputs of the next T tokens of each row, which are appended to its log."""
        at = self._rows("step", rows)
        tokens = self._tokens(arrays, named, at)
        self._tree, outs = None, []
        S: Array | None = None
        for token in tokens.each:
            if self._flush_full(at) or S is None:
                S = self._states(at)
            path = self._ring(at)
            u, out = self._read(tokens, token, S, path, at)
            self._append(at, token.k, u, token.g)
            outs.append(out)
        return self._finished(tokens.call, outs, at)

    def verify(self, *arrays: Any, parents: Any = None, rows: Any = None, **named: Any) -> Any:
        """The outputs of N drafted tokens of each row, that form a tree; nothing is appended until `accept`.

        parents: (N,), or (R, N) for each row its own: the node before each one, -1 for the row's last token. Parents
        come before their children. None: a chain. Raises ValueError for other parents.
        """
        at = self._rows("verify", rows)
        tokens = self._tokens(arrays, named, at)
        R, N = len(at), len(tokens.each)
        above = _parents(parents, R, N)
        self._flush_full(at)
        self._make_slots(N)
        S, ring = self._states(at), self._ring(at)
        none = np.full((R, N), self._size)
        paths = np.concatenate([ring, none], axis=1)[:, None].repeat(N + 1, axis=1)  # the last one: of the root
        depths, outs = np.zeros((R, N + 1), np.int64), []
        each, longest = np.arange(R), self.live[at]
        for n, token in enumerate(tokens.each):
            before = above[:, n]
            depth = depths[each, before]
            path = paths[each, before]
            u, out = self._read(tokens, token, S, path[:, : int((depth + longest).max(initial=0))], at)
            slot = self._size + 1 + n
            for name, x in (("k", token.k), ("u", u), ("g", token.g)):
                self._logs[name][at, slot] = x
            paths[:, n, 0], paths[:, n, 1:] = slot, path[:, :-1]
            depths[:, n] = depth + 1
            outs.append(out)
        self._tree = Tree(at, paths[:, :N], depths[:, :N])
        return self._finished(tokens.call, outs, at)

    def accept(self, node: Any) -> None:
        """Append the path to a node of the last `verify`: one number, or (R,); -1 appends nothing. The rest is dropped.

        Raises ValueError without a `verify` before, or for a node that it did not have.
        """
        if self._tree is None:
            raise ValueError("StateLog.accept: no tree is verified, expected a call of verify before")
        at, paths, depths = self._tree
        R, N = depths.shape
        last = _numbers("accept", "node", node, R)
        if (last < -1).any() or (last >= N).any():
            raise ValueError(f"StateLog.accept: node is {shown(node)}, expected numbers from -1 to {N - 1}")
        self._tree = None
        count = np.where(last < 0, 0, depths[np.arange(R), last] if N else 0)
        for n in range(int(count.max(initial=0))):
            some = np.flatnonzero(count > n)
            slot = paths[some, last[some], count[some] - 1 - n]
            self._append(at[some], *(self._logs[name][at[some], slot] for name in ("k", "u", "g")))

    def rollback(self, count: Any, rows: Any = None) -> None:
        """Take the last tokens back: one number, or one for each row.

        Raises ValueError for more than `live` tokens: a flush is final.
        """
        at = self._rows("rollback", rows)
        n = _numbers("rollback", "count", count, len(at))
        if (n < 0).any() or (n > self.live[at]).any():
            most = self.live[at].tolist()
            raise ValueError(f"StateLog.rollback: count is {shown(count)}, expected numbers from 0 to live = {most}")
        self._tree = None
        self.live[at] -= n
        self.position[at] -= n

    # states

    def flush(self, rows: Any = None) -> None:
        """Write the states after the last tokens into the pool; the logs of these rows are empty then."""
        at = self._rows("flush", rows)
        self._tree = None
        self._fold(at, self.live[at])

    def state_at(self, position: Any = None, rows: Any = None) -> Array:
        """The states (R, H, K, V) after so many tokens of each row: one number, or (R,); None: after the last ones.

        Reads alone. The bits are those of a flush there. Raises ValueError for a position that the log does not reach.
        """
        at = self._rows("state_at", rows)
        last, live = self.position[at], self.live[at]
        n = last if position is None else _numbers("state_at", "position", position, len(at))
        if (n > last).any() or (n < last - live).any():
            reach = f"from {(last - live).tolist()} to {last.tolist()}"
            raise ValueError(f"StateLog.state_at: position is {shown(position)}, expected numbers {reach}")
        if not self._logs:
            return np.array(pools.take(self.state, at))
        return self._folded(at, live - (last - n))

    def reset(self, rows: Any = None, state: Any = None) -> None:
        """Begin new sequences in these rows, from states (R, H, K, V), or from zeros: their logs are empty then."""
        at = self._rows("reset", rows)
        shape = (len(at), *pools.shape_of(self.state)[1:])
        S = np.zeros(shape, self._dtype) if state is None else np.asarray(state)
        if S.shape != shape:
            raise ValueError(f"StateLog.reset: state has shape {S.shape}, expected {shape}")
        pools.put(self.state, at, S)
        self._tree = None
        for cursor in (self.live, self.position, self._start):
            cursor[at] = 0

    # inputs and outputs

    def _rows(self, method: str, rows: Any) -> Array:
        return pools.rows_of(f"StateLog.{method}", rows, len(self.live))

    def _tokens(self, arrays: tuple[Any, ...], named: dict[str, Any], at: Array) -> Tokens:
        """The checked tokens of a call.   Raises ValueError for arrays that do not fit the pool."""
        call = prepare(self._spec, arrays, named | self._options)
        c, fn = call.variables, self._spec.name
        if not is_numpy(call.plan.xp):
            raise TypeError(f"StateLog: {fn} has arrays of another library, expected NumPy arrays")
        if c.sizes.batch != (len(at),):
            raise ValueError(f"StateLog: {fn} has the batch {c.sizes.batch}, expected one row each: ({len(at)},)")
        x, plan = _plain(call)
        if x.gv is not None:
            raise ValueError(f"StateLog: {fn}: gv is given, expected none: a log has decays of key channels alone")
        _, H, K, V = pools.shape_of(self.state)
        found = (c.sizes.H, x.k.shape[-1], x.v.shape[-1])
        if found != (H, K, V):
            raise ValueError(f"StateLog: {fn} has states of shape {found}, expected the pool's {(H, K, V)}")
        T, width = x.v.shape[-3], 1 if x.g is None else x.g.shape[-1]
        if not self._logs:
            self._logs = {n: np.zeros((len(self.live), self._size + 1, H, D), self._dtype)
                          for n, D in (("k", K), ("u", V), ("g", width))}  # fmt: skip

        def own(y: Array, heads: int = H) -> Array:
            """(R, T, heads, D) in the dtype of the computation."""
            y = shared_heads(np, cast(np, y, self._dtype), heads)
            return np.broadcast_to(y, (len(at), T, *y.shape[-2:]))

        of = {n: own(y) for n in ("k", "v", "g", "r", "beta") if (y := getattr(x, n)) is not None}
        of["g"] = of["g"] if "g" in of else np.zeros((len(at), T, H, 1), self._dtype)
        queries = 0 if x.q is None else max(x.q.shape[-2], H)
        q = np.zeros((len(at), T, 0, K), self._dtype) if x.q is None else own(x.q, queries)
        of["q"] = q.reshape(len(at), T, H, queries // max(H, 1), K)
        each: Any = [{n: y[:, t] for n, y in of.items()} for t in range(T)]
        bonus = None if x.u is None else cast(np, x.u, self._dtype)
        return Tokens(call, plan, bonus, [Token(**one) for one in each])

    def _finished(self, call: Prepared, outs: list[Array], at: Array) -> Any:
        """The public outputs (R, T, heads, V), with the read-out of fn; None without queries."""
        q = getattr(call.variables, str(self._spec.change.query))
        if q is None:
            return None
        _, H, _, V = pools.shape_of(self.state)
        out = np.stack(outs, axis=1) if outs else np.zeros((0,), self._dtype)
        return finish(call, out.reshape(len(at), len(outs), max(q.shape[-2], H), V), None)[0]

    # one token

    def _read(self, tokens: Tokens, x: Token, S: Array, path: Array, at: Array) -> tuple[Array, Array]:
        """(u (R, H, V), out (R, H, M, V)) of a token; path: (R, n) slots before it, the last one first."""
        plan = tokens.plan
        k, u, g = (self._logs[n][at, path.T] for n in ("k", "u", "g"))  # (n, R, H, D)

        def read(y: Array, first: Array) -> Array:
            """y (R, H, M, K) times the state after the decay `first`: (R, H, M, V)."""
            decay = _decays(first, g)
            weights = np.vecdot(y, (k * decay[:-1])[..., None, :])[..., None]
            out = (y * decay[-1][..., None, :]) @ S
            for n in range(len(g)):
                out += weights[n] * u[n][..., None, :]
            return out

        q_first = x.g if plan.query_reads is ReadState.UPDATED else np.zeros_like(x.g)
        written = x.v
        if x.r is not None and x.beta is not None:
            r, r_first = x.r[..., None, :], x.g
            if plan.erase_reads is ReadState.PREVIOUS:
                r_first = np.zeros_like(x.g)
            if r_first is q_first:  # one pass over the states
                both = read(np.concatenate([r, x.q], axis=-2), x.g)
                predicted, out = both[..., 0, :], both[..., 1:, :]
            else:
                predicted, out = read(r, r_first)[..., 0, :], read(x.q, q_first)
            written = x.beta * (x.v - predicted)
        else:
            out = read(x.q, q_first)
        own = x.k
        if plan.query_reads is not ReadState.UPDATED:
            own = np.zeros_like(x.k) if tokens.bonus is None else x.k * tokens.bonus
        out = out + np.vecdot(x.q, own[..., None, :])[..., None] * written[..., None, :]
        return written, plan.scale * out

    # the ring

    def _ring(self, at: Array) -> Array:
        """(R, n) the slots of the logs, the last token first, NONE after the oldest one."""
        live, n = self.live[at][:, None], np.arange(int(self.live[at].max(initial=0)))
        slot = (self._start[at][:, None] + live - 1 - n) % self._size
        return np.where(n < live, slot, self._size)

    def _append(self, at: Array, k: Array, u: Array, g: Array) -> None:
        """One token at the end of each row; where the ring is full its oldest tokens are flushed."""
        full = at[self.live[at] == self._size]
        if len(full):
            self._fold(full, np.full(len(full), self.length))
        slot = (self._start[at] + self.live[at]) % self._size
        for name, x in (("k", k), ("u", u), ("g", g)):
            self._logs[name][at, slot] = x
        self.live[at] += 1
        self.position[at] += 1

    def _make_slots(self, nodes: int) -> None:
        """Slots of the nodes of a tree."""
        for name, x in self._logs.items():
            if (more := self._size + 1 + nodes - x.shape[1]) > 0:
                new = np.zeros((x.shape[0], more, *x.shape[2:]), x.dtype)
                self._logs[name] = np.concatenate([x, new], axis=1)

    # checkpoints

    def _states(self, at: Array) -> Array:
        """The checkpoints (R, H, K, V), to read."""
        return pools.take(self.state, slice(None) if len(at) == len(self.live) and (np.diff(at) == 1).all() else at)

    def _flush_full(self, at: Array) -> bool:
        """Flush the oldest `length` tokens wherever so many are in the log; whether there were any."""
        some = False
        while len(full := at[self.live[at] >= self.length]):
            self._fold(full, np.full(len(full), self.length))
            some = True
        return some

    def _fold(self, at: Array, count: Array) -> None:
        """Move checkpoints so many tokens forward."""
        some = np.flatnonzero(count)  # others are not rounded again
        if len(some):
            pools.put(self.state, at[some], self._folded(at[some], count[some]))
        self._start[at] = (self._start[at] + count) % self._size
        self.live[at] -= count

    def _folded(self, at: Array, count: Array) -> Array:
        """The states so many tokens after the checkpoints: (I o e^G) S_0 + sum_j (k_j o e^G)^T u_j."""
        n = np.arange(self._size)[:, None]  # always so many, so that bits do not depend on other rows
        slot = np.where(n < count, (self._start[at] + count - 1 - n) % self._size, self._size)
        k, u, g = (self._logs[name][at, slot] for name in ("k", "u", "g"))
        decay = _decays(np.zeros_like(g[0]), g)
        k, u = np.moveaxis(k * decay[:-1], 0, -1), np.moveaxis(u, 0, -2)  # (R, H, K, n), (R, H, n, V)
        S = np.ascontiguousarray(k) @ np.ascontiguousarray(u)
        S += decay[-1][..., None] * pools.take(self.state, at)
        return S


def _decays(first: Array, g: Array) -> Array:
    """e^{G} (n + 1, R, H, 1 or K) of log decays g, the last token first: of each token, and of the checkpoint."""
    decay = np.concatenate([first[None], g])
    for n in range(len(g)):
        decay[n + 1] += decay[n]
    return np.exp(decay, out=decay)


def unsupported_reason(spec: Any, options: dict[str, Any]) -> str | None:
    """Why a variant has no log; None if it has one."""
    core: Core = spec.core
    if core is not matrix_state:
        return "which is not of the matrix-state core"
    if spec.erase is Erase.FREE or spec.micro_steps:
        return "whose tokens write more than one row k^T u"
    if spec.state.rotates or spec.state.type_of(options) is not None:
        return "expected one whose state is one array that does not rotate"
    return None


def _plain(call: Prepared) -> tuple[Inputs, Any]:
    """(inputs whose gates, norms, strengths and features are computed, the plan of the rest)."""
    x, plan = call.inputs(), call.plan
    if isinstance(x, MappedInputs):
        q, k = (None if y is None else x.map[0](cast(np, y, plan.dtype)) for y in (x.q, x.k))
        x = Inputs(q, k, x.v, x.g)
    for step in matrix_state.preprocessing(matrix_state.REFERENCE, x, plan):
        if step.inputs is not None:
            x, plan = step.inputs(matrix_state.REFERENCE.load(), x, plan)
    return x, plan


def _numbers(method: str, name: str, given: Any, R: int) -> Array:
    """One whole number for each row.   Raises TypeError for anything else."""
    x = np.asarray(given)
    if x.shape not in ((), (R,)) or (x.dtype.kind not in "iu" and x.size):
        raise TypeError(f"StateLog.{method}: {name} is {shown(given)}, expected a whole number, or one for each row")
    return np.broadcast_to(x.astype(np.int64), (R,))


def _parents(given: Any, R: int, N: int) -> Array:
    """The parents (R, N) of nodes; the root is -1.   Raises ValueError unless each comes before its children."""
    x = np.arange(N) - 1 if given is None else np.asarray(given)
    if x.shape not in ((N,), (R, N)) or (x.dtype.kind not in "iu" and x.size):
        raise ValueError(f"StateLog.verify: parents is {shown(given)}, expected {N} whole numbers, or ({R}, {N})")
    if (x < -1).any() or (x >= np.arange(N)).any():
        raise ValueError(f"StateLog.verify: parents is {shown(given)}, expected -1 or an earlier node for each node")
    return np.broadcast_to(x.astype(np.int64), (R, N))
