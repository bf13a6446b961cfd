"""The command `linattn warmup`: compile CPU loops and CUDA kernels ahead of their first use. Needs no GPU."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from math import gcd
from typing import Any, NamedTuple

from .matrix_state import policy
from .matrix_state.cuda import delta_plan as cuda_delta_plan
from .matrix_state.cuda import delta_portable_plan as cuda_delta_portable
from .matrix_state.cuda import operands as cuda_operands
from .matrix_state.cuda import plan as cuda_plan
from .matrix_state.cuda import scan_launch as cuda_scan
from .matrix_state.cuda import step as cuda_step
from .matrix_state.cuda import vector_plan as cuda_vector
from .matrix_state.cuda import wgmma as cuda_wgmma
from .matrix_state.cuda.free import delta as cuda_free_delta
from .matrix_state.cuda.free import plan as cuda_free
from .matrix_state.cuda.portable import plan as cuda_chunks
from .matrix_state.cuda.recurrence import plan as cuda_recurrence
from .matrix_state.types import Decay, Erase
from .ops.cuda import complement, gate_formula, product, step_size, unit_rows
from .runtime import code_cache
from .runtime.cuda import nvrtc
from .runtime.cuda.compile import cache_folder, compile_source
from .runtime.cuda.elements import BYTES, ELEMENTS
from .runtime.cuda.sources import installed
from .softmax.cuda import path_plan as cuda_path
from .softmax.cuda import plan as cuda_softmax
from .softmax.cuda import portable_plan as cuda_portable
from .softmax.cuda import system_plan as cuda_system

SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}  # KiB a block


class Entry(NamedTuple):
    """One compilation: its description, the source file, and the constants passed to the compiler."""

    words: str
    file: str
    constants: cuda_plan.Constants


def entries(dtype: str, K: int, V: int, capability: int, decay: bool = True, backward: bool = True) -> Iterator[Entry]:
    """Every kernel of forward, and of backward, for key width K and value width V."""
    limit = SHARED[capability] * 1024
    align = gcd(16, K * BYTES[dtype], V * BYTES[dtype])
    wgmma = cuda_wgmma.takes(dtype, K, V, align, capability)

    def scan(words: str, K: int, V: int, reverse: bool = False, outputs: bool = True, dots: bool = False) -> Entry:
        if wgmma:
            how = cuda_wgmma.scan_pass(K, V, decay, reverse, outputs, dots)
        else:
            how = cuda_plan.scan_pass(cuda_plan.ScanKind(dtype, K, V, align, decay, reverse, outputs, dots), limit)
        return Entry(words, how.file, how.constants)

    def small(words: str, file: str, reverse: bool = False) -> Entry:
        chunk = policy.GROUP_CHUNK if wgmma else policy.SCAN_CHUNK
        return Entry(words, file, cuda_plan.common_constants(dtype, decay, reverse, chunk))

    yield scan("out", K, V)
    yield scan("segment offset of the state", K, V, outputs=False)
    yield small("states of segments", cuda_scan.SEGMENTS)
    if backward:
        if wgmma and cuda_wgmma.takes_writes(K, V):
            yield Entry("dk, dv", cuda_wgmma.WRITES, cuda_wgmma.writes_pass(K, V, decay, decay).constants)
        else:
            yield scan("dv", K, V, reverse=True)
            yield scan("dk", V, K, reverse=True, dots=decay)
        yield scan("dq", V, K, dots=decay)
        yield scan("segment offset of dstate", K, V, reverse=True, outputs=False)
        yield small("dstates of segments", cuda_scan.SEGMENTS, reverse=True)
        if decay:
            yield small("dg", cuda_scan.GATE)
        if dtype == "bfloat16" and K % 8 == 0:
            yield Entry("sums over grouped heads", cuda_operands.HEAD_SUMS, ())


def delta_entries(
    dtype: str, K: int, V: int, capability: int, decay: bool = True, backward: bool = True, raw: bool = False,
    steps: int = 1,
) -> Iterator[Entry]:
    """Every kernel of the delta rule for key width K and value width V.

    raw: q and k are l2-normalised by the kernel. steps: micro-steps per token, of which the last one reads.
    """
    if cuda_delta_plan.takes(dtype, K, V, capability):
        for name, reverse in cuda_delta_plan.names(2, backward):
            yield Entry(f"delta rule, {name}", cuda_delta_plan.KERNELS[name].file,
                        cuda_delta_plan.constants(name, K, V, decay, reverse, raw, steps))
        if backward:
            yield Entry("delta rule, sums over heads", cuda_operands.HEAD_SUMS, ())
        return
    align = gcd(16, K * BYTES[dtype], V * BYTES[dtype])
    kind, limit = cuda_delta_portable.Kind(dtype, K, V, align, decay, capability=capability), SHARED[capability] * 1024
    seen = set()
    for cut in (False, True):
        for words, how in cuda_delta_portable.passes(kind._replace(cut=cut), limit, backward).items():
            if (how.file, how.constants) not in seen:
                seen.add((how.file, how.constants))
                yield Entry(f"delta rule, {words}" + ", of segments" * (cut and "segment" not in words), how.file,
                            how.constants)


def vector_entries(
    dtype: str, K: int, V: int, capability: int, erase: Erase = Erase.NONE, bonus: bool = False, ragged: bool = False
) -> Iterator[Entry]:
    """Every kernel of a vector decay for key width K and value width V; none where they are not for it.

    bonus: queries read before the write, with a bonus of their own token's. ragged: packed sequences.
    """
    if not cuda_vector.takes(dtype, K, V, capability):
        return
    plain, exact, kept, bounded = (cuda_vector.Build(), cuda_vector.Build(exact=True), cuda_vector.Build(keep=True),
                                   cuda_vector.Build(bounded=True))  # fmt: skip
    builds = {"scan": plain, "exact scan": exact, "adds": plain, "segments": plain, "scan of bounded gates": bounded}
    if erase is Erase.DELTA:
        builds = {"inverse": plain, "exact inverse": exact, "chain": plain, "exact chain": exact, "transfers": plain,
                  "inverse of segments": kept}  # fmt: skip
    for gate, (words, build) in itertools.product(("bfloat16", "float32"), builds.items()):
        if not (build.bounded and bonus):
            name, kind = words.split()[build.exact], cuda_vector.VectorKind(K, V, gate, bonus, bonus, ragged)
            constants = cuda_vector.constants(name, kind, build)
            yield Entry(f"vector decay in {gate}, {words}", cuda_vector.KERNELS[name].file, constants)
    if erase is Erase.DELTA:
        constants = cuda_delta_plan.constants("segments", K, V, True)
        yield Entry("vector decay, states of segments", cuda_delta_plan.SEGMENTS, constants)


def free_entries(
    dtype: str, K: int, V: int, capability: int, backward: bool = True, ragged: bool = False
) -> Iterator[Entry]:
    """Every kernel of erase FREE with a vector decay or none; none where they are not for it."""
    if not cuda_vector.takes(dtype, K, V, capability):
        return
    plan, Build = cuda_free, cuda_free.Build
    wanted = [(plan.FACTORS, Build()), (plan.FACTORS, Build(exact=True)), (plan.CHAIN, Build())]
    for back in (False, True)[: 2 * backward]:
        wanted += [(plan.FACTORS, Build(exact, back, True)) for exact in (False, True)]
        wanted += [(plan.CHAIN, Build(False, back, True))]
    wanted += [(plan.GRADS, Build()), (plan.EXACT_GRADS, Build())] if backward else []
    for gate in ("bfloat16", "float32"):
        for name, build in wanted:
            words = f"{'exact ' * build.exact}{name}{' for a backward' * build.keep}{', reversed' * build.backward}"
            constants = plan.constants(name, plan.FreeKind(K, V, gate, ragged), build)
            yield Entry(f"free rank-one term in {gate}, {words}", plan.KERNELS[name].file, constants)


def erase_vector_entries(dtype: str, K: int, V: int, capability: int, backward: bool = True) -> Iterator[Entry]:
    """Every kernel of the delta rule with a vector decay and erase vectors of its own (gdn2)."""
    yield from free_entries(dtype, K, V, capability, backward)
    for gate in ("bfloat16", "float32") if cuda_vector.takes(dtype, K, V, capability) else ():
        constants = cuda_free_delta.constants(K, V, gate, "bfloat16", False)
        yield Entry(f"erase vectors with a decay in {gate}", cuda_free_delta.SOURCE, constants)
    if dtype == "bfloat16":
        yield Entry("products of gates", product.SOURCE, product.constants(dtype))


def vector_backward_entries(
    dtype: str, K: int, V: int, capability: int, erase: Erase = Erase.NONE, bonus: bool = False
) -> Iterator[Entry]:
    """Every kernel of the backward of a vector decay; none where they are not for it."""
    if not cuda_vector.takes(dtype, K, V, capability):
        return
    plan, delta = cuda_vector, erase is Erase.DELTA
    for gate in ("bfloat16", "float32"):
        kind = cuda_vector.VectorKind(K, V, gate, bonus, bonus)
        how = [(f"reverse{' of segments' * adds}", plan.REVERSE, plan.reverse_constants(kind, delta, adds))
               for adds in (False, True)]  # fmt: skip
        how += [(f"{'exact ' * exact}gradients{' with keys of log decays' * one.complement}", plan.GRADS,
                 plan.grads_constants(one, delta, exact)) for exact in (False, True)
                for one in (kind, kind._replace(complement=True))[: 2 - (delta or bonus)]]  # fmt: skip
        how += [] if delta or bonus else [("queries", plan.GRADS, plan.grads_constants(kind, dq="float32"))]
        how += [("strengths", plan.STRENGTHS, plan.small_constants(kind, True))] if delta else []
        how += [("bonus", plan.BONUS, plan.small_constants(kind, False))] if bonus else []
        yield from (Entry(f"vector decay in {gate}, {words}", kernel.file, made) for words, kernel, made in how)


def softmax_entries(dtype: str, K: int, V: int, capability: int, decay: bool, backward: bool = True) -> Iterator[Entry]:
    """Every kernel of softmax attention; decay: of attention with log decays. None where they are not for it."""
    kind = cuda_softmax.Kind(dtype, -(-K // 8) * 8, -(-V // 8) * 8, decay)
    if not cuda_softmax.takes(dtype, kind.K, kind.V, capability):
        return
    names = ("decays", "norms", "forward")[2 * (not decay) :]
    names += ("dots", "backward", "dq", "gates")[: 3 + decay] * backward
    for name in names:
        words = f"softmax attention{' with decays' * decay}, {name}"
        yield Entry(words, cuda_softmax.KERNELS[name].file, cuda_softmax.constants(name, kind))


def path_entries(dtype: str, K: int, V: int, capability: int, decay: bool) -> Iterator[Entry]:
    """Every kernel of PaTH attention but those of gates; none where they are not for it."""
    kind = cuda_softmax.Kind(dtype, -(-K // 8) * 8, -(-V // 8) * 8, decay)
    if dtype == "bfloat16" and cuda_softmax.takes(dtype, kind.K, kind.V, capability):
        for name, kernel in cuda_path.KERNELS.items():
            yield Entry(f"PaTH attention{' with decays' * decay}, {name}", kernel.file, cuda_path.constants(name, kind))


def recurrence_entries(dtype: str, K: int, V: int, erase: bool, bonus: bool = False) -> Iterator[Entry]:
    """The kernels of gradients token by token, with log decays in float32."""
    kind = cuda_recurrence.RecurrenceKind(K, V, dtype, "float32", erase, bonus, bonus, K % 4 == V % 4 == 0)
    for name, kernel in (("values", cuda_recurrence.VALUES), ("channels", cuda_recurrence.CHANNELS)):
        for back in (False, True):
            if name == "channels" or back or erase:
                constants = cuda_recurrence.constants(name, kind, back)
                words = f"gradients token by token, {name}{', from the last token' * back}"
                yield Entry(words, kernel.file, constants)


def raw_entries(dtype: str, K: int) -> Iterator[Entry]:
    """The kernels of raw projections: l2 norms of rows of K, and the gate formula."""
    per = gcd(16 // BYTES[dtype], K)
    yield Entry("l2 norms", unit_rows.SOURCE, unit_rows.row_constants(dtype, dtype, K, per))
    yield Entry("gate formula", gate_formula.SOURCE, (("LA_DTYPE", ELEMENTS[dtype]),))


def key_entries(dtype: str) -> Iterator[Entry]:
    """The kernels of keys that are made of log decays (hgrn2)."""
    for gate in dict.fromkeys((dtype, "float32")):
        yield Entry(f"keys of log decays in {gate}", complement.SOURCE, complement.constants(gate, dtype))


def step_size_entries(dtype: str, V: int) -> Iterator[Entry]:
    """The kernels of Mamba-2's step size and output gate for value width V."""
    yield Entry("step size", step_size.SOURCE, step_size.step_constants(dtype, dtype, V))
    yield Entry("sums over tokens", step_size.SOURCE, step_size.SUMS_CONSTANTS)


