"""The command `linattn warmup`: compile CPU loops and CUDA kernels ahead of their first use. Needs no GPU."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from .arguments import numbers
from .elementwise.cuda import entries as of_channels
from .fast_weights.cuda import entries as of_learners
from .matrix_state.cuda import entries as of_matrix_states
from .matrix_state.types import Decay, Erase
from .ops.cuda import entries as around
from .runtime import code_cache
from .runtime.cuda import nvrtc
from .runtime.cuda.compile import compile_source
from .runtime.cuda.elements import BYTES, ELEMENTS
from .runtime.cuda.entries import SHARED, Entry
from .runtime.cuda.sources import installed
from .serving.small import BITS
from .softmax.cuda import entries as of_softmax


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--arch", nargs="+", metavar="SM", help="architectures, e.g. sm_80 sm_90a; default: device")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=list(BYTES))
    numbers(parser, "--key", default=[64, 128], metavar="K", help="key widths")
    numbers(parser, "--value", metavar="V", help="value widths; default: the key widths")
    parser.add_argument("--decay", nargs="+", default=["scalar"], choices=["none", "scalar", "vector"])
    parser.add_argument(
        "--erase",
        nargs="+",
        default=["none"],
        choices=["none", "delta", "free"],
        help="erase term; free erase: kernels of a few tokens only",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="also kernels of raw projections (qk_l2norm, A_log); without erase: Mamba-2's step size",
    )
    parser.add_argument("--softmax", action="store_true", help="also kernels of softmax attention")
    parser.add_argument("--scan", action="store_true", help="also kernels of scan, hgrn and the like")
    parser.add_argument("--learn", action="store_true", help="also kernels of learners")
    parser.add_argument("--train", action="store_true", help="also kernels of the optimiser")
    parser.add_argument("--log", action="store_true", help="also kernels of StateLog, for states of --state")
    parser.add_argument(
        "--state",
        nargs="+",
        default=["float32"],
        choices=[*ELEMENTS, *BITS],
        help="dtypes of stored states that are overwritten in place; int16, int12, int8: small states, of --log alone",
    )
    parser.add_argument("--forward-only", action="store_true", help="omit the kernels of gradients")
    parser.add_argument("--only", choices=["cpu", "cuda"], help="restrict to one; CUDA kernels need --arch or a device")


def run(args: argparse.Namespace) -> int:
    """Compile, print a line per kernel; 0 if all of them compiled."""
    write, failed = sys.stdout.write, 0
    if args.only != "cuda":
        failed += not _compile_loops()
        if args.only == "cpu" or not (args.arch or nvrtc.available()):
            return 1 if failed else 0
    if not nvrtc.available():
        write("NVRTC, the CUDA compiler library, is not installed: pip install 'linattn_np[cuda-compile]'\n")
        return 1
    try:
        chosen = args.arch or [_device_architecture()]
        capabilities = {arch: _capability(arch) for arch in chosen}
    except (ValueError, RuntimeError) as error:
        write(f"{error}\n")
        return int(failed or args.arch is not None or args.only == "cuda")
    wanted = [(arch, f"{dtype} {words} {K} x {V}: {entry.words}", entry)
              for arch, capability in capabilities.items() for dtype in args.dtype
              for words, K, V, entry in selected(args, dtype, capability)]  # fmt: skip
    wanted += [(arch, f"{dtype}: {entry.words}", entry) for arch in capabilities for dtype in args.dtype * args.scan
               for entry in of_channels.scan_entries(dtype, not args.forward_only)]  # fmt: skip
    wanted += [(arch, f"{dtype}, K = {K}: {entry.words}", entry) for arch, capability in capabilities.items()
               for dtype in args.dtype * args.learn for K in args.key
               for entry in of_learners.learner_entries(dtype, K, capability, not args.forward_only)]  # fmt: skip
    wanted += [(arch, entry.words, entry) for arch in [*capabilities] * args.learn
               for entry in of_learners.between_entries()]  # fmt: skip
    wanted += [(arch, f"{dtype}: {entry.words}", entry) for arch in capabilities for dtype in args.dtype * args.train
               for entry in around.optimiser_entries(dtype)]  # fmt: skip
    for arch, words, entry in _bar(wanted):
        failed += not _compile(arch, words, entry)
    write(f"stored in {code_cache.folder_in_words(nvrtc.KIND)}\n")
    return 1 if failed else 0


def selected(args: argparse.Namespace, dtype: str, capability: int) -> Iterator[tuple[str, int, int, Entry]]:
    """(decay and erase in words, K, V, entry) of everything selected by the options."""
    backward = not args.forward_only
    for decay, erase, K in itertools.product(args.decay, args.erase, args.key):
        words, cell = decay if erase == "none" else f"{decay}, {erase}", (Decay[decay.upper()], Erase[erase.upper()])
        for V in args.value or [K]:
            how = (dtype, K, V, capability)
            for entry in of_matrix_states.every_entry(*how, cell, backward, args.raw, args.state, args.log):
                yield words, K, V, entry
            softmax = args.softmax and words in ("none", "scalar")
            for entry in of_softmax.every_entry(*how, decay == "scalar", backward) if softmax else ():
                yield words, K, V, entry
            raw = args.raw and dtype != "tf32"  # around tf32 products everything is float32
            for entry in _around(words, dtype, K, V) if raw else ():
                yield words, K, V, entry


def _around(words: str, dtype: str, K: int, V: int) -> Iterator[Entry]:
    """Kernels of raw projections."""
    if words == "none":
        yield from around.feature_entries(dtype, K)
    if words == "vector":
        yield from around.key_entries(dtype)
    if words == "scalar":
        yield from around.step_size_entries(dtype, V)
    if words in ("none, delta", "scalar, delta"):
        yield from around.raw_entries(dtype, K)


def _bar(items: list[Any]) -> Iterable[Any]:
    """The items, with a progress bar on a terminal if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, unit="kernel", disable=not sys.stderr.isatty())


