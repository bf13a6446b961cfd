"""Files of a command: what cannot be read is a ValueError that names the file, before any work."""

from __future__ import annotations

import csv
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNREADABLE = (
    ValueError,
    EOFError,
    MemoryError,
    OverflowError,
    RecursionError,
    csv.Error,
    zlib.error,
    zipfile.BadZipFile,
)
MISSHAPEN = (AttributeError, IndexError, KeyError, TypeError)  # of values where JSON has other kinds or names


@contextmanager
def reading(path: Path | str, wanted: str) -> Iterator[None]:
    """ValueError "PATH holds no WANTED" for a file that is cut, too large or of another kind; OSError as it is."""
    try:
        yield
    except UNREADABLE as problem:
        reason = (str(problem) or type(problem).__name__).splitlines()[0]
        raise ValueError(f"{path} holds no {wanted}: {reason}") from problem
    except MISSHAPEN as problem:
        raise ValueError(f"{path} holds no {wanted}") from problem


def prepare(*outputs: Path | None) -> None:
    """Make the folders of output files; IsADirectoryError for one that is a folder itself."""
    for path in filter(None, outputs):
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder, expected a file")
        path.parent.mkdir(parents=True, exist_ok=True)