def step_entries(dtype: str, K: int, V: int, decay: Decay, erase: Erase, state: str = "float32") -> Iterator[Entry]:
    """The kernels of a few tokens for one kind of decay and erase, with states overwritten in place."""
    wide, stored = K % 4 == V % 4 == 0, "" if state == "float32" else f", a state in {state}"

    def step(
        words: str, separate: bool = False, before: bool = False, read: int = 1, bonus: bool = False,
    ) -> Iterator[Entry]:
        kind = cuda_step.StepKind(K, V, decay, False, erase, separate, before, read, bonus)
        seen = set()
        for one, many in ((False, False), (True, False), (True, True)) if wide else ((False, False),):
            constants = cuda_step.step_constants(kind, cuda_step.Stored(dtype, wide, one, state, state, many))
            if constants not in seen:
                seen.add(constants)
                tokens = ("one token" if one else "a few tokens") + " of many states" * many
                yield Entry(f"{tokens}{words}{stored}", cuda_step.STEP, constants)

    yield from step("")
    if erase is Erase.DELTA and decay is Decay.SCALAR:
        yield from step(", an erase vector that reads the undecayed state", separate=True, before=True)
    if erase is Erase.NONE and decay is Decay.VECTOR:
        yield from step(", read before the write with a bonus", read=2, bonus=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--arch", nargs="+", metavar="SM", help="architectures, e.g. sm_80 sm_90a; default: device")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=list(cuda_plan.PRODUCTS))
    parser.add_argument("--key", nargs="+", type=int, default=[64, 128], metavar="K", help="key widths")
    parser.add_argument("--value", nargs="+", type=int, metavar="V", help="value widths; default: the key widths")
    parser.add_argument("--decay", nargs="+", default=["scalar"], choices=["none", "scalar", "vector"])
    parser.add_argument("--erase", nargs="+", default=["none"], choices=["none", "delta", "free"],
                        help="erase term; free erase: kernels of a few tokens only")
    parser.add_argument("--raw", action="store_true",
                        help="also kernels of raw projections (qk_l2norm, A_log); without erase: Mamba-2's step size")
    parser.add_argument("--softmax", action="store_true", help="also kernels of softmax attention")
    parser.add_argument("--state", nargs="+", default=["float32"], choices=list(ELEMENTS),
                        help="dtypes of stored states that are overwritten in place")
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
              for words, K, V, entry in _wanted(args, dtype, capability)]  # fmt: skip
    for arch, words, entry in _bar(wanted):
        failed += not _compile(arch, words, entry)
    write(f"stored in {cache_folder()}\n")
    return 1 if failed else 0


