"""Tasks: batches of tokens, labels where there is an answer, and tests by length or difficulty."""

from __future__ import annotations

from collections.abc import Callable

from . import mad, recall, text, tracking
from .task import Task

TASKS: dict[str, Callable[[], Task]] = {
    "text": text.task,
    "mqar": recall.mqar,
    "capacity": recall.capacity,
    "rebinding": recall.rebinding,
    "needle1": lambda: recall.needle(1),
    "needle2": lambda: recall.needle(2),
    "needle3": lambda: recall.needle(3),
    "parity": tracking.parity,
    "arithmetic": tracking.arithmetic,
    "s3": lambda: tracking.permutations(3),
    "s4": lambda: tracking.permutations(4),
    "s5": lambda: tracking.permutations(5),
    "s5_swaps": lambda: tracking.permutations(5, swaps=True),
    "mad_recall": mad.recall,
    "mad_noisy": mad.noisy,
    "mad_fuzzy": mad.fuzzy,
    "mad_memory": mad.memory,
    "mad_compression": mad.compression,
    "mad_copying": mad.copying,
}  # fmt: skip
