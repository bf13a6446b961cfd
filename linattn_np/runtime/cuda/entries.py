"""Compilations ahead of a call, and the resources of a block on each architecture."""

from __future__ import annotations

from typing import NamedTuple

from .elements import Constants

SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}  # KiB a block


class Entry(NamedTuple):
    """One compilation: its description, the source file, and the constants passed to the compiler."""

    words: str
    file: str
    constants: Constants