def _compile_loops() -> bool:
    """Compile the CPU kernels; False if their compiler is not installed."""
    if importlib.util.find_spec("numba") is None:
        sys.stdout.write("Numba, the compiler of the CPU kernels, is not installed: pip install numba\n")
        return False
    modules = [importlib.import_module(name, __package__)
               for name in (".matrix_state.cpu.kernels", ".softmax.cpu.run", ".fast_weights.cpu.calls",
                            ".ops.cpu.kernels", ".runtime.pieces.piece")]  # fmt: skip
    groups = modules[0].groups() | modules[1].groups() | modules[2].groups() | modules[3].groups()
    for dtype, (purpose, (kernels, words)) in _bar(list(itertools.product(("float32", "float64"), groups.items()))):
        began = time.perf_counter()
        modules[4].load_pieces(kernels, dtype, frozenset(words.split()))
        sys.stdout.write(f"cpu  {dtype} {purpose}: ready, {time.perf_counter() - began:.2f} s\n")
    sys.stdout.write(f"stored in {code_cache.folder_in_words('cpu')}\n")
    return True


def _compile(arch: str, words: str, entry: Entry) -> bool:
    began = time.perf_counter()
    try:
        cubin, log, path = compile_source(installed(entry.file), dict(entry.constants), arch)
    except nvrtc.CompileError as error:
        sys.stdout.write(f"{arch}  {words}  FAILED\n{error}\n")
        return False
    how = "compiled" if log else "cached"
    stored = "" if path else ", not stored: the cache folder is not usable"
    sys.stdout.write(f"{arch}  {words}  {how}, {time.perf_counter() - began:.2f} s, {len(cubin)} bytes{stored}\n")
    return True


def _capability(arch: str) -> int:
    digits = arch.removeprefix("sm_").rstrip("a")
    if not arch.startswith("sm_") or not digits.isdigit() or int(digits) not in SHARED:
        raise ValueError(f"warmup: arch is {arch!r}, expected sm_ and one of {', '.join(map(str, SHARED))}")
    return int(digits)


def _device_architecture() -> str:
    try:
        from .runtime.cuda import launch
        from .runtime.cuda.compile import architecture

        return architecture(launch.capability())
    except Exception as error:  # no CuPy, or no device
        raise RuntimeError("warmup: CuPy sees no device; give --arch, for example --arch sm_90a") from error
