"""Prose, tokens, needles, streams and windows."""

import random

import numpy as np
import pytest

from linattn_np.experiments.recall.needles import ALPHABET, all_keys, draw_needle, question, statement
from linattn_np.experiments.recall.streams import APART, build_streams, training_windows
from linattn_np.experiments.recall.text import load_corpus, tokens

DEPTHS = [0.0, 0.2, 0.5, 1.0]


def test_an_answer_is_7_or_36_tokens_of_the_answer_alphabet():
    rng = random.Random(3)
    for kind, count in (("number", 7), ("uuid", 36)):
        value = tokens(draw_needle(rng, kind).value)
        assert len(value) == count
        assert set(value) <= set(ALPHABET)


def test_statement_and_question_end_alike_so_that_the_first_character_has_one_context():
    for kind in ("number", "uuid"):
        assert tokens(statement(kind, "tall-river"))[-4:] == tokens(question(kind, "tall-river"))[-4:]


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("length", [257, 1024])
def test_streams_have_their_length_and_their_needle_at_its_depth(level, length):
    corpus = load_corpus()
    streams = build_streams(corpus, 0, level, length, DEPTHS)
    n = streams.answer_tokens
    assert n == (36 if level == 3 else 7)
    assert streams.ids.shape == (len(DEPTHS), length)
    for ids, at, depth in zip(streams.ids, streams.needle_at, DEPTHS, strict=True):
        assert np.array_equal(ids[at : at + n], ids[-n:])
        kind = "uuid" if level == 3 else "number"
        fact, query = len(tokens(statement(kind, "a"))), len(tokens(question(kind, "a")))
        haystack = length - fact - query - 2 * n
        assert at == round(depth * haystack) + fact
        assert np.array_equal(ids[at - 4 : at], ids[length - n - 4 : length - n])


def test_streams_are_the_same_for_the_same_seed_and_differ_by_depth():
    corpus = load_corpus()
    first, same, other = (build_streams(corpus, seed, 2, 512, DEPTHS).ids for seed in (0, 0, 1))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)
    assert len({tuple(row[-7:]) for row in first}) == len(DEPTHS)


def test_a_short_text_is_wrapped_and_an_empty_one_refused(tmp_path):
    short, empty = tmp_path / "short.txt", tmp_path / "empty.txt"
    short.write_text("A cat sat on a mat; été 12.")
    empty.write_text("  \n")
    ids = build_streams(load_corpus(str(short)), 0, 2, 300, [0.5]).ids
    assert ids.shape == (1, 300)
    with pytest.raises(ValueError, match="holds no words"):
        load_corpus(str(empty))


@pytest.mark.parametrize(("length", "needles"), [(2048, 0), (2048, 1), (1024, 2)])
def test_training_windows_state_each_fact_once_and_ask_it_later(length, needles):
    corpus = load_corpus()
    windows = training_windows(corpus, corpus.train, random.Random(1), 3, length, needles)
    assert windows.shape == (3, length + 1)
    names = np.array(corpus.vocabulary.names)
    for window in windows:
        words = names[window].tolist()
        keys = [i for i, word in enumerate(words) if word in set(all_keys())]
        assert len(keys) == 3 * needles  # stated once, named twice by the question
        for key in {words[i] for i in keys}:
            fact, query, _ = (i for i in keys if words[i] == key)
            assert query - fact >= APART
            n = 7 if words[fact - 2] == "number" else 36
            assert words[fact + 3 : fact + 3 + n] == words[keys_end(words, key) :][:n]


def keys_end(words: list[str], key: str) -> int:
    """Position after "KEY is :" at its last place."""
    last = max(i for i, word in enumerate(words) if word == key)
    return last + 3
