"""The verdict on constructed scores."""

import pytest

from linattn_np.experiments.recall.evaluation import Score
from linattn_np.experiments.recall.gates import Learned
from linattn_np.experiments.recall.scores import Scores
from linattn_np.experiments.recall.verdict import PAIRS, verdict
from linattn_np.experiments.statistics import OPPOSITE, SAME, SHOWS


def constructed(right: dict[str, float]) -> Scores:
    """Scores in which each memory has a fixed fraction of exact answers in every cell."""
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
    ("delta", "gated", "holds", "best"),
    [(1.0, 0.0, SHOWS, OPPOSITE), (0.0, 1.0, OPPOSITE, SHOWS), (1.0, 1.0, SAME, SAME)],
)
def test_the_verdict_follows_the_figures(delta, gated, holds, best):
    claims = verdict(constructed({"delta": delta, "gated_delta": gated, "mamba2": 0.5}))
    words = {claim.comparison: claim.found.word for claim in claims}
    assert words["delta - gated_delta, level 1, 1024"] == holds
    assert words["gated_delta - delta, level 3, 512"] == best
    assert words["held-out loss, delta - gated_delta"] == holds  # the loss constructed here is 6 + share


def test_pairs_that_were_not_run_are_not_judged():
    assert verdict(constructed({"kda": 1.0, "mamba2": 0.0})) == []


def test_only_pairs_that_differ_in_one_thing_decide():
    for pair in PAIRS:
        assert pair.decides == (len(pair.differ_in) == 1)
    by_pair = {(pair.more, pair.less): pair.decides for pair in PAIRS}
    assert by_pair["delta", "gated_delta"]
    assert not by_pair["delta", "mamba2"]
