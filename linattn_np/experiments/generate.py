"""The command `linattn generate [FILE]`: continues a prompt, a token at a time."""

from __future__ import annotations

import argparse
import codecs
import sys
from pathlib import Path
from typing import Any

import linattn_np as la

from ..arguments import number, real
from .train import BYTES, add_device, model_of, optimiser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_file(parser)
    parser.add_argument("--prompt", default="\n", help="the text that is continued")
    number(parser, "--count", default=400, help="bytes (400)")
    add_device(parser)
    real(parser, "--temperature", default=0.7, help="0 takes the likeliest byte (0.7)")
    number(parser, "--seed", default=1, help="of the draws (1)")


def run(args: argparse.Namespace) -> int:
    """Write the continuation; the exit status."""
    try:
        about, model, params = loaded(args.file, args.device)
        if about["model"]["vocabulary"] != BYTES:
            raise ValueError(f"{args.file} has {about['model']['vocabulary']} tokens, expected bytes: {BYTES}")
        if not args.prompt:
            raise ValueError("--prompt is empty, expected a text")
    except (OSError, ValueError, ModuleNotFoundError, RuntimeError) as problem:
        sys.stderr.write(f"linattn generate: {problem}\n")
        return 2
    sys.stdout.write(args.prompt)
    text, prompt = codecs.getincrementaldecoder("utf-8")("replace"), args.prompt.encode()
    for token in la.train.generate(model.logits, params, prompt, args.count, args.temperature, args.seed):
        sys.stdout.write(text.decode(bytes([token])))
        sys.stdout.flush()
    sys.stdout.write(text.decode(b"", final=True) + "\n")
    return 0


def add_file(parser: argparse.ArgumentParser) -> None:
    """The trained model of a command."""
    parser.add_argument("file", type=Path, nargs="?", default=Path("train-output/run.safetensors"),
                        help="a file that `linattn train` wrote (train-output/run.safetensors)")  # fmt: skip


def loaded(file: Path, device: str = "cpu") -> tuple[dict[str, Any], la.layers.Model, dict[str, Any]]:
    """(what a run tells about itself, its model, the parameters on a device).

    Raises OSError or ValueError for another file, ModuleNotFoundError or RuntimeError without the device.
    """
    about = la.train.Run.about_of(la.train.load(file)[1], file)
    return about, model_of(about), la.train.Run.load(file, optimiser(about["settings"])).to(device).params.arrays
