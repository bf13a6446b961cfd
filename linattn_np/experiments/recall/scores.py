"""The scores of a run, indexed by gate set, memory, level and length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..statistics import wilson
from .evaluation import Score
from .gates import GateSet


@dataclass(frozen=True)
class Scores:
    """All scores of a run and its settings."""

    all: Sequence[Score]
    depths: tuple[float, ...]
    gate_sets: dict[str, GateSet]
    text: str | None = None

    @property
    def levels(self) -> list[int]:
        """The levels of the run, easiest first."""
        return sorted({score.level for score in self.all})

    @property
    def lengths(self) -> list[int]:
        """The lengths of the run, shortest first."""
        return sorted({score.length for score in self.all})

    @property
    def streams(self) -> int:
        """Streams per cell: seeds x depths."""
        return len({score.seed for score in self.all}) * len(self.depths)

    def memories(self, gates: str | None) -> list[str]:
        """The memories run with a gate set, or those without learned gates for None."""
        return list(dict.fromkeys(score.memory for score in self.all if score.gates == gates))

    @property
    def learned(self) -> list[str]:
        """The memories run with learned gates."""
        return list(dict.fromkeys(score.memory for score in self.all if score.gates is not None))

    def cell(self, gates: str | None, memory: str, level: int, length: int) -> list[Score]:
        """The scores of one memory, one per seed; a memory without learned gates belongs to every gate set."""
        selected = [
            score
            for score in self.all
            if score.memory == memory
            and score.level == level
            and score.length == length
            and score.gates in (gates, None)
        ]
        return sorted(selected, key=lambda score: score.seed)

    def exact(self, gates: str | None, memory: str, level: int, length: int) -> np.ndarray:
        """Exact answers, (seeds, depths) of 0 and 1."""
        return np.array([score.exact for score in self.cell(gates, memory, level, length)], float)

    def characters(self, gates: str | None, memory: str, level: int, length: int) -> np.ndarray:
        """Fractions of correct characters, (seeds, depths)."""
        return np.array([score.characters for score in self.cell(gates, memory, level, length)], float)

    def interval(self, gates: str | None, memory: str, level: int, length: int) -> tuple[float, float, float]:
        """Fraction of exact answers and its Wilson interval."""
        x = self.exact(gates, memory, level, length)
        return float(x.mean()), *wilson(x.sum(), x.size)

    def votes(self, gates: str | None, memory: str, level: int, length: int) -> tuple[float, float, float] | None:
        """Signal, noise and norm of the state, means over seeds; None for softmax, which has no state."""
        cell = self.cell(gates, memory, level, length)
        votes = [(s.signal, s.noise, s.state) for s in cell if s.signal is not None]
        if not votes:
            return None
        signal, noise, state = np.mean(np.array(votes, float), axis=0)
        return float(signal), float(noise), float(state)

    def losses(self, gates: str, memory: str) -> np.ndarray:
        """Held-out losses (seeds,) in nats per token of a memory with learned gates."""
        return np.array([memories[memory].loss for _, memories in sorted(self.gate_sets[gates].items())])
