"""The loss of a long text: in pieces that of the whole, and after an interruption the same bits."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from tests.cases import peak_memory

MIXERS = ("gated_delta_rule", "mlstm", "softmax_attention", "rwkv7")


class Stops(la.train.Tokens):
    """A text that cannot be read beyond a token."""

    last_start = 0

    def __getitem__(self, at):
        if at.start >= self.last_start:
            raise OSError("cut off")
        return super().__getitem__(at)


def model(mixer):
    found = la.layers.language_model(17, D=8, layers=2, heads=2, mixers=mixer)
    return found.loss, found.loss.init(np.random.default_rng(0))


def text(folder, n=151):
    path = folder / "text.npy"
    np.save(path, np.random.default_rng(1).integers(0, 17, n).astype(np.uint16))
    return la.train.Tokens.open([path])


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_score_of_pieces_is_the_loss_of_the_whole(mixer, tmp_path):
    loss, params = model(mixer)
    tokens = text(tmp_path)
    whole = float(loss(params, tokens[:150][None], tokens[1:151][None]))
    for T in (1, 32, 150, 4096):
        assert abs(la.train.score(loss, params, tokens, T) - whole) < 1e-5 * whole


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("every", [0, 1, 3])
def test_a_score_that_was_interrupted_has_the_same_bits(mixer, every, tmp_path):
    loss, params = model(mixer)
    tokens, file = text(tmp_path), tmp_path / "score.safetensors"
    wanted = la.train.score(loss, params, tokens, T=16)
    for start in (0, 48, 128):
        broken = Stops(tokens.parts)
        broken.last_start = start
        with pytest.raises(OSError, match="cut off"):
            la.train.score(loss, params, broken, T=16, save=file, every=every)
        assert int(la.train.load(file)[0]["position"]) == start
    assert la.train.score(loss, params, tokens, T=16, save=file, every=every) == wanted
    assert la.train.score(loss, params, Stops(tokens.parts), T=16, save=file) == wanted  # nothing is read again


def test_memory_does_not_grow_with_the_text(tmp_path):
    import gc

    loss, params = model("gated_delta_rule")

    def collected(*arguments, **options):
        gc.collect()  # which frees Python's lists of free objects
        return loss(*arguments, **options)

    def peak(n):
        tokens = text(tmp_path, n)
        la.train.score(loss, params, tokens, T=64)
        return peak_memory(lambda: la.train.score(collected, params, tokens, T=64))

    assert peak(2000) < 1.5 * peak(200)


def test_files_of_other_texts_are_refused(tmp_path):
    loss, params = model("gated_delta_rule")
    tokens, file = text(tmp_path), tmp_path / "score.safetensors"
    la.train.score(loss, params, tokens, T=16, save=file)
    with pytest.raises(ValueError, match=r"score: .* is of {'T': 16, 'tokens': 151}, expected {'T': 8"):
        la.train.score(loss, params, tokens, T=8, save=file)
    with pytest.raises(ValueError, match=r"expected {'T': 16, 'tokens': 150}"):
        la.train.score(loss, params, tokens[:150], T=16, save=file)
    other, arrays = model("mlstm")
    la.train.save(file, {n: x for n, x in la.train.load(file)[0].items() if n != "sum"} | {"sum": np.array(0.0),
                  "position": np.array(16)}, {"score": '{"T": 16, "tokens": 151}'})  # fmt: skip
    with pytest.raises(ValueError, match="score: the file has states"):
        la.train.score(other, arrays, tokens, T=16, save=file)
    la.train.save(file, {"x": np.zeros(3)})
    with pytest.raises(ValueError, match="holds no score"):
        la.train.score(loss, params, tokens, save=file)
    for n, T, match in ((1, 16, "there are 1 tokens"), (9, 0, "T is 0")):
        with pytest.raises(ValueError, match=f"score: {match}"):
            la.train.score(loss, params, tokens[:n], T)
