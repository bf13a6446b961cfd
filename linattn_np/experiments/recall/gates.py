"""Files of learned gates: the shipped sets and user sets."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..files import reading
from .memories import RECURRENT, Logits, Memory

DIGITS, LOSS_DIGITS = 3, 4  # decimal places in a file
SHIPPED = ("prose", "mixed", "facts")


@dataclass(frozen=True)
class Learned:
    """The logits that a memory learned, and its held-out loss in nats per token."""

    logits: Logits
    loss: float


GateSet = dict[int, dict[str, Learned]]  # seed -> memory name -> result


def load_gate_sets(names: Iterable[str]) -> dict[str, GateSet]:
    """Gate sets by name; each name is a shipped set or a file with one or more sets."""
    shipped = resources.files("linattn_np.experiments.recall").joinpath("gates.json")
    sets: dict[str, GateSet] = {}
    for name in names:
        if name in SHIPPED:
            sets[name] = read_sets(shipped.read_text("utf8"))[name]
        elif Path(name).is_file():
            sets |= read_file(Path(name))
        else:
            raise ValueError(f"no gate set {name!r}: neither one of {', '.join(SHIPPED)} nor a file")
    return sets


def read_file(path: Path) -> dict[str, GateSet]:
    """The gate sets of a file, none of one that does not exist; ValueError for a file of another kind."""
    with reading(path, "gate sets"):
        return read_sets(path.read_text("utf8")) if path.exists() else {}


def read_sets(text: str) -> dict[str, GateSet]:
    """The gate sets in the text of a file."""
    return {
        name: {int(seed): decode(seed_sets) for seed, seed_sets in seeds.items()}
        for name, seeds in json.loads(text).items()
    }


def decode(memories: dict[str, dict[str, Any]]) -> dict[str, Learned]:
    """The result of each memory, from its entry in a file."""
    return {
        name: Learned({k: np.array(x) for k, x in entry.items() if k != "loss"}, entry["loss"])
        for name, entry in memories.items()
    }


def check_shapes(gate_sets: dict[str, GateSet]) -> None:
    """Raise ValueError unless each memory has the logits that its gates need."""
    for set_name, gate_set in gate_sets.items():
        for seed, memories in gate_set.items():
            for name, learned in memories.items():
                for part, start in RECURRENT.get(name, Memory()).start.items():
                    came = np.shape(learned.logits.get(part, []))
                    if came != np.shape(start):
                        raise ValueError(
                            f"gates {set_name}, seed {seed}: {part} of {name} has shape {came}, expected "
                            f"{np.shape(start)}"
                        )


def encode(learned: Learned) -> dict[str, Any]:
    """The entry of one memory in a file, rounded."""
    logits = {name: np.round(x, DIGITS).tolist() for name, x in learned.logits.items()}
    return logits | {"loss": round(learned.loss, LOSS_DIGITS)}


def save_gate_set(path: Path, name: str, gate_set: GateSet) -> None:
    """Write a set under its name; other sets, seeds and memories in the file are preserved."""
    sets = json.loads(path.read_text("utf8")) if path.exists() else {}
    seeds = sets.setdefault(name, {})
    for seed, memories in gate_set.items():
        seeds.setdefault(str(seed), {}).update({memory: encode(learned) for memory, learned in memories.items()})
    path.write_text(one_line_lists(json.dumps(sets, indent=1)) + "\n", "utf8")


def one_line_lists(text: str) -> str:
    """JSON text with each list of numbers on one line."""
    parts = text.split("[")
    folded = [parts[0]]
    for part in parts[1:]:
        inside, after = part.split("]", 1)
        folded.append(" ".join(inside.split()) + "]" + after)
    return "[".join(folded)
