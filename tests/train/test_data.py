"""Tokens of files and batches of them."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la

Tokens = la.train.Tokens


def test_files_are_one_sequence(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"hello")
    (tmp_path / "none.txt").write_bytes(b"")
    np.save(tmp_path / "b.npy", np.array([300, 7, 1], np.int32))
    data = Tokens.open([tmp_path / n for n in ("a.txt", "none.txt", "b.npy")])
    assert len(data) == 8
    assert data[3:7].tolist() == [108, 111, 300, 7]
    first, last = data.split(0.75)
    assert first[:].tolist() == [104, 101, 108, 108, 111, 300]
    assert last[:].tolist() == [7, 1]
    assert last[1:1].tolist() == []
    (tmp_path / "c.bin").write_bytes(np.array([1, 500], np.uint16).tobytes())
    assert Tokens.open([tmp_path / "c.bin"], np.uint16)[:].tolist() == [1, 500]


def test_files_are_mapped_not_read(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    np.save(tmp_path / "b.npy", np.arange(3))
    assert all(isinstance(x, np.memmap) for x in Tokens.open([tmp_path / "a", tmp_path / "b.npy"]).parts)


def test_every_window_comes_once_an_epoch():
    T, B = 5, 3
    data = Tokens([np.arange(28), np.arange(28, 61)])
    count = (61 - 1) // T - 1
    batch = data.batches(B, T, seed=4)
    for epoch in (0, 3):
        rows = [batch(n // B)[0][n % B] for n in range(epoch * count, (epoch + 1) * count)]
        starts = sorted(int(r[0]) for r in rows)
        assert len({s % T for s in starts}) == 1
        assert np.array_equal(np.diff(starts), np.full(count - 1, T))
        assert all(np.array_equal(r, np.arange(r[0], r[0] + T)) for r in rows)
    ids, labels = batch(2)
    assert np.array_equal(ids + 1, labels)
    assert np.array_equal(ids, data.batches(B, T, seed=4)(2)[0])
    assert not np.array_equal(ids, data.batches(B, T, seed=5)(2)[0])


@pytest.mark.parametrize("length", [6, 7, 10, 11])
def test_few_tokens_are_a_window(length):
    ids, labels = Tokens([np.arange(length)]).batches(2, 5)(0)
    assert ids.shape == labels.shape == (2, 5)
    assert labels.max() < length


def test_what_is_no_sequence_is_named(tmp_path):
    with pytest.raises(ValueError, match="batches: there are 5 tokens, expected more than T = 5"):
        Tokens([np.arange(5)]).batches(1, 5)
    np.save(tmp_path / "a.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"a.npy has shape \(2, 2\) and dtype float64, expected a vector of whole"):
        Tokens.open([tmp_path / "a.npy"])
    (tmp_path / "odd").write_bytes(b"abc")
    with pytest.raises(ValueError, match="odd has 3 bytes, expected a multiple of 2"):
        Tokens.open([tmp_path / "odd"], np.uint16)
