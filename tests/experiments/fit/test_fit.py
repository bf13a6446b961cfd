"""`linattn fit`: its gradients, and that a memory helps where the series needs one."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

import linattn_np as la
from linattn_np.experiments.fit.command import Fit, _digits, _sentences, add_arguments, run
from linattn_np.experiments.fit.model import Model, bounded, gates_of, ridge_regression, train, windows


def is_trainable(fn):
    try:
        return gates_of(fn) is not None
    except ValueError:
        return False


TRAINABLE = [fn for fn in la.VARIANTS if is_trainable(fn)]


def switching(T):
    """A chaotic map whose parameter changes every 64 samples."""
    rng, x, r, out = np.random.default_rng(0), 0.5, 4.0, np.empty(T)
    for t in range(T):
        r = rng.uniform(3.5, 4) if t % 64 == 0 else r
        out[t] = x = r * x * (1 - x)
    return ((out - out.mean()) / out.std())[:, None]


def test_windows():
    z = windows(np.arange(1.0, 11)[:, None])
    assert z.shape == (10, 9)
    assert np.array_equal(z[9], [*range(3, 11), 1])
    assert np.array_equal(z[0], [*[0] * 7, 1, 1])


@pytest.mark.parametrize("limits", [(-np.inf, 0.0), (0.0, np.inf), (0.0, 2.0)])
def test_gates_keep_their_limits(limits):
    y = np.linspace(-30, 30, 61)
    value, slope = bounded(y, limits)
    assert (value >= limits[0]).all()
    assert (value <= limits[1]).all()
    step = 1e-6
    assert np.allclose(slope, (bounded(y + step, limits)[0] - bounded(y - step, limits)[0]) / (2 * step), atol=1e-8)


@pytest.mark.parametrize("fn", TRAINABLE, ids=lambda fn: fn.__name__)
def test_gradients(fn):
    x = switching(60)
    model, rng = Model(fn, ridge_regression(x)), np.random.default_rng(1)
    P = {n: p + 0.3 * rng.standard_normal(p.shape) for n, p in model.start(0).items()}
    direction = {n: rng.standard_normal(p.shape) for n, p in P.items()}
    _, G = model.loss(P, x, 45)

    def mean(step):
        return model.loss({n: p + step * direction[n] for n, p in P.items()}, x)[0][: 45 - 2].mean()

    expected = (mean(1e-5) - mean(-1e-5)) / 2e-5
    assert sum(np.sum(G[n] * d) for n, d in direction.items()) == pytest.approx(expected, rel=1e-6)


def test_a_memory_helps_where_the_rule_changes():
    x = switching(900)
    R = ridge_regression(x[:600])
    linear = np.mean((windows(x)[599:-1] @ R - x[600:]) ** 2)
    model = Model(la.delta_rule, R)
    P, errors = train(model, x[:600], 0, 60)
    assert min(errors) < 0.2 * errors[0]
    assert model.loss(P, x)[0][598:].mean() < 0.5 * linear


def test_variants_that_cannot_be_trained_say_why():
    for fn, text in ((la.rwkv7, "a, which is no gate with limits"), (la.hgrn2, "no queries and keys of its own")):
        with pytest.raises(ValueError, match=text):
            gates_of(fn)


def test_words():
    best, other = Fit("a", [0.10, 0.12], {}, [1.0]), Fit("b", [0.45, 0.49], {}, [1.0])
    _, least, against = _sentences([best, other], 2.0, "x", 100)
    assert least == "a has the least error, 0.1100 (± 0.1271); b lie within the spread."
    assert "Smaller error with: a (less by 1.8900, ± 0.1271), b (less by 1.5300, ± 0.2541)." in against


@pytest.mark.parametrize(
    ("errors", "linear", "word"),
    [
        ([0.3, 0.3001], 0.15, "Larger error with: a (more by 0.1500, ± 6.35e-04)"),
        ([0.1, 0.12], 0.15, "No conclusion within the spread: a (less by 0.0400, ± 0.1271)"),
        ([0.15, 0.15], 0.15, "No conclusion within the spread: a (less by 0.00e+00, ± 0.00e+00)"),
        ([0.1], 0.15, "No conclusion with one seed: a (less by 0.0500, spread unknown with one seed)"),
    ],
)
def test_a_difference_within_its_spread_has_no_conclusion(errors, linear, word):
    _, least, against = _sentences([Fit("a", errors, {}, [1.0])], linear, "x", 100)
    assert word in against
    assert "conclusion" in word or "No conclusion" not in against
    assert "nan" not in least + against
    two = [Fit("a", errors, {}, [1.0]), Fit("b", errors, {}, [1.0])]
    assert ("b lie within" in _sentences(two, linear, "x", 100)[1]) == (len(errors) > 1)


def test_the_command(tmp_path, capsys):
    np.save(tmp_path / "x.npy", switching(150))
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def command(*words):
        return run(parser.parse_args([str(tmp_path / "x.npy"), "--out", str(tmp_path / "out"), *words]))

    assert command("--steps", "5", "--seeds", "2", "--variant", "delta_rule") == 0
    assert "linear prediction" in capsys.readouterr().out
    assert command("--steps", "2", "--seeds", "1", "--variant", "delta_rule") == 0
    printed = capsys.readouterr().out
    assert printed.count("spread unknown with one seed") == 3  # two sentences, one row
    assert "nan" not in printed
    assert "inf" not in printed
    with np.load(tmp_path / "out" / "delta_rule.npz") as saved:
        assert {"features", "read", "beta.bias", "beta.weights"} == set(saved.files)
    assert (tmp_path / "out" / "fit.png").read_bytes()[:4] == b"\x89PNG"
    np.save(tmp_path / "x.npy", switching(20))
    assert command() == 2
    assert "has 20 samples, expected 64 or more" in capsys.readouterr().err
    np.save(tmp_path / "x.npy", switching(150))
    assert command("--variant", "rwkv7") == 2
    assert "rwkv7 has a, which is no gate with limits" in capsys.readouterr().err


def test_small_errors_keep_their_digits():
    assert _digits(0.04171) == "0.0417"
    assert _digits(3.14159e-6) == "3.14e-06"
    assert _digits(0.0) == "0.00e+00"
