"""Intervals and words against known values; the verdict on figures made up for it."""

import numpy as np
import pytest

from linattn_np.lab.gates import Learned
from linattn_np.lab.recall import Score
from linattn_np.lab.scores import Scores
from linattn_np.lab.statistics import NOT_SHOWN, OPPOSITE, SAME, SHOWS, paired_difference, student_t, wilson, word_for
from linattn_np.lab.verdict import PAIRS, verdict


def test_wilson_against_known_values():
    assert wilson(0, 55) == pytest.approx((0.0, 0.0653), abs=1e-3)
    assert wilson(55, 55) == pytest.approx((0.9347, 1.0), abs=1e-3)
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-3)


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
    [(0.3, 0.1, SHOWS), (0.3, 0.4, NOT_SHOWN), (-0.3, 0.1, OPPOSITE), (0.01, 0.06, SAME), (0.01, 0.2, NOT_SHOWN),
     (0.02, 0.01, SAME)],
)  # fmt: skip
def test_words(mean, half, word):
    assert word_for(mean, half, 0.05, 0.1) == word


def made_up(right: dict[str, float]) -> Scores:
    """Scores in which each memory has a share of its answers right, everywhere."""
    depths = tuple(i / 10 for i in range(11))
    scores = [
        Score("some", memory, seed, level, T, [i < share * 11 for i in range(11)], [share] * 11)
        for memory, share in right.items()
        for seed in range(5)
        for level in (1, 2, 3)
        for T in (512, 1024)
    ]
    learned = {memory: Learned({}, 6 + share) for memory, share in right.items()}
    return Scores(scores, depths, {"some": dict.fromkeys(range(5), learned)})


@pytest.mark.parametrize(
    ("delta", "gated", "kept", "best"),
    [(1.0, 0.0, SHOWS, OPPOSITE), (0.0, 1.0, OPPOSITE, SHOWS), (1.0, 1.0, SAME, SAME)],
)
def test_the_verdict_follows_the_figures(delta, gated, kept, best):
    claims = verdict(made_up({"delta": delta, "gated_delta": gated, "mamba2": 0.5}))
    words = {claim.asked_of: claim.found.word for claim in claims}
    assert words["delta - gated_delta, level 1, 1024"] == kept
    assert words["gated_delta - delta, level 3, 512"] == best
    assert words["held-out loss, delta - gated_delta"] == kept  # the loss made up here is 6 + share


def test_pairs_that_were_not_run_are_not_judged():
    assert verdict(made_up({"kda": 1.0, "mamba2": 0.0})) == []


def test_only_pairs_that_differ_in_one_thing_decide():
    for pair in PAIRS:
        assert pair.decides == (len(pair.differ_in) == 1)
    by_pair = {(pair.more, pair.less): pair.decides for pair in PAIRS}
    assert by_pair["delta", "gated_delta"]
    assert not by_pair["delta", "mamba2"]
