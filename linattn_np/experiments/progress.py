"""Progress on standard error: a bar on a terminal, else one line at the start and one at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(label: str, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    """A function that is called with the number of units done since the last call."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, desc=label, unit=f" {unit}", unit_scale=total >= 10_000, dynamic_ncols=True) as bar:
            yield bar.update
        return
    start = time.perf_counter()
    sys.stderr.write(f"{label}: {total:,} {unit}\n")
    yield lambda _: None
    sys.stderr.write(f"{label}: done after {time.perf_counter() - start:.0f} s\n")
