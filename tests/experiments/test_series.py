"""Series from files."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.experiments.series import LETTERS, load


def test_files_of_numbers(tmp_path):
    x = np.random.default_rng(0).standard_normal((50, 3)) * [1, 5, 9] + 4
    np.save(tmp_path / "a.npy", x)
    np.savez(tmp_path / "b.npz", small=x[:5], large=x, line=x[:, 1])
    rows = "\n".join(f"d{n},{a},{b},{c}" for n, (a, b, c) in enumerate(x))
    (tmp_path / "c.csv").write_text(f"day,first,second,third\n{rows}")
    expected = (x - x.mean(0)) / x.std(0)
    for name in ("a.npy", "b.npz", "b.npz:large", "c.csv"):
        assert np.allclose(load(str(tmp_path / name)).x, expected, rtol=0, atol=1e-9)
    assert load(str(tmp_path / "b.npz:line")).x.shape == (50, 1)


def test_texts_and_what_is_shipped(tmp_path):
    (tmp_path / "t.txt").write_text("to be or not to be")
    series = load(str(tmp_path / "t.txt"))
    assert series.x.shape[0] == 18
    assert np.array_equal(series.x[:5], series.x[-5:])  # equal characters are equal rows
    assert load(None).x.shape[0] > 100_000
    assert load(None).x.shape[1] == LETTERS


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.zeros((4, 4, 4)), r"x.npy has shape \(4, 4, 4\), expected \(T,\) or \(T, C\)"),
        (np.ones((9, 2)), "x.npy has no channel that varies"),
        (np.array([1.0, np.nan, 2.0]), "x.npy has 1 values that are NaN or inf, expected none"),
        (np.array(["a", "b"]), "x.npy has dtype <U1, expected numbers"),
    ],
)
def test_what_is_no_series(tmp_path, x, text):
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ValueError, match=text):
        load(str(tmp_path / "x.npy"))


def test_files_without_numbers(tmp_path):
    (tmp_path / "c.csv").write_text("a,b\nx,y\n")
    with pytest.raises(ValueError, match=r"c\.csv has no column of numbers"):
        load(str(tmp_path / "c.csv"))
    np.savez(tmp_path / "b.npz", one=np.arange(3))
    with pytest.raises(ValueError, match="has the arrays one, expected two"):
        load(str(tmp_path / "b.npz:two"))
    with pytest.raises(OSError, match=r"none\.npy"):
        load(str(tmp_path / "none.npy"))
