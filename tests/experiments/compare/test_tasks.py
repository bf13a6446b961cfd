"""Tasks: every label is what a plain program answers from the tokens before it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from linattn_np.experiments.compare.tasks import TASKS
from linattn_np.experiments.compare.tasks import recall as recalled
from linattn_np.experiments.compare.tasks.task import NONE

B = 6


def drawn(name, seed=0):
    """(ids, labels) of each kind of test and of training."""
    task = TASKS[name]()
    each = [task.draw, *task.tests.values()]
    return [draw(np.random.default_rng(seed), B) for draw in each]


@pytest.mark.parametrize("name", TASKS)
def test_batches_are_those_of_their_seed(name):
    task = TASKS[name]()
    ids, labels = task.batch(3, B)(7)
    assert ids.shape == labels.shape == (B, task.tokens)
    again, other = task.batch(3, B)(7), task.batch(3, B)(8)
    assert np.array_equal(ids, again[0])
    assert np.array_equal(labels, again[1])
    assert not np.array_equal(ids, other[0])
    for x, y in drawn(name):
        assert x.min() >= 0
        assert max(x.max(), y.max()) < task.vocabulary
        assert ((y == NONE) | (y >= 0)).all()
        assert (y != NONE).any(axis=1).all()


def latest(row, labels, is_key):
    """Labels of a sequence of pairs: a key's value, if the next token is its value or it was told."""
    known, t = {}, 0
    while t < len(row):
        if labels[t] != NONE:
            assert labels[t] == known[row[t]]
        if is_key(row[t]) and t + 1 < len(row) and not is_key(row[t + 1]) and row[t + 1]:
            known[row[t]], t = row[t + 1], t + 1
        t += 1
    return known


@pytest.mark.parametrize("name", ["mqar", "capacity", "rebinding"])
def test_queries_have_the_latest_value(name):
    for ids, labels in drawn(name):
        for row, label in zip(ids, labels, strict=True):
            known = latest(row, label, lambda x: 0 < x <= recalled.KEYS)
            assert sorted(row[label != NONE]) == sorted(known)  # each key is queried once


@pytest.mark.parametrize("name", ["mad_recall", "mad_noisy"])
def test_keys_that_were_seen_have_their_value(name):
    for ids, labels in drawn(name):
        assert (ids[:, :-1][labels[:, :-1] != NONE] < 8).all()
        for row, label in zip(ids, labels, strict=True):
            known = {}
            for t, x in enumerate(row[:-1]):
                if x < 8:
                    assert (label[t] != NONE) == (x in known)
                    assert label[t] in (NONE, row[t + 1])
                    known[x] = known.get(x, row[t + 1])
                    assert known[x] == row[t + 1]


def test_a_motif_is_followed_by_its_value():
    """A label is the next token, and it has been said before after the same token."""
    for ids, labels in drawn("mad_fuzzy"):
        has = labels[:, :-1] != NONE
        assert np.array_equal(labels[:, :-1][has], ids[:, 1:][has])
        assert (labels[labels != NONE] >= 8).all()
        for row, label in zip(ids, labels, strict=True):
            pairs = list(itertools.pairwise(row))
            for t in np.flatnonzero(label[:-1] != NONE):
                assert pairs[t] in pairs[:t]


def test_places_and_marks_ask_for_what_was_said():
    for ids, labels in drawn("mad_compression"):
        n = ids.shape[1] // 2
        for row, label in zip(ids, labels, strict=True):
            assert label[n:].tolist() == [row[x - 16] for x in row[n:]]
            assert sorted(row[n:] - 16) == list(range(n))
    for ids, labels in drawn("mad_copying"):
        for row, label in zip(ids, labels, strict=True):
            assert label[label != NONE].tolist() == row[row < 16].tolist()
            assert (row[label != NONE] == 17).all()


def test_a_value_of_memory_is_never_shown():
    (ids, labels), (more, other) = drawn("mad_memory")
    value = dict(zip(ids.ravel(), labels.ravel(), strict=True))
    assert len(set(value.values())) == len(value)
    assert all(value.get(x, y) == y for x, y in zip(more.ravel(), other.ravel(), strict=True))
    assert ids.max() < 128 <= labels.min()


def test_states_are_those_of_a_loop():
    for ids, labels in drawn("parity"):
        assert [[sum(row[: t + 1]) % 2 for t in range(len(row))] for row in ids] == labels.tolist()
    for ids, labels in drawn("arithmetic"):
        for row, label in zip(ids, labels, strict=True):
            words = [str(x) if x < 5 else "+-*"[x - 5] for x in row]
            for t in range(0, min(len(row), 60), 2):
                assert label[t] == eval("".join(words[: t + 1])) % 5


@pytest.mark.parametrize("n", [3, 4, 5])
def test_products_of_permutations(n):
    each = list(itertools.permutations(range(n)))
    for ids, labels in drawn(f"s{n}"):
        for row, label in zip(ids[:2], labels, strict=False):
            items = tuple(range(n))
            for x, y in zip(row, label, strict=True):
                items = tuple(items[i] for i in each[x])
                assert each[y] == items


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_answer_stands_in_the_haystack(level):
    for ids, labels in drawn(f"needle{level}"):
        for row, label in zip(ids, labels, strict=True):
            answer, text = bytes(label[label != NONE].tolist()), bytes(row.tolist())
            assert len(answer) == (16 if level == 3 else 5)
            name = text.rsplit(b"secret of ", 1)[1].split(b"?")[0]
            assert b" The secret of " + name + b" is " + answer + b". " in text
            assert text.endswith(b"It is " + answer[:-1])


def test_exchanges_move_two_items_or_none():
    each = list(itertools.permutations(range(5)))
    ids, labels = TASKS["s5_swaps"]().draw(np.random.default_rng(0), 3)
    assert {sum(i != x for i, x in enumerate(each[t])) for t in ids.ravel()} == {0, 2}
    whole, _ = TASKS["s5"]().draw(np.random.default_rng(0), 3)
    assert {sum(i != x for i, x in enumerate(each[t])) for t in whole.ravel()} > {0, 2}
    assert (labels[:, 0] == ids[:, 0]).all()
