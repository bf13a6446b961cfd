"""A prefix cache: states after the tokens that many requests begin with, in a radix tree bounded in bytes.

An edge holds whole chunks of tokens. A node that holds no state has two children or more: an edge is split where
prefixes part, and joined with the next one when the state between them goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import takewhile
from types import TracebackType
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..runtime.values import is_whole, shown

Chunks = tuple[bytes, ...]  # one for each chunk: its tokens, 8 bytes a token


class Node:
    """The end of an edge, and the state after it, if one is stored."""

    __slots__ = ("children", "edge", "leases", "nbytes", "parent", "state")

    def __init__(self, parent: Node | None, edge: Chunks):
        self.parent, self.edge = parent, edge
        self.children: dict[bytes, Node] = {}  # by the first chunk of their edges
        self.state: Any = None
        self.nbytes, self.leases = 0, 0


class Lease:
    """A stored state that stays until `release`, or the end of a with-block.

    length: how many tokens it is after. state: as it was put, in arrays of the store's own: read them, never write.
    """

    def __init__(self, store: StateStore, node: Node, length: int):
        self._store, self._node = store, node
        self.length, self.state = length, node.state
        self._is_held = True

    def release(self) -> None:
        """The store may evict the state. A second call does nothing."""
        with self._store._lock:
            if self._is_held:
                self._is_held, self.state = False, None
                self._store._released(self._node)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class StateStore:
    """A cache of states by the tokens before them, for prompts that begin alike.

        store = la.StateStore(max_bytes=2**30, chunk_size=64)
        store.put(tokens, state)              # the state after all of these tokens
        with store.longest(tokens) as found:  # of the longest stored prefix, or None
            found.length, found.state

    max_bytes: of the arrays of states; the token numbers, 8 bytes each, are not counted. chunk_size: states are stored
    after multiples of it. A state is an array or nested tuples, lists and dictionaries of arrays: one a layer, packed
    states, convolution rows. States are copied; NumPy copies are read-only. One store serves one model.

    When the bytes are used up the state that was used least recently goes, never a leased one. Methods may be called
    from several threads. A store is copied and pickled with its states and without leases.

    nbytes: of the states stored. lookups, hits: calls of `longest`, and how many found a state.
    Raises ValueError for max_bytes or chunk_size that are no whole numbers from 1.
    """

    def __init__(self, max_bytes: int, chunk_size: int = 64):
        for name, value in (("max_bytes", max_bytes), ("chunk_size", chunk_size)):
            if not is_whole(value):
                raise ValueError(f"StateStore: {name} is {shown(value)}, expected a whole number from 1")
        self.max_bytes, self.chunk_size = int(max_bytes), int(chunk_size)
        self.nbytes = self.lookups = self.hits = 0
        self._root = Node(None, ())
        self._idle: dict[Node, None] = {}  # states without a lease, the least recently used first
        self._leased = 0  # bytes of states with one
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """The number of states."""
        with self._lock:
            return sum(node.state is not None for node in self._nodes())

    def put(self, tokens: Any, state: Any) -> bool:
        """Store a copy of the state after all of `tokens`; False if leased states leave no room for it.

        A state that is stored already stays, and counts as used. Raises TypeError for tokens that are no vector of
        whole numbers and for a state without arrays, ValueError if their number is no multiple of chunk_size from 1.
        """
        chunks = self._chunks("put", tokens)
        if len(tokens) != len(chunks) * self.chunk_size or not chunks:
            raise ValueError(
                f"StateStore.put: {len(tokens)} tokens, expected a multiple of chunk_size = {self.chunk_size} from it"
            )
        size = sum(x.nbytes for x in _arrays(state))
        with self._lock:
            node = self._known(chunks)
            if node is None or node.state is None:
                if self._leased + size > self.max_bytes:
                    return False
                own = _mapped(_copied, state)
                while self.nbytes + size > self.max_bytes:
                    self._remove(next(iter(self._idle)))
                node = self._inserted(chunks)
                node.state, node.nbytes = own, size
                self.nbytes += size
            self._used(node)
            return True

    def longest(self, tokens: Any) -> Lease | None:
        """A lease of the state after the longest stored prefix of `tokens`, all of them included; None without one.

        A model needs a token to compute from: ask for tokens[:-1]. Raises TypeError for tokens that are no vector of
        whole numbers.
        """
        chunks = self._chunks("longest", tokens)
        with self._lock:
            self.lookups += 1
            found, length = None, 0
            for node, depth in self._path(chunks):
                if node.state is not None:
                    found, length = node, depth
            if found is None:
                return None
            self.hits += 1
            if not found.leases:
                self._idle.pop(found)
                self._leased += found.nbytes
            found.leases += 1
            return Lease(self, found, length * self.chunk_size)

    def __reduce__(self) -> Any:
        """Copied and pickled as tokens and states, the least recently used first: leases stay with this store."""
        with self._lock:
            nodes = [*self._idle, *(node for node in self._nodes() if node.leases)]
            stored = [(_tokens_before(node), node.state) for node in nodes]
            return _filled, (self.max_bytes, self.chunk_size, self.lookups, self.hits, stored)

    def clear(self) -> None:
        """Remove every state without a lease."""
        with self._lock:
            for node in list(self._idle):
                self._remove(node)

    # states in use

    def _used(self, node: Node) -> None:
        """The state was used last."""
        if not node.leases:
            self._idle.pop(node, None)
            self._idle[node] = None

    def _released(self, node: Node) -> None:
        node.leases -= 1
        if not node.leases:
            self._leased -= node.nbytes
            self._used(node)

    def _remove(self, node: Node) -> None:
        """Take a state without a lease out of the tree."""
        del self._idle[node]
        self.nbytes -= node.nbytes
        node.state, node.nbytes = None, 0
        self._joined(node)

    # the tree

    def _chunks(self, method: str, tokens: Any) -> Chunks:
        """The whole chunks of tokens."""
        x = np.asarray(tokens)
        if x.ndim != 1 or (x.dtype.kind not in "iu" and len(x)) or x.dtype == np.uint64:
            came = f"tokens has shape {x.shape} and dtype {x.dtype}"
            raise TypeError(f"StateStore.{method}: {came}, expected a vector of whole numbers")
        each, size = np.ascontiguousarray(x, np.int64).tobytes(), 8 * self.chunk_size
        return tuple(each[n : n + size] for n in range(0, len(each) - size + 1, size))

    def _path(self, chunks: Chunks) -> Iterator[tuple[Node, int]]:
        """(node, number of chunks before it) along these chunks."""
        node, depth = self._root, 0
        while depth < len(chunks) and (child := node.children.get(chunks[depth])) is not None:
            if chunks[depth : depth + len(child.edge)] != child.edge:
                return
            node, depth = child, depth + len(child.edge)
            yield node, depth

    def _known(self, chunks: Chunks) -> Node | None:
        """The node after these chunks; None without one."""
        return next((node for node, depth in self._path(chunks) if depth == len(chunks)), None)

    def _inserted(self, chunks: Chunks) -> Node:
        """The node after these chunks, new if there is none."""
        node = self._root
        while chunks:
            child = node.children.get(chunks[0])
            if child is None:
                child = node.children[chunks[0]] = Node(node, chunks)
            else:
                pairs = zip(child.edge, chunks, strict=False)
                child = self._split(child, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
            node, chunks = child, chunks[len(child.edge) :]
        return node

    def _split(self, node: Node, at: int) -> Node:
        """The node after the first `at` chunks of an edge."""
        if at == len(node.edge):
            return node
        parent: Any = node.parent
        middle = parent.children[node.edge[0]] = Node(parent, node.edge[:at])
        node.parent, node.edge = middle, node.edge[at:]
        middle.children[node.edge[0]] = node
        return middle

    def _joined(self, node: Node) -> None:
        """Drop a node that holds nothing and where nothing parts, and then its parent, if that has become one."""
        parent = node.parent
        if parent is None or node.state is not None or len(node.children) > 1:
            return
        if node.children:
            (child,) = node.children.values()
            child.parent, child.edge = parent, node.edge + child.edge
            parent.children[node.edge[0]] = child
        else:
            del parent.children[node.edge[0]]
            self._joined(parent)

    def _nodes(self) -> list[Node]:
        found = [self._root]
        for node in found:
            found += node.children.values()
        return found


def _tokens_before(node: Node | None) -> np.ndarray:
    """All tokens before the state of a node."""
    edges: list[bytes] = []
    while node is not None:
        edges[:0] = node.edge
        node = node.parent
    return np.frombuffer(b"".join(edges), np.int64)


def _filled(max_bytes: int, chunk_size: int, lookups: int, hits: int, stored: list[tuple[Any, Any]]) -> StateStore:
    """A store of copies of these states."""
    store = StateStore(max_bytes, chunk_size)
    for tokens, state in stored:
        store.put(tokens, state)
    store.lookups, store.hits = lookups, hits
    return store


# states of any structure


def _mapped(f: Callable[[Any], Any], state: Any) -> Any:
    """f of every array of nested tuples, lists and dictionaries; None and texts stay."""
    if isinstance(state, dict):
        return {n: _mapped(f, x) for n, x in state.items()}
    if isinstance(state, tuple | list):
        each = [_mapped(f, x) for x in state]
        return type(state)(*each) if hasattr(state, "_fields") else type(state)(each)
    return state if state is None or isinstance(state, str) else f(state)


def _arrays(state: Any) -> list[Any]:
    """Every array of a state.   Raises TypeError for anything else in it, and without one."""
    found: list[Any] = []
    _mapped(found.append, state)
    if wrong := [x for x in found if not hasattr(x, "nbytes")]:
        raise TypeError(f"StateStore.put: state holds a {type(wrong[0]).__qualname__}, expected arrays")
    if not found:
        raise TypeError(f"StateStore.put: state is {shown(state)}, expected arrays")
    return found


def _copied(x: Any) -> Any:
    """A copy; of NumPy a read-only one."""
    if isinstance(x, np.ndarray):
        own = x.copy()
        own.flags.writeable = False
        return own
    return array_namespace(x).asarray(x, copy=True)
