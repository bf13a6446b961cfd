"""A real series as numbers: a file of the user's, or the text of Python's help."""

from __future__ import annotations

import csv
import functools
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .files import reading

LETTERS = 16  # channels of a character's code


class Series(NamedTuple):
    """x (T, C): channels of mean 0 and variance 1."""

    name: str
    x: np.ndarray


def load(source: str | None) -> Series:
    """The series in a file .npy, .npz (its largest array in bytes, or FILE.npz:NAME), .csv (columns of numbers) or any
    text.

    None takes the text of Python's help.
    Raises ValueError for a file that holds no series of numbers, OSError for one that cannot be read.
    """
    if source is None:
        return standardised("the text of Python's help", codes(help_text()))
    path, _, member = source.partition(".npz:")
    if member:
        path += ".npz"
    kind = Path(path).suffix.lower()
    if kind in (".npy", ".npz"):
        return standardised(Path(path).name, _array(Path(path)) if kind == ".npy" else _member(Path(path), member))
    if kind == ".csv":
        return standardised(Path(path).name, _columns(Path(path)))
    return standardised(Path(path).name, codes(Path(path).read_text("utf-8", errors="replace")))


def standardised(name: str, x: np.ndarray) -> Series:
    """Channels of mean 0 and variance 1, those that are constant left out."""
    if x.dtype.kind not in "fiub":
        raise ValueError(f"{name} has dtype {x.dtype}, expected numbers")
    if x.ndim not in (1, 2):
        raise ValueError(f"{name} has shape {x.shape}, expected (T,) or (T, C)")
    x = x.reshape(len(x), -1).astype(np.float64)
    if not np.isfinite(x).all():
        raise ValueError(f"{name} has {np.count_nonzero(~np.isfinite(x))} values that are NaN or inf, expected none")
    x = x[:, x.std(axis=0) > 0] if len(x) else x
    if not x.size:
        raise ValueError(f"{name} has no channel that varies")
    return Series(name, (x - x.mean(axis=0)) / x.std(axis=0))


def codes(text: str) -> np.ndarray:
    """(T, LETTERS): every character has a fixed random vector of signs."""
    letters, ids = np.unique(np.array(list(text)), return_inverse=True)
    return np.random.default_rng(0).choice([-1.0, 1.0], (len(letters), LETTERS))[ids]


def _array(path: Path) -> np.ndarray:
    """The array of a file .npy."""
    with reading(path, "array"), path.open("rb") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _member(path: Path, name: str) -> np.ndarray:
    """An array of a file .npz; without a name the largest."""
    with reading(path, "arrays"), zipfile.ZipFile(path) as archive:
        sizes = {x.filename[:-4]: x.file_size for x in archive.infolist() if x.filename.endswith(".npy")}
    wanted = name or max(sizes, key=lambda n: (sizes[n], n), default="")
    if wanted not in sizes:
        raise ValueError(f"{path} has the arrays {', '.join(sizes)}, expected {name or 'an array'}")
    with reading(path, f"array {wanted}"), zipfile.ZipFile(path) as archive, archive.open(f"{wanted}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _columns(path: Path) -> np.ndarray:
    """The columns of a csv file in which every row below the header is a number."""
    with reading(path, "columns of numbers"):
        rows = list(csv.reader(path.read_text("utf-8").splitlines()))
    if rows and not any(map(_is_number, rows[0])):
        rows = rows[1:]
    width = min(map(len, rows), default=0)
    numeric = [c for c in range(width) if all(_is_number(row[c]) for row in rows)]
    if not numeric:
        raise ValueError(f"{path.name} has no column of numbers")
    return np.array([[float(row[c]) for c in numeric] for row in rows])


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


@functools.cache
def help_text() -> str:
    """The text of Python's help, about half a million characters."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))
