"""StateStore: whatever is put, leased and released, it holds what a dictionary and a list hold."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import linattn_np as la

CHUNK = 2
PROMPTS = st.lists(st.integers(0, 1), max_size=9)
WHOLE = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(lambda x: [t for t in x for _ in range(CHUNK)])


class Store(RuleBasedStateMachine):
    """The model: states by their tokens, the least recently used first, and how many leases each has."""

    def __init__(self):
        super().__init__()
        self.store = la.StateStore(max_bytes=100, chunk_size=CHUNK)
        self.model: dict[tuple[int, ...], np.ndarray] = {}
        self.leases: list[tuple[tuple[int, ...], object]] = []
        self.number = 0

    def held(self):
        return {key for key, _ in self.leases}

    @rule(tokens=WHOLE, size=st.integers(1, 6))
    def put(self, tokens, size):
        key, self.number = tuple(tokens), self.number + 1
        state = np.full(2 * size, self.number, np.int64)
        found = self.store.put(tokens, state)
        if key in self.model:
            assert found
            if key not in self.held():
                self.model[key] = self.model.pop(key)
        elif sum(self.model[k].nbytes for k in self.held()) + state.nbytes > 100:
            assert not found
        else:
            assert found
            while sum(x.nbytes for x in self.model.values()) + state.nbytes > 100:
                del self.model[next(k for k in self.model if k not in self.held())]
            self.model[key] = state.copy()
        state[:] = -1  # the caller's own again

    @rule(tokens=PROMPTS)
    def longest(self, tokens):
        known = [n for n in range(1, len(tokens) + 1) if tuple(tokens[:n]) in self.model]
        found = self.store.longest(tokens)
        assert (found is None) == (not known)
        if found is not None:
            assert found.length == known[-1]
            self.leases.append((tuple(tokens[: known[-1]]), found))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        key, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.release()
        lease.release()
        if key not in self.held():
            self.model[key] = self.model.pop(key)

    @rule()
    def clear(self):
        self.store.clear()
        self.model = {k: x for k, x in self.model.items() if k in self.held()}

    @invariant()
    def holds_the_states_of_the_model(self):
        assert len(self.store) == len(self.model)
        assert self.store.nbytes == sum(x.nbytes for x in self.model.values()) <= 100
        for key, lease in self.leases:
            assert np.array_equal(lease.state, self.model[key])

    @invariant()
    def is_a_radix_tree(self):
        """Every node but the root holds a state, or prefixes part there; edges of one node begin differently."""
        for node in self.store._nodes()[1:]:
            assert node.edge
            assert node.parent.children[node.edge[0]] is node
            assert node.state is not None or len(node.children) > 1

    def teardown(self):
        for _, lease in self.leases:
            lease.release()
        self.store.clear()
        assert (len(self.store), self.store.nbytes, self.store._leased) == (0, 0, 0)
        assert len(self.store._nodes()) == 1


Store.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)
TestStoreAgainstItsModel = Store.TestCase


def test_a_decode_in_place_cannot_write_to_a_stored_state():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 4, 2, 3)).astype(np.float32)
    _, state = la.linear_attention(q, k, v, return_state=True)
    store = la.StateStore(10**6, chunk_size=4)
    assert store.put([1, 2, 3, 4], state)
    with store.longest([1, 2, 3, 4, 5]) as found, pytest.raises(ValueError, match="read-only"):
        la.linear_attention(q, k, v, state=found.state, overwrite_state=True)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_store_is_copied_with_its_states_and_without_leases(copied):
    store = la.StateStore(5 * 24, chunk_size=2)
    prompts = [list(range(n)) for n in (2, 4, 8, 6)] + [[0, 1, 9, 9]]
    for n, tokens in enumerate(prompts):
        assert store.put(tokens, {"S": np.full(3, float(n))})
    with store.longest(prompts[0]) as leased:
        other = copied(store)
        assert (other.nbytes, len(other), other.lookups, other.hits) == (store.nbytes, 5, 1, 1)
        for n, tokens in enumerate(prompts):
            with other.longest(tokens) as found:
                assert found.length == len(tokens)
                assert np.array_equal(found.state["S"], np.full(3, float(n)))
                assert not found.state["S"].flags.writeable
        assert other.put([5, 5], {"S": np.zeros(3)})
        assert len(other) == len(store) == 5  # the other one has room for one more, once its oldest is gone
        assert store.longest([5, 5]) is None
        other.clear()
        assert (len(other), other.nbytes) == (0, 0)
        assert np.array_equal(leased.state["S"], np.zeros(3))


def test_states_of_any_structure_are_copied():
    S, m = np.ones((2, 3)), np.zeros(4)
    store = la.StateStore(10**6, chunk_size=1)
    nest = {"layers": [la.StabilisedState(S, m, m), (S,)], "conv": None}
    assert store.put([7], nest)
    S[:] = m[:] = 5
    with store.longest([7]) as found:
        one, two = found.state["layers"]
        assert type(one) is la.StabilisedState
        assert type(two) is tuple
        assert found.state["conv"] is None
        assert (one.S == 1).all()
        assert (one.m == 0).all()
        assert (two[0] == 1).all()
    assert store.nbytes == 2 * 48 + 2 * 32
    assert found.state is None


def test_a_failing_client_releases_its_state():
    store = la.StateStore(8, chunk_size=1)
    store.put([1], np.ones(1))

    def client():
        with store.longest([1, 2]):
            assert not store.put([2], np.ones(1))
            raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled"):
        client()
    assert store.put([2], np.ones(1))
    assert store.longest([1]) is None
    assert (store.lookups, store.hits) == (2, 1)


def test_threads_leave_the_store_whole():
    store = la.StateStore(8 * 40, chunk_size=1)

    def client(seed):
        rng = np.random.default_rng(seed)
        for _ in range(150):
            tokens = rng.integers(0, 2, rng.integers(1, 7))
            store.put(tokens, np.array([len(tokens)]))
            if (found := store.longest(tokens)) is not None:
                with found:
                    wrong.extend([] if found.state[0] == found.length else [tokens])

    wrong: list[np.ndarray] = []
    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert store._leased == 0
    assert store.nbytes == 8 * len(store) <= store.max_bytes


@pytest.mark.parametrize(
    ("tokens", "error", "text"),
    [
        ([1, 2, 3], ValueError, "3 tokens, expected a multiple of chunk_size = 2"),
        ([], ValueError, "0 tokens"),
        ([[1, 2]], TypeError, r"shape \(1, 2\)"),
        ([1.0, 2.0], TypeError, "float64"),
        ([True, False], TypeError, "bool"),
    ],
)
def test_wrong_tokens_are_refused(tokens, error, text):
    with pytest.raises(error, match=rf"StateStore.put: .*{text}"):
        la.StateStore(10, chunk_size=2).put(tokens, np.ones(1))


def test_wrong_states_and_sizes_are_refused():
    store = la.StateStore(10, chunk_size=1)
    for state in ((), None, (np.ones(1), 5), "text"):
        with pytest.raises(TypeError, match="expected arrays"):
            store.put([1], state)
    for sizes in ({"max_bytes": 0}, {"max_bytes": 10, "chunk_size": 1.5}):
        with pytest.raises(ValueError, match="expected a whole number from 1"):
            la.StateStore(**sizes)
