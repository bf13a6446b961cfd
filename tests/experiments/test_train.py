"""The commands train and generate."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import linattn_np as la
from linattn_np.__main__ import main
from linattn_np.runtime.cuda import launch

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--batch", "2", "--length", "16"]


def train(tmp_path, *options):
    return main(["train", *map(str, options), *SMALL, "--out", str(tmp_path / "out")])


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("the delta rule erases what a key held. " * 30)
    return path


def test_a_text_is_trained_and_continued(book, tmp_path, capsys):
    assert train(tmp_path, book, "--steps", 6, "--mixer", "gla,softmax_attention") == 0
    printed = capsys.readouterr()
    curve, last = printed.out.splitlines()[:2]
    assert len(curve.split()[1]) == 6
    assert last.startswith("validation loss ")
    assert "step 6 of 6: loss" in printed.err
    assert (tmp_path / "out" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    run = str(tmp_path / "out" / "run.safetensors")
    assert main(["generate", run, "--prompt", "the é", "--count", "5"]) == 0
    assert capsys.readouterr().out.startswith("the é")


def test_a_run_goes_on_as_if_it_had_not_stopped(book, tmp_path, monkeypatch, capsys):
    assert train(tmp_path / "whole", book, "--steps", 5, "--optimiser", "muon") == 0
    own, calls = la.train.Tokens.batches, []

    def stopped(self, *given):
        batch = own(self, *given)

        def until(n):
            calls.append(n)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return batch(n)

        return until

    monkeypatch.setattr(la.train.Tokens, "batches", stopped)
    assert train(tmp_path, book, "--steps", 5, "--optimiser", "muon") == 130
    monkeypatch.undo()
    path = tmp_path / "out" / "run.safetensors"
    assert f"stopped at step 2; linattn train --resume {path} goes on" in capsys.readouterr().err
    assert train(tmp_path, "--resume", path, "--steps", 1) == 0
    both = [la.train.load(p / "out" / "run.safetensors")[0] for p in (tmp_path, tmp_path / "whole")]
    assert all(np.array_equal(x, both[1][n]) for n, x in both[0].items())


def test_recomputation_changes_no_bit(book, tmp_path):
    for name, more in (("kept", []), ("again", ["--recompute"])):
        assert train(tmp_path / name, book, "--steps", 3, *more) == 0
    kept, again = (la.train.load(tmp_path / n / "out" / "run.safetensors")[0] for n in ("kept", "again"))
    assert all(np.array_equal(x, again[n]) for n, x in kept.items())
    run = str(tmp_path / "again" / "out" / "run.safetensors")
    assert train(tmp_path / "again", "--resume", run, "--steps", 4) == 0
    assert main(["generate", run, "--count", "2"]) == 0


def test_parameters_in_bfloat16_are_trained_continued_and_resumed(book, tmp_path, capsys):
    assert train(tmp_path, book, "--steps", 3, "--dtype", "bfloat16") == 0
    path = tmp_path / "out" / "run.safetensors"
    arrays, _ = la.train.load(path)
    kinds = {n.split("/")[0]: str(x.dtype) for n, x in arrays.items()}
    assert kinds == {"params": "bfloat16", "m": "float32", "v": "float32", "master": "float32", "losses": "float64"}
    assert main(["generate", str(path), "--prompt", "the ", "--count", "5"]) == 0
    assert train(tmp_path, "--resume", path, "--steps", 5) == 0
    assert len(la.train.load(path)[0]["losses"]) == 5
    capsys.readouterr()


@pytest.mark.parametrize("command", ["train", "generate"])
def test_without_a_gpu_the_error_is_one_line(book, tmp_path, capsys, monkeypatch, command):
    assert train(tmp_path, book, "--steps", 1) == 0
    capsys.readouterr()
    path = str(tmp_path / "out" / "run.safetensors")
    given = ["--resume", path, *SMALL, "--out", str(tmp_path)] if command == "train" else [path]

    def fails():
        raise RuntimeError("no driver")

    cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=fails))

    def missing():
        raise ImportError

    cases = [(missing, "CuPy, whose arrays lie on a GPU, is not installed"),
             (lambda: SimpleNamespace(cuda=cuda), "CuPy finds no CUDA device: no driver")]  # fmt: skip
    for cupy, words in cases:
        monkeypatch.setattr(launch, "cupy", cupy)
        assert main([command, *given, "--device", "cuda"]) == 2
        assert capsys.readouterr().err == f"linattn {command}: {words}\n"


def test_token_ids_are_trained(tmp_path, capsys):
    np.save(tmp_path / "ids.npy", np.arange(500) % 7)
    assert train(tmp_path, tmp_path / "ids.npy", "--steps", 2, "--vocabulary", 7) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["generate", str(tmp_path / "out" / "run.safetensors")]) == 2
    assert "has 7 tokens, expected bytes: 256" in capsys.readouterr().err


def test_what_cannot_be_trained_is_one_line(tmp_path, book, capsys):
    (tmp_path / "x.safetensors").write_bytes(b"none")
    cases = [
        ([tmp_path / "none.txt"], "none.txt"),
        ([book, "--mixer", "attention"], "mixer: name is 'attention'"),
        ([book, "--heads", "3"], "--width is 16, expected a multiple of --heads 3"),
        (["--resume", tmp_path / "x.safetensors"], "x.safetensors is no safetensors file"),
    ]
    for given, words in cases:
        assert main(["train", *SMALL, "--out", str(tmp_path), *map(str, given)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert words in printed.err
        assert printed.err.count("\n") == 1
    assert main(["generate", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("linattn generate: ")
