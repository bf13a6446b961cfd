"""The verdict on constructed scores."""

import pytest

from linattn_np.experiments.recall.evaluation import Score
from linattn_np.experiments.recall.gates import Learned
from linattn_np.experiments.recall.scores import Scores
from linattn_np.experiments.recall.summary import overview, sentences, verdict_lines
from linattn_np.experiments.recall.verdict import PAIRS, verdict
from linattn_np.experiments.statistics import CONTRADICTED, SAME, SUPPORTED

NOTHING_LEARNED = ("linear", "softmax")


def constructed(right: dict[str, float]) -> Scores:
    """Scores in which each memory has a fixed fraction of exact answers in every cell."""
    depths = tuple(i / 10 for i in range(11))
    scores = [
        Score(
            None if memory in NOTHING_LEARNED else "some",
            memory,
            seed,
            level,
            T,
            [i < share * 11 for i in range(11)],
            [share] * 11,
        )
        for memory, share in right.items()
        for seed in range(5)
        for level in (1, 2, 3)
        for T in (512, 1024)
    ]
    learned = {memory: Learned({}, 6 + right[memory]) for memory in right if memory not in NOTHING_LEARNED}
    return Scores(scores, depths, {"some": dict.fromkeys(range(5), learned)})


@pytest.mark.parametrize(
    ("delta", "gated", "holds", "best"),
    [(1.0, 0.0, SUPPORTED, CONTRADICTED), (0.0, 1.0, CONTRADICTED, SUPPORTED), (1.0, 1.0, SAME, SAME)],
)
def test_the_verdict_follows_the_figures(delta, gated, holds, best):
    claims = verdict(constructed({"delta": delta, "gated_delta": gated, "mamba2": 0.5}))
    words = {(claim.prediction, claim.where): claim.found.word for claim in claims}
    assert words["Delta rule recalls more than Gated delta rule", "level 1, 1024 tokens"] == holds
    assert words["Gated delta rule recalls more than Delta rule", "level 3, 512 tokens"] == best
    assert words["Gated delta rule predicts prose better than Delta rule", "held-out loss"] == holds  # loss 6 + share


def test_only_pairs_that_differ_in_one_thing_decide():
    for pair in PAIRS:
        assert pair.decides == (len(pair.differ_in) == 1)
    by_pair = {(pair.more, pair.less): pair.decides for pair in PAIRS}
    assert by_pair["delta", "gated_delta"]
    assert not by_pair["delta", "mamba2"]
    assert not by_pair["mesa_net", "delta"]  # which has no decay
    assert by_pair["mesa_net", "gated_delta"]  # the same gates, learned in both


def test_the_least_squares_fit_is_compared_where_both_exist():
    claims = verdict(constructed({"mesa_net": 1.0, "delta": 0.0}))
    fits = [claim for claim in claims if claim.hypothesis.startswith("H5")]
    losses = ["MesaNet predicts prose better than Delta rule"]
    assert [claim.prediction for claim in fits] == ["MesaNet recalls more than Delta rule"] * 3 + losses
    assert {claim.found.word for claim in fits[:3]} == {SUPPORTED}
    assert fits[3].found.word == CONTRADICTED  # here the loss is 6 + share
    both = verdict(constructed({"mesa_net": 1.0, "delta": 0.0, "gated_delta": 1.0}))
    words = {claim.prediction: claim.found.word for claim in both if claim.hypothesis.startswith("H5")}
    assert words == {
        "MesaNet recalls more than Delta rule": SUPPORTED,
        "MesaNet recalls more than Gated delta rule": SAME,
        "MesaNet predicts prose better than Delta rule": CONTRADICTED,
        "MesaNet predicts prose better than Gated delta rule": SAME,
    }


def test_words_of_the_summary():
    scores = constructed({"linear": 0.6, "softmax": 1.0, "delta": 1.0, "gated_delta": 0.0, "mesa_net": 0.3})
    asked, known, means = sentences(scores)
    assert "texts of up to 1,024 tokens" in asked
    assert "a uuid in prose by Softmax attention (100 %), Delta rule (100 %), Linear attention (64 %)." in known
    assert "Gated delta" not in known
    assert "softmax attention recalls all of them" in means
    assert "it does not mean that trained models rank like this" in means
    assert (
        "gates learned: Delta rule, Gated delta rule, MesaNet; nothing learned: Linear attention, Softmax attention"
    ) in means
    rows = {row[0]: list(row[1:]) for row in overview(scores).rows}
    assert rows["Linear attention"] == ["nothing learned", "64", "64", "64"]
    assert rows["MesaNet"] == ["gates learned", "36", "36", "36"]
    assert rows["Gated delta rule"] == ["gates learned", "0", "0", "0"]
    lines = [text for _, text in verdict_lines(verdict(scores))]
    assert lines[0] == "H1: a decay makes a memory lose facts"
    assert lines[1] == (
        "Delta rule recalls more than Gated delta rule (level 1, 1024 tokens; they differ in decay "
        "alone): SUPPORTED with gates from some (+1.00 ± 0.05)"
    )
    fits = [line for line in lines if line.startswith("MesaNet recalls")]
    assert len(fits) == 3
    assert all("Gated delta rule (level" in line and "they differ in least-squares fit alone" in line for line in fits)
