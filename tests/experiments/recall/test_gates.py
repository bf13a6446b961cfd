"""Files of gates: they can be saved and loaded, and the shipped sets are complete."""

import numpy as np
import pytest

from linattn_np.experiments.recall.gates import SHIPPED, Learned, load_gate_sets, save_gate_set
from linattn_np.experiments.recall.memories import LEARNED


def test_a_gate_file_returns_saved_sets_and_preserves_others(tmp_path):
    path = tmp_path / "gates.json"
    learned = Learned({"write": np.array([0.12345, -1.0])}, 6.54321)
    save_gate_set(path, "mine", {0: {"delta": learned}})
    save_gate_set(path, "other", {1: {"delta": learned}})
    save_gate_set(path, "other", {1: {"kda": learned}})
    sets = load_gate_sets([str(path)])
    assert sorted(sets) == ["mine", "other"]
    assert sorted(sets["other"][1]) == ["delta", "kda"]
    assert sets["mine"][0]["delta"].logits["write"].tolist() == [0.123, -1.0]
    assert sets["mine"][0]["delta"].loss == 6.5432
    with pytest.raises(ValueError, match="no gate set 'nowhere'"):
        load_gate_sets(["nowhere"])


def test_the_shipped_sets_hold_five_seeds_of_every_learned_memory():
    for gate_set in load_gate_sets(SHIPPED).values():
        assert sorted(gate_set) == [0, 1, 2, 3, 4]
        assert all(sorted(memories) == sorted(LEARNED) for memories in gate_set.values())