def _wanted(args: argparse.Namespace, dtype: str, capability: int) -> Iterator[tuple[str, int, int, Entry]]:
    """(decay and erase in words, K, V, entry) of everything selected by the options."""
    for decay, erase in itertools.product(args.decay, args.erase):
        words = decay if erase == "none" else f"{decay}, {erase}"
        for K in args.key:
            for V in args.value or [K]:
                if erase == "none" and decay != "vector":
                    how = (dtype, K, V, capability, decay == "scalar", not args.forward_only)
                    limit = SHARED[capability] * 1024
                    portable = (*cuda_portable.entries(*how, limit), *cuda_system.entries(*how[:3], *how[4:], limit))
                    more = (*softmax_entries(*how), *map(Entry._make, portable), *path_entries(*how[:5]))
                    for entry in (*entries(*how), *(more if args.softmax else ())):
                        yield words, K, V, entry
                    mamba2 = args.raw and decay == "scalar" and dtype != "tf32"
                    for entry in step_size_entries(dtype, V) if mamba2 else ():
                        yield words, K, V, entry
                for entry in key_entries(dtype) if args.raw and decay == "vector" and erase == "none" else ():
                    yield words, K, V, entry
                free = {"vector, delta": erase_vector_entries, "vector, free": free_entries, "none, free": free_entries}
                for entry in free[words](dtype, K, V, capability, not args.forward_only) if words in free else ():
                    yield words, K, V, entry
                if decay == "vector" and erase != "free":
                    own = Erase[erase.upper()]
                    for bonus in (False, True)[: 1 + (erase == "none")]:
                        how = (dtype, K, V, capability, own, bonus)
                        backward = () if args.forward_only else vector_backward_entries(*how)
                        size = SHARED[capability] * 1024 * (dtype != "tf32" and not cuda_vector.takes(*how[:4]))
                        chunks = cuda_chunks.entries(*how[:3], erase == "delta", bonus, size, not args.forward_only)
                        for entry in (*vector_entries(*how), *backward, *map(Entry._make, chunks)):
                            yield words, K, V, entry
                if dtype == "tf32":  # a few tokens and the delta rule are computed in float32
                    continue
                alone = not args.forward_only and (decay == "vector" or erase == "free") and decay != "scalar"
                for entry in recurrence_entries(dtype, K, V, erase != "none") if alone else ():
                    yield words, K, V, entry
                if erase == "delta" and decay != "vector":
                    chain = (dtype, K, V, capability, decay == "scalar", not args.forward_only)
                    more = (*delta_entries(*chain, raw=True), *raw_entries(dtype, K)) if args.raw else ()
                    for entry in (*delta_entries(*chain), *more):
                        yield words, K, V, entry
                for state in args.state:
                    for entry in step_entries(dtype, K, V, Decay[decay.upper()], Erase[erase.upper()], state):
                        yield words, K, V, entry


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
               for name in (".matrix_state.cpu.kernels", ".softmax.cpu.run", ".runtime.pieces.piece")]  # fmt: skip
    groups = modules[0].groups() | modules[1].groups()
    for dtype, (purpose, (kernels, words)) in _bar(list(itertools.product(("float32", "float64"), groups.items()))):
        began = time.perf_counter()
        modules[2].load_pieces(kernels, dtype, frozenset(words.split()))
        sys.stdout.write(f"cpu  {dtype} {purpose}: ready, {time.perf_counter() - began:.2f} s\n")
    sys.stdout.write(f"stored in {code_cache.folder('cpu')}\n")
    return True


def _compile(arch: str, words: str, entry: Entry) -> bool:
    began = time.perf_counter()
    try:
        code = compile_source(installed(entry.file), dict(entry.constants), arch)
    except nvrtc.CompileError as error:
        sys.stdout.write(f"{arch}  {words}  FAILED\n{error}\n")
        return False
    how = "compiled" if code.log else "cached"
    stored = "" if code.path else ", not stored: the cache folder is not usable"
    sys.stdout.write(f"{arch}  {words}  {how}, {time.perf_counter() - began:.2f} s, {len(code.cubin)} bytes{stored}\n")
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
        raise RuntimeError("warmup: CuPy sees no device; give --arch, for example --arch sm_90a"
                           ) from error
