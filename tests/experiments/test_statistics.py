"""Confidence intervals and conclusions against known values."""

import numpy as np
import pytest

from linattn_np.experiments.statistics import (
    CONTRADICTED,
    INCONCLUSIVE,
    SAME,
    SUPPORTED,
    paired_difference,
    student_t,
    word_for,
)


def test_student_t_against_known_values():
    assert student_t(4) == 2.776
    assert student_t(20) == pytest.approx(2.086, abs=0.02)
    assert student_t(1000) == pytest.approx(1.96, abs=0.01)


def test_agreeing_seeds_do_not_make_a_sure_thing():
    x = np.zeros((5, 11))
    x[:, :10] = 1
    found = paired_difference(x, 0.05, 0.1)
    assert found.mean == pytest.approx(10 / 11)
    assert found.half_width == pytest.approx(1.96 * np.sqrt(10) / 11 / np.sqrt(55))
    assert paired_difference(np.ones((5, 11)), 0.05, 0.1).half_width == pytest.approx(3 / 55)


def test_seeds_alone_use_student_t():
    found = paired_difference(np.array([0.1, 0.2, 0.3, 0.4, 0.5]), 0.05, 0.1)
    assert found.mean == pytest.approx(0.3)
    assert found.half_width == pytest.approx(2.776 * np.sqrt(0.025 / 5))


@pytest.mark.parametrize(
    ("mean", "half", "word"),
    [(0.3, 0.1, SUPPORTED), (0.3, 0.4, INCONCLUSIVE), (-0.3, 0.1, CONTRADICTED), (0.01, 0.06, SAME),
     (0.01, 0.2, INCONCLUSIVE), (0.02, 0.01, SAME)],
)  # fmt: skip
def test_words(mean, half, word):
    assert word_for(mean, half, 0.05, 0.1) == word


def test_one_number_has_no_interval():
    found = paired_difference(np.array([0.3]), 0.05, 0.1)
    assert found.half_width == np.inf
    assert found.word == INCONCLUSIVE
    assert np.isfinite(paired_difference(np.ones((1, 11)), 0.05, 0.1).half_width)  # one seed of many streams
