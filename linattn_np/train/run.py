"""A run: parameters, moments of the optimiser, step, seed and losses; all of it is one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..layers import Layer
from ..runtime.values import shown
from . import safetensors
from .flat import Flat, on_device, on_host
from .optimisers import AdamW, Muon

Optimiser = AdamW | Muon
ADAMW = AdamW()


@dataclass
class Run:
    """The state of training. The data position is the number of batches so far; randomness comes from seed and it."""

    params: Flat
    moments: dict[str, Flat]
    optimiser: Optimiser
    step: int = 0
    position: int = 0  # batches so far
    seed: int = 0
    losses: list[float] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)  # of the model; what JSON holds

    @classmethod
    def start(cls, loss: Layer, optimiser: Optimiser = ADAMW, seed: int = 0, about: Mapping[str, Any] = {},
              dtype: Any = np.float32) -> Run:  # fmt: skip
        """Initial parameters of a layer, drawn from the seed.

        dtype  float32, float64, float16, bfloat16 (of ml_dtypes); in 16 bits the optimiser keeps them in float32, too
        """
        wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
        params, moments = optimiser.start(loss.init(np.random.default_rng(seed), wide), dtype)
        return cls(params, moments, optimiser, seed=seed, about=dict(about))

    def to(self, device: str) -> Run:
        """This run, its parameters and moments moved to "cpu", NumPy arrays, or "cuda", the current device of CuPy.

        Raises ModuleNotFoundError without CuPy, RuntimeError without a device, ValueError for another word.
        """
        if device not in ("cpu", "cuda"):
            raise ValueError(f"Run.to: device is {shown(device)}, expected 'cpu' or 'cuda'")
        move = on_host if device == "cpu" else on_device()
        self.params = self.params.like(move(self.params.vector))
        self.moments = {kind: x.like(move(x.vector)) for kind, x in self.moments.items()}
        return self

    def save(self, path: str | Path) -> None:
        """Writes params/..., moments and losses to a safetensors file."""
        arrays = {f"params/{n}": on_host(x) for n, x in self.params.arrays.items()}
        for kind, moment in self.moments.items():
            arrays |= {f"{kind}/{n}": on_host(x) for n, x in moment.arrays.items()}
        arrays["losses"] = np.array(self.losses, np.float64)
        place = {"step": self.step, "position": self.position, "seed": self.seed}
        safetensors.save(path, arrays, {"run": json.dumps(place), "about": json.dumps(self.about)})

    @classmethod
    def load(cls, path: str | Path, optimiser: Optimiser = ADAMW) -> Run:
        """The run in a file that `save` wrote, with the optimiser that it had.

        Raises ValueError for another file or one of another optimiser.
        """
        arrays, texts = safetensors.load(path)
        about = cls.about_of(texts, path)
        params, moments = optimiser.start(_below(arrays, "params"))
        for kind, moment in moments.items():
            own = _below(arrays, kind)
            if own.keys() != moment.arrays.keys():
                raise ValueError(f"{path} has moments {kind!r} of {len(own)} arrays, expected {len(moment.arrays)}: "
                                 f"the optimiser is {type(optimiser).__name__}")  # fmt: skip
            moment.set(own)
        return cls(params, moments, optimiser, **json.loads(texts["run"]), losses=arrays["losses"].tolist(),
                   about=about)  # fmt: skip

    @staticmethod
    def about_of(texts: Mapping[str, str], path: str | Path) -> dict[str, Any]:
        """What a run tells about itself, from the texts of its file.   Raises ValueError for another file."""
        if "run" not in texts:
            raise ValueError(f"{path} holds no run of training")
        return json.loads(texts["about"])


def _below(arrays: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {path.removeprefix(f"{name}/"): x for path, x in arrays.items() if path.startswith(f"{name}/")}
