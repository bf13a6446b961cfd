"""A state as a checkpoint and a log of the tokens after it, so that the last tokens can be taken back.

    S_n = Diag(e^{g_n}) S_{n-1} + k_n^T u_n        u_n: the value written; of delta rules beta_n (v_n - r_n S~_n)

A reader x of S_n, all of whose tokens j = 1..n are in the log of the checkpoint S_0:

    x S_n = (x o e^{G_1}) S_0 + sum_j x . (k_j o e^{G_{j+1}}) u_j        G_i = g_n + g_{n-1} + ... + g_i

Sums go from token n backwards, along the parents of a tree. So the bits of a token's output depend on the checkpoint
and on the tokens after it alone: not on other branches, on tokens that were taken back, or on how tokens came in calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..call.binding import inputs_of, prepare, spec_of
from ..call.results import finish
from ..core import Core
from ..matrix_state import core as matrix_state
from ..matrix_state.preprocess import OF_INPUTS
from ..matrix_state.readouts.mapped import MappedInputs
from ..matrix_state.types import Erase, Inputs, ReadState
from ..runtime import threads
from ..runtime.arrays import cast, dtype_name, is_numpy, shared_heads
from ..runtime.shapes import check_dtype
from ..runtime.values import is_whole, shown
from ..spec import Call
from . import pools
from .small import BITS, SmallState

WITHOUT = ("state", "return_state", "overwrite_state", "state_rows", "fresh", "return_states_at", "reverse",
           "cu_seqlens", "backend", "chunk_size")  # fmt: skip
Array = np.ndarray


class Tokens(NamedTuple):
    """The tokens of a call, as the kernels take them, and the array that their outputs go to."""

    call: Call
    T: int
    values: Any
    out: Any


class Tree(NamedTuple):
    """The nodes of the last `verify`, which none of them has been accepted of."""

    rows: Array  # (R,)
    parents: Array  # (R, N)


class StateLog:
    """States in a pool, and a log of the tokens after them: drafts are verified and taken back without copied states.

        log = la.StateLog(la.gated_delta_rule, pool, length=16, qk_l2norm=True)
        out = log.step(q, k, v, g, beta)                     # the next tokens of every row
        out = log.verify(*arrays, parents=[-1, 0, 0, 1])     # a tree of drafts, after the tokens of each row
        log.accept(3)                                        # the path to node 3 is what follows; the rest is dropped
        log.rollback(2)                                      # take the last two tokens back

    fn: a variant whose step is S <- Diag(e^g) S + k^T u with one array as its state: all of the matrix-state core but
    free erase, micro-steps, rotated states, states of several parts and, in gla, gv. state: the pool (P, H, K, V), the
    states before the first token. It belongs to the log, which writes to it at flushes alone, in place: an array of
    NumPy or CuPy in float32, float64, float16 or bfloat16, or the SmallState of `pack_state`; 16 bits and less are
    rounded at flushes alone.
    length: a row is flushed before a token as soon as so many are in its log. options: those of fn.

    Arrays are fn's, of the pool's library, (R, T, ...) with a batch row for each row of the pool; rows: which, (R,)
    numbers, all by default.

    live: (P,) tokens in the log of each row. position: (P,) tokens since the row began.
    Raises TypeError for a variant without such a step, ValueError for options about states, and every error of fn.
    """

    def __init__(self, fn: Callable[..., Any], state: Any, *, length: int = 16, **options: Any):
        self._spec = spec = spec_of("StateLog", fn)
        if (why := unsupported_reason(spec, {**spec.options, **options})) is not None:
            raise TypeError(f"StateLog: fn is {spec.name}, {why}")
        if not is_whole(length):
            raise ValueError(f"StateLog: length is {shown(length)}, expected a whole number from 1")
        for name in WITHOUT:
            if name in options:
                raise ValueError(f"StateLog: {name} is given, expected none: the log has the states")
        if options.get("causal") is False:
            raise ValueError("StateLog: causal is False, expected True")
        self._xp = pools.check("StateLog", state)
        self._on_gpu = self._xp is not np
        self._kind = type(pools.arrays_of(state)[0]) if self._on_gpu else np.ndarray
        self.state, self.length = state, int(length)
        self._options, self._dtype = options, pools.compute_dtype(state)
        P = pools.shape_of(state)[0]
        self.live, self.position = np.zeros(P, np.int64), np.zeros(P, np.int64)
        self._start = np.zeros(P, np.int64)  # of the ring: the slot of the oldest token
        self._size = 2 * self.length  # slots of the ring; then one for each node of a tree
        self._logs: dict[str, Any] = {}  # k (P, H, slots, K), u (P, H, slots, V), g (P, H, slots, 1 or K)
        self._tree: Tree | None = None
        self._checked: tuple[Any, dict[str, Any]] = (
            None,
            {},
        )  # the signature of the last call, and it without its arrays
        self._launches: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copied and pickled with its pool, without what calls have prepared."""
        return {**vars(self), "_xp": None, "_checked": (None, {}), "_launches": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._xp = pools.check("StateLog", self.state)

    # tokens

    def step(self, *arrays: Any, rows: Any = None, **named: Any) -> Any:
        """The outputs of the next T tokens of each row, which are appended to its log."""
        at = self._rows("step", rows)
        tokens = self._tokens(arrays, named, at)
        self._tree, t = None, 0
        while t < tokens.T:
            self._flush_full(at)
            live = self.live[at]
            n = min(tokens.T - t, self.length - int(live.max(initial=0)))
            self._compute(at, tokens, t, n)
            self.live[at] += n
            self.position[at] += n
            t += n
        return self._finished(tokens)

    def verify(self, *arrays: Any, parents: Any = None, rows: Any = None, **named: Any) -> Any:
        """The outputs of N drafted tokens of each row, that form a tree; nothing is appended until `accept`.

        parents: (N,), or (R, N) for each row its own: the node before each one, -1 for the row's last token. Parents
        come before their children. None: a chain. Raises ValueError for other parents.
        """
        at = self._rows("verify", rows)
        tokens = self._tokens(arrays, named, at)
        above = _parents(parents, len(at), tokens.T)
        self._flush_full(at)
        self._make_slots(tokens.T)
        self._compute(at, tokens, 0, tokens.T, None if parents is None else above, tree=True)
        self._tree = Tree(at, above)
        return self._finished(tokens)

    def accept(self, node: Any) -> None:
        """Append the path to a node of the last `verify`: one number, or (R,); -1 appends nothing. The rest is dropped.

        Raises ValueError without a `verify` before, or for a node that it did not have.
        """
        if self._tree is None:
            raise ValueError("StateLog.accept: no tree is verified, expected a call of verify before")
        at, parents = self._tree
        R, N = parents.shape
        last = _numbers("accept", "node", node, R)
        if (last < -1).any() or (last >= N).any():
            raise ValueError(f"StateLog.accept: node is {shown(node)}, expected numbers from -1 to {N - 1}")
        self._tree = None
        nodes, node = [], last
        while (node >= 0).any():  # up the paths
            nodes.append(node)
            node = np.where(node < 0, -1, parents[np.arange(R), node])
        path = np.array(nodes, np.int64).reshape(len(nodes), R)
        count, slots = (path >= 0).sum(axis=0), np.full((R, len(nodes)), -1)
        for n, node in enumerate(path):
            some = np.flatnonzero(node >= 0)
            slots[some, count[some] - 1 - n] = self._size + node[some]
        self._append(at, slots, count)

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
        S = pools.copied(self.state, at, self._xp)
        if self._logs:
            self._fold_into(S, at, live - (last - n))
        return S

    def reset(self, rows: Any = None, state: Any = None) -> None:
        """Begin new sequences in these rows, from states (R, H, K, V), or from zeros: their logs are empty then."""
        at = self._rows("reset", rows)
        shape = (len(at), *pools.shape_of(self.state)[1:])
        S = self._xp.zeros(shape, dtype=self._dtype) if state is None else self._xp.asarray(state)
        check_dtype("StateLog.reset", "state", S)
        if S.shape != shape:
            raise ValueError(f"StateLog.reset: state has shape {S.shape}, expected {shape}")
        pools.put(self.state, at, S, self._xp)
        self._tree = None
        for cursor in (self.live, self.position, self._start):
            cursor[at] = 0

    # inputs and outputs

    def _rows(self, method: str, rows: Any) -> Array:
        return pools.rows_of(f"StateLog.{method}", rows, len(self.live))

    def _tokens(self, arrays: tuple[Any, ...], named: dict[str, Any], at: Array) -> Tokens:
        """The checked tokens of a call.   Raises ValueError for arrays that do not fit the pool."""
        call, fn = self._call(arrays, named), self._spec.name
        if is_numpy(call.xp) is self._on_gpu:
            expected = "CuPy" if self._on_gpu else "NumPy"
            raise TypeError(f"StateLog: {fn} has arrays of another library, expected {expected} arrays")
        if call.batch != (len(at),):
            raise ValueError(f"StateLog: {fn} has the batch {call.batch}, expected one row each: ({len(at)},)")
        x, plan = _plain(call)
        if x.gv is not None:
            raise ValueError(f"StateLog: {fn}: gv is given, expected none: a log has decays of key channels alone")
        _, H, K, V = pools.shape_of(self.state)
        found = (call.sizes["H"], x.k.shape[-1], x.v.shape[-1])
        if found != (H, K, V):
            raise ValueError(f"StateLog: {fn} has states of shape {found}, expected the pool's {(H, K, V)}")
        T, width = x.v.shape[-3], 1 if x.g is None else x.g.shape[-1]
        if not self._logs:
            self._logs = {n: self._xp.zeros((len(self.live), H, self._size, D), dtype=self._dtype)
                          for n, D in (("k", K), ("u", V), ("g", width))}  # fmt: skip
        if self._on_gpu:
            from ..matrix_state.cuda.token import log as kernels

            there = kernels.tokens_of(x, plan, H, self._dtype)
            return Tokens(call, T, there, there.out)
        values = self._flat(x, plan, len(at))
        return Tokens(call, T, values, values["out"])

    def _flat(self, x: Inputs, plan: Any, R: int) -> dict[str, Any]:
        """The tokens of R rows as the compiled loops take them."""
        (_, H, K, V), T = pools.shape_of(self.state), x.v.shape[-3]

        def own(y: Array, heads: int = H) -> Array:
            """(R T heads, D) in the dtype of the computation."""
            shape, width = (R, T, heads, y.shape[-1]), y.shape[-1]
            if y.dtype == self._dtype and y.shape == shape and y.flags.c_contiguous:
                return y.reshape(R * T * heads, width)
            y = cast(np, y, self._dtype)
            y = y if y.shape == shape else np.broadcast_to(shared_heads(np, y, heads), shape)
            return np.ascontiguousarray(y).reshape(R * T * heads, width)

        queries = 0 if x.q is None else max(x.q.shape[-2], H)
        each, erases = queries // max(H, 1), x.r is not None and x.beta is not None
        of: dict[str, Any] = {"k": own(x.k), "v": own(x.v), "T": T, "queries": each, "erases": int(erases),
                              "updated": int(plan.query_reads is ReadState.UPDATED), "bonuses": int(x.u is not None),
                              "early": int(plan.erase_reads is ReadState.PREVIOUS), "scale": plan.scale}  # fmt: skip
        of["g"] = np.zeros((R * T * H, 1), self._dtype) if x.g is None else own(x.g)
        if erases:
            of |= {"erase": own(x.r), "beta": own(x.beta).reshape(-1)}
        if x.q is not None:
            of["q"] = own(x.q, queries)
        if x.u is not None:
            of["bonus"] = np.ascontiguousarray(np.broadcast_to(cast(np, x.u, self._dtype), (H, K)))
        of["out"] = np.empty((R * T * queries, V), self._dtype)
        return of | {"given": R * T * H, "asked": R * T * queries}

    def _call(self, arrays: tuple[Any, ...], named: dict[str, Any]) -> Call:
        """The checked call; one on arrays with the signature of the last one is not checked again."""
        given = dict(zip(self._spec.arrays, arrays, strict=False)) | named
        is_plain = len(given) == len(arrays) + len(named) and all(type(x) is self._kind for x in given.values())
        key = tuple((n, x.shape, x.dtype, x.device) for n, x in given.items()) if is_plain else None
        if key is not None and key == self._checked[0] and not self._options.get("check"):
            call = Call(**self._checked[1])
            vars(call).update(given)
            return call
        call = prepare(self._spec, arrays, named | self._options)
        self._checked = key, vars(call.without_arrays())
        return call

    def _finished(self, tokens: Tokens) -> Any:
        """The public outputs (R, T, heads, V), with the read-out of fn; None without queries."""
        call, out = tokens.call, tokens.out
        q = getattr(call, str(self._spec.change.query))
        if q is None:
            return None
        _, H, _, V = pools.shape_of(self.state)
        shape = (*call.batch, tokens.T, max(q.shape[-2], H), V)
        return finish(call, out.reshape(shape), None)[0]

    # kernels

    def _compute(self, at: Array, tokens: Tokens, t: int, N: int, parents: Array | None = None, *,
                 tree: bool = False) -> None:  # fmt: skip
        """Compute N tokens from t on, a chain without parents, and write them to the ring, or beside it."""
        if self._on_gpu:
            self._launch_there("tokens", at, tokens=tokens.values, first=t, count=N, parents=parents, tree=int(tree))
            return
        R, direct = len(at), self._is_direct
        states = self._stored() if direct else self._plain_states(pools.take(self.state, at))
        ring = (self._start[at] + self.live[at])[:, None] + np.arange(N)
        slots = self._size + np.arange(N) if tree else ring % self._size
        above = np.arange(N) - 1 if parents is None else parents
        above, slots = (np.ascontiguousarray(np.broadcast_to(x, (R, N)), np.int64) for x in (above, slots))
        own = {"state": at if direct else np.arange(R), "N": N, "t": t, "parents": above, "to": slots}
        self._launch("tokens", at, N + self._size, **tokens.values, **own, **states)

    def _launch_there(self, entry: str, at: Array, S: Any = None, live: Any = None, **own: Any) -> None:
        """A CUDA kernel on the logs of rows, and on their states in the pool, or on S."""
        from ..matrix_state.cuda.token import log as kernels

        cursors = at, self._start[at], self.live[at] if live is None else live
        states = pools.arrays_of(self.state) if S is None else (S,)
        kind = self.state.kind if S is None and isinstance(self.state, SmallState) else dtype_name(states[0])
        kernels.run(entry, self._xp, states, kind, self._logs, cursors, self._launches, self._size,
                    dense=int(S is not None), **own)  # fmt: skip

    def _launch(self, kernel: str, at: Array, longest: int, **values: Any) -> None:
        """A kernel on the logs of rows."""
        from . import log_loops as loops

        _, H, K, V = pools.shape_of(self.state)
        logs = {f"log_{n}": x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for n, x in self._logs.items()}
        shared = {"R": len(at), "H": H, "K": K, "V": V, "W": self._logs["g"].shape[-1], "ring": self._size,
                  "slots": self._logs["k"].shape[2], "logged": len(logs["log_k"]), "at": at, "start": self._start[at],
                  "live": self.live[at]}  # fmt: skip
        with threads.limited(self._options.get("num_threads")):
            loops.launch(getattr(loops, kernel), shared | logs | values, longest, self._launches)

    @property
    def _is_direct(self) -> bool:
        """Whether kernels read and write the pool itself."""
        return isinstance(self.state, SmallState) or self.state.dtype == self._dtype

    def _stored(self) -> dict[str, Any]:
        """The pool as kernels take it."""
        if not isinstance(self.state, SmallState):
            return self._plain_states(self.state)
        codes, scale, *low = (x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in self.state.arrays)
        found: dict[str, Any] = {"bits": BITS[self.state.kind], "states": len(codes), "scales": scale,
                                 "heads": len(scale)}  # fmt: skip
        found |= {"low": low[0], "half": low[0].shape[-1]} if low else {}
        return found | {"whole" if codes.dtype == np.int16 else "upper": codes}

    def _plain_states(self, S: Array) -> dict[str, Any]:
        flat = S.reshape(math.prod(S.shape[:-1]), S.shape[-1])
        return {"S": flat, "states": len(flat)}

    # the ring

    def _append(self, at: Array, slots: Array, count: Array) -> None:
        """Slots (R, N) at the end of each row, so many of it; where the ring is full its oldest tokens are flushed."""
        done, n = np.zeros(len(at), np.int64), np.arange(slots.shape[1])
        while (done < count).any():
            full = at[(done < count) & (self.live[at] == self._size)]
            if len(full):
                self._fold(full, np.full(len(full), self.length))
            stop = np.minimum(count, done + self._size - self.live[at])
            now = np.where((n >= done[:, None]) & (n < stop[:, None]), slots, -1)
            if self._on_gpu:
                self._launch_there("move", at, live=self.live[at] - done, parents=now, count=len(n))
            else:
                self._launch("move", at, 0, N=len(n), to=now, live=self.live[at] - done)
            self.live[at] += stop - done
            self.position[at] += stop - done
            done = stop

    def _make_slots(self, nodes: int) -> None:
        """Slots of the nodes of a tree."""
        for name, x in self._logs.items():
            if (more := self._size + nodes - x.shape[2]) > 0:
                new = self._xp.zeros((*x.shape[:2], more, x.shape[3]), dtype=x.dtype)
                self._logs[name] = self._xp.concat([x, new], axis=2)

    # checkpoints

    def _flush_full(self, at: Array) -> None:
        """Flush the oldest `length` tokens wherever so many are in the log."""
        while len(full := at[self.live[at] >= self.length]):
            self._fold(full, np.full(len(full), self.length))

    def _fold(self, at: Array, count: Array) -> None:
        """Move checkpoints so many tokens forward."""
        some = np.flatnonzero(count)  # others are not rounded again
        if len(some):
            self._fold_into(None, at[some], count[some])
        self._start[at] = (self._start[at] + count) % self._size
        self.live[at] -= count

    def _fold_into(self, S: Any, at: Array, count: Array) -> None:
        """Move the states of rows, in the pool or in S (R, H, K, V), so many tokens forward.

        Raises ValueError for small states on NumPy that are not finite; all are as they were then. CUDA kernels, which
        nothing waits for, store such a value channel so that it is read as NaN.
        """
        if self._on_gpu:
            self._launch_there("fold", at, S, live=count)
            return
        direct = S is None and self._is_direct
        held = S if S is not None or direct else np.array(pools.take(self.state, at))
        states = self._stored() if direct else self._plain_states(held)
        wrong = np.zeros(len(at), np.int64)
        for writes in (0, 1) if "bits" in states else (1,):  # small states are looked at first
            self._launch("fold", at, self._size, **states, state=at if direct else np.arange(len(at)), live=count,
                         wrong=wrong, writes_state=writes)  # fmt: skip
            if wrong.any():
                raise ValueError("StateLog: state has inf or NaN, expected finite numbers")
        if S is None and not direct:
            pools.put(self.state, at, held)


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


def _plain(call: Call) -> tuple[Inputs, Any]:
    """(inputs whose gates, norms, strengths and features are computed, the plan of the rest)."""
    x, plan = inputs_of(call), call.plan
    if isinstance(x, MappedInputs):
        q, k = (None if y is None else x.map[0](cast(np, y, plan.dtype)) for y in (x.q, x.k))
        x = Inputs(q, k, x.v, x.g)
    for name in matrix_state.preprocessing(matrix_state.REFERENCE, x, plan):
        if name in OF_INPUTS:
            x, plan = OF_INPUTS[name][0](matrix_state.REFERENCE.load(), x, plan)
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
