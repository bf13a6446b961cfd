"""The command `linattn train [FILE ...]`: a language model, its loss curve, a sample."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import linattn_np as la

from ..arguments import number, real, words
from ..distributed import nccl
from ..runtime.arrays import compat
from ..train.flat import on_device
from .extras import require
from .series import help_text

BYTES, VALIDATED = 256, 16  # tokens of a text; batches of the validation loss
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
KINDS = ("uint8", "uint16", "uint32", "int32", "int64")
SETTINGS = ("files", "tokens", "batch", "length", "steps", "rate", "optimiser", "decay", "accumulate", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("files", nargs="*", help="texts, .npy of token ids; without them, the text of Python's help")
    words(
        parser, "--mixer", default=("gated_delta_rule",), metavar="NAME", help="token mixers, again and again by layer"
    )
    number(parser, "--layers", default=4, help="layers (4)")
    number(parser, "--width", default=96, help="channels of the model (96)")
    number(parser, "--heads", default=3, help="heads (3)")
    parser.add_argument("--mlp", choices=["swiglu", "squared_relu", "rwkv6", "rwkv7", "none"], help="of each layer")
    number(parser, "--batch", default=8, help="sequences of a step (8)")
    number(parser, "--length", 2, default=256, help="tokens of a sequence (256)")
    number(parser, "--steps", default=600, help="steps (600)")
    parser.add_argument("--recompute", action="store_true", help="less memory, more time: layers are computed twice")
    number(parser, "--accumulate", default=1, help="batches of a step (1)")
    real(parser, "--rate", default=4e-3, help="greatest learning rate (0.004); 10 %% warm-up, then a cosine")
    real(parser, "--decay", default=0.1, help="weight decay of matrices (0.1)")
    parser.add_argument("--optimiser", choices=["adamw", "muon"], default="adamw", help="adamw")
    number(parser, "--seed", default=1, help="of initial values and of the order of the data (1)")
    parser.add_argument(
        "--tokens", choices=KINDS, default="uint8", help="what files other than .npy hold (uint8: text)"
    )
    number(parser, "--vocabulary", default=BYTES, help="number of different tokens (256)")
    add_device(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="float32",
                        help="of parameters (float32); with bfloat16 the optimiser has float32 masters")  # fmt: skip
    parser.add_argument("--mpi", action="store_true", help="ranks of mpiexec share the batches of a step: --accumulate")
    number(parser, "--gpus", default=1, help="GPUs of this machine that share the batches of a step: --accumulate (1)")
    parser.add_argument("--out", type=Path, default=Path("train-output"), help="folder of run.safetensors and loss.png")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with a run, with its settings but --steps")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Where a command computes."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the GPU that CuPy uses (cpu)")


def run(args: argparse.Namespace) -> int:
    """Train, save, draw, sample; the exit status."""
    try:
        require("tqdm", "matplotlib")
        if args.gpus > 1:
            return on_gpus(args)
        comm = ranks(args.mpi, args.device)
    except (ImportError, RuntimeError, ValueError) as problem:
        sys.stderr.write(f"linattn train: {problem}\n")
        return 2
    return on_rank(args, comm)


def on_rank(args: argparse.Namespace, comm: la.distributed.Comm) -> int:
    """The same of one rank."""
    try:
        trained, settings = resumed(args) if args.resume else begun(args)
        trained.to(args.device)
        model = model_of(trained.about)
        data, held_out = tokens(settings).split(0.9)
        batches = data.batches(settings["batch"], settings["length"], trained.seed)
        check = held_out.batches(settings["batch"], min(settings["length"], len(held_out) - 1))
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, ModuleNotFoundError, RuntimeError) as problem:
        sys.stderr.write(f"linattn train: {problem}\n")
        return 2
    path, steps = args.out / "run.safetensors", settings["steps"]
    mixers = trained.about["model"]["mixers"]
    if comm.rank == 0:
        sys.stderr.write(f"{', '.join(mixers)}: {model.loss.count:,} parameters, {len(data):,} tokens; {path}\n")
    try:
        la.train.fit(model.loss, trained, batches, steps, la.train.cosine(settings["rate"], steps), save=path,
                     every=max(1, steps // 10), accumulate=settings["accumulate"], comm=comm)  # fmt: skip
    except KeyboardInterrupt:
        sys.stderr.write(f"\nstopped at step {trained.step}; linattn train --resume {path} goes on\n")
        return 130
    except FloatingPointError as problem:
        sys.stderr.write(f"linattn train: {problem}; a smaller --rate may help\n")
        return 1
    except la.distributed.RankError as problem:
        sys.stderr.write(f"linattn train: {problem}; linattn train --resume {path} goes on\n")
        return 1
    except ValueError as problem:
        sys.stderr.write(f"linattn train: {problem}\n")
        return 2
    return shown(trained, model, held_out, check, path) if comm.rank == 0 else 0


def ranks(mpi: bool, device: str) -> la.distributed.Comm:
    """The ranks of mpiexec, or this process alone; on GPUs rank r of a machine has GPU r % count.

    Ranks with a GPU each exchange by NCCL, others through the host.   Raises ImportError without mpi4py or NCCL.
    """
    if not mpi:
        return la.distributed.Threads.of(1)[0]
    from mpi4py import MPI

    from ..runtime.cuda import launch

    world = MPI.COMM_WORLD
    if device == "cuda":
        on_device()  # raises
        cuda, local = launch.cupy().cuda, world.Split_type(MPI.COMM_TYPE_SHARED)
        rank, size, count = local.Get_rank(), local.Get_size(), cuda.runtime.getDeviceCount()
        cuda.Device(rank % count).use()
        if world.Get_size() > 1 and world.allreduce(size <= count, MPI.LAND):
            rank = world.Get_rank()
            return la.distributed.NCCL(rank, world.Get_size(), world.bcast(None if rank else nccl.unique_id()))
    return la.distributed.MPI(world)


def on_gpus(args: argparse.Namespace) -> int:
    """The command as a process a GPU; the exit status.   Raises ValueError for more GPUs than there are, and --mpi."""
    from ..runtime.cuda import launch

    on_device()  # raises
    count = launch.cupy().cuda.runtime.getDeviceCount()
    if args.gpus > count or args.mpi:
        raise ValueError(f"--gpus is {args.gpus}, expected at most {count}, the GPUs of this machine, and no --mpi")
    given = args, nccl.unique_id()  # this process lives while ranks join
    spawn = multiprocessing.get_context("spawn")
    each = [spawn.Process(target=on_gpu, args=(rank, *given)) for rank in range(args.gpus)]
    for one in each:
        one.start()
    for one in each:
        while one.is_alive():
            with contextlib.suppress(KeyboardInterrupt):  # ctrl-C reaches all
                one.join()
    return next((1 if one.exitcode < 0 else one.exitcode for one in each if one.exitcode), 0)


def on_gpu(rank: int, args: argparse.Namespace, unique_id: Any) -> None:
    """One of these processes."""
    from ..runtime.cuda import launch

    launch.cupy().cuda.Device(rank).use()
    args.device = "cuda"
    sys.exit(on_rank(args, la.distributed.NCCL(rank, args.gpus, unique_id)))


def shown(trained: la.train.Run, model: la.layers.Model, held_out: la.train.Tokens, check: Any, path: Path) -> int:
    """The validation loss, the picture, a sample."""
    P, xp = trained.params.arrays, compat.array_namespace(trained.params.vector)
    loss = np.mean([float(model.loss(P, *map(xp.asarray, check(n)))) for n in range(VALIDATED)])
    picture, is_text = path.with_name("loss.png"), trained.about["settings"]["tokens"] == "uint8"
    la.train.picture(picture, trained.losses, "nats a byte" if is_text else "nats a token")
    first, last = np.mean(trained.losses[:1]), np.mean(trained.losses[-20:])
    sys.stdout.write(f"{first:.2f} {la.train.in_a_line(trained.losses)} {last:.2f}\n")
    sys.stdout.write(f"validation loss {loss:.3f}; run: {path}; picture: {picture}\n")
    if trained.about["model"]["vocabulary"] == BYTES:
        prompt = held_out[:64].tolist()
        found = la.train.generate(model.logits, P, prompt, 300, temperature=0.7)
        sys.stdout.write(f"\n{text_of(prompt)}|{text_of(list(found))}\n")
    return 0


def begun(args: argparse.Namespace) -> tuple[la.train.Run, dict[str, Any]]:
    """A new run, and its settings."""
    if args.width % args.heads:
        raise ValueError(f"--width is {args.width}, expected a multiple of --heads {args.heads}")
    settings = {n: getattr(args, n) for n in SETTINGS} | {"files": [str(Path(x).resolve()) for x in args.files]}
    sizes: dict[str, Any] = {"vocabulary": args.vocabulary, "D": args.width, "layers": args.layers, "heads": args.heads}
    sizes |= {"mixers": list(args.mixer), "mlp": args.mlp, "recompute": args.recompute}
    about = {"model": sizes, "settings": settings}
    loss, dtype = model_of(about).loss, DTYPES[args.dtype]
    return la.train.Run.start(loss, optimiser(settings), args.seed, about, dtype), settings


def resumed(args: argparse.Namespace) -> tuple[la.train.Run, dict[str, Any]]:
    """A run from its file, and its settings."""
    _, texts = la.train.load(args.resume)
    about = la.train.Run.about_of(texts, args.resume)
    settings = about["settings"] | ({"steps": args.steps} if args.steps > about["settings"]["steps"] else {})
    return la.train.Run.load(args.resume, optimiser(settings)), settings


def model_of(about: Mapping[str, Any]) -> la.layers.Model:
    """The model that a run tells about."""
    return la.layers.language_model(**about["model"])


def optimiser(settings: Mapping[str, Any]) -> la.train.AdamW | la.train.Muon:
    adamw = la.train.AdamW(decay=settings["decay"])
    return adamw if settings["optimiser"] == "adamw" else la.train.Muon(decay=settings["decay"], others=adamw)


def tokens(settings: Mapping[str, Any]) -> la.train.Tokens:
    """The tokens of the files, or of Python's help."""
    if settings["files"]:
        return la.train.Tokens.open(settings["files"], settings["tokens"])
    return la.train.Tokens([np.frombuffer(help_text().encode(), np.uint8)])


def text_of(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")
