"""Replay: a call with a known signature runs its recorded plan on the new arrays (docs/replay.md)."""

from .plans import clear as clear
from .plans import count as count
