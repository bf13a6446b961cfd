"""The scores of a run, asked by gate set, memory, level and length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .gates import GateSet
from .recall import Score
from .statistics import wilson


@dataclass(frozen=True)
class Scores:
    """All scores of a run and what it was run with."""

    all: Sequence[Score]
    depths: tuple[float, ...]
    gate_sets: dict[str, GateSet]
    text: str | None = None

    @property
    def levels(self) -> list[int]:
        """The levels that were run, easiest first."""
        return sorted({score.level for score in self.all})

    @property
    def lengths(self) -> list[int]:
        """The lengths that were run, shortest first."""
        return sorted({score.length for score in self.all})

    @property
    def streams(self) -> int:
        """Streams a cell: seeds x depths."""
        return len({score.seed for score in self.all}) * len(self.depths)

    def memories(self, gates: str | None) -> list[str]:
        """The memories that were run with a gate set, or without one."""
        return list(dict.fromkeys(score.memory for score in self.all if score.gates == gates))

    def cell(self, gates: str | None, memory: str, level: int, length: int) -> list[Score]:
        """One memory's scores, a seed each; a memory that learns nothing answers for every gate set."""
        found = [
            score
            for score in self.all
            if score.memory == memory
            and score.level == level
            and score.length == length
            and score.gates in (gates, None)
        ]
        return sorted(found, key=lambda score: score.seed)

    def exact(self, gates: str | None, memory: str, level: int, length: int) -> np.ndarray:
        """Whole answers right, (seeds, depths) of 0 and 1."""
        return np.array([score.exact for score in self.cell(gates, memory, level, length)], float)

    def characters(self, gates: str | None, memory: str, level: int, length: int) -> np.ndarray:
        """Part of the characters right, (seeds, depths)."""
        return np.array([score.characters for score in self.cell(gates, memory, level, length)], float)

    def interval(self, gates: str | None, memory: str, level: int, length: int) -> tuple[float, float, float]:
        """Share of whole answers right and its Wilson interval."""
        x = self.exact(gates, memory, level, length)
        return float(x.mean()), *wilson(x.sum(), x.size)

    def anatomy(self, gates: str | None, memory: str, level: int, length: int) -> tuple[float, float, float] | None:
        """Signal, noise and size of the state, means over seeds; None for softmax, which has no state."""
        cell = self.cell(gates, memory, level, length)
        found = [(s.signal, s.noise, s.state) for s in cell if s.signal is not None]
        if not found:
            return None
        signal, noise, state = np.mean(np.array(found, float), axis=0)
        return float(signal), float(noise), float(state)

    def losses(self, gates: str, memory: str) -> np.ndarray:
        """Held-out losses (seeds,) in nats a token of a memory that learned."""
        return np.array([memories[memory].loss for _, memories in sorted(self.gate_sets[gates].items())])
