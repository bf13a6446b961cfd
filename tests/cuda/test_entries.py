"""Every entry of every family compiles without a GPU: to its matrix units, with few spilled registers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.elementwise.cuda.entries import scan_entries as channel_entries
from linattn_np.fast_weights.cuda import momentum, rates
from linattn_np.fast_weights.cuda import plan as learners
from linattn_np.fast_weights.cuda.entries import between_entries, learner_entries
from linattn_np.matrix_state.cuda import operands
from linattn_np.matrix_state.cuda.delta import plan as delta_plan
from linattn_np.matrix_state.cuda.delta.entries import delta_entries
from linattn_np.matrix_state.cuda.free import delta as free_delta
from linattn_np.matrix_state.cuda.free.entries import free_entries
from linattn_np.matrix_state.cuda.portable import delta_plan as portable_delta
from linattn_np.matrix_state.cuda.portable.entries import portable_entries
from linattn_np.matrix_state.cuda.scan import launch as scan_launch
from linattn_np.matrix_state.cuda.scan.entries import normaliser_entries, scan_entries
from linattn_np.matrix_state.cuda.systems.entries import system_entries
from linattn_np.matrix_state.cuda.token.entries import log_entries, recurrence_entries, step_entries
from linattn_np.matrix_state.cuda.vector import plan as vector_plan
from linattn_np.matrix_state.cuda.vector.entries import vector_backward_entries, vector_entries
from linattn_np.matrix_state.types import Decay, Erase
from linattn_np.ops.cuda import monomials, ranks, trapezoid
from linattn_np.ops.cuda.entries import feature_entries, key_entries, optimiser_entries, raw_entries, step_size_entries
from linattn_np.runtime.cuda import compile as cuda_compile
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.runtime.cuda.entries import SHARED, Entry
from linattn_np.softmax.cuda import entries as softmax
from tests.ops.test_cuda_trapezoid import Case as LateRows
from tests.ops.test_cuda_trapezoid import Rows as RowsOfTokens
from tests.ops.test_cuda_trapezoid import computed as late_rows
from tests.ops.test_cuda_trapezoid import read_rows as rows_of_tokens

from . import emulation
from .emulation import device, emulated, public  # noqa: F401
from .machine_code import HGMMA, HMMA, operations, spilled

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
WIDTHS = (1, 64, 128, 256)
STORED = ("bfloat16", "float16", "float32", "float64")
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
NONE, DELTA, FREE = Erase.NONE, Erase.DELTA, Erase.FREE


def capability(arch: str) -> int:
    return int(arch.strip("sm_a"))


class Case(NamedTuple):
    """The entries of one family for one architecture."""

    family: str
    arch: str
    entries: Iterable[Any]
    allowed: Callable[[Any], int] = lambda entry: 0  # bytes of spilled registers that an entry may store
    products: Callable[[Any], Any] = lambda entry: (
        None
    )  # operations of which one must be there; {}: none of either kind
    waits: Callable[[Any], bool] = lambda entry: False  # whether its products may wait for one another
    called: Callable[[Any], int] | None = None  # bytes that the functions that it calls may store; None: in `allowed`


def name_of(entry: Any) -> str:
    return entry.words.split(", ")[1]


def on_warps(arch: str) -> Any:
    """Products of warps, looked for where the machine code is read."""
    return HMMA if arch in ("sm_80", "sm_90a") else None


# Scan. 128 x 128 in bfloat16 keeps 160 accumulators a thread with two blocks a multiprocessor, all 255 registers: it
# spills addresses. Float32 operands are two registers each; 60 x 100 spills 40 bytes by NVRTC 13.0, 56 by 13.5.
SCAN = {("bfloat16", 128, 128): 40, ("float32", 60, 100): 56, ("float32", 128, 128): 72}
SCAN_KINDS = [(arch, *kind) for arch in ("sm_80", "sm_90a", "sm_100a")
              for kind in (("bfloat16", 128, 128), ("float16", 64, 64), ("float32", 60, 100))]  # fmt: skip
SCAN_KINDS += [("sm_90a", "tf32", 128, 128), ("sm_90a", "float32", 128, 128), ("sm_90a", "bfloat16", 64, 64),
               ("sm_90a", "bfloat16", 128, 64), ("sm_90a", "bfloat16", 40, 120)]  # fmt: skip
WITHOUT_PRODUCTS = (scan_launch.SEGMENTS, scan_launch.GATE, operands.HEAD_SUMS)


def of_scan():
    for arch, *kind in SCAN_KINDS:
        yield Case("scan", arch, scan_entries(*kind, capability(arch)),
                   lambda x, kind=tuple(kind): 0 if "wgmma" in x.file else SCAN.get(kind, 0),
                   lambda x, arch=arch: None if x.file in WITHOUT_PRODUCTS else
                   (HGMMA if "wgmma" in x.file else HMMA) if on_warps(arch) else None)  # fmt: skip
    for arch in ("sm_80", "sm_90a"):
        for dtype, K, V, decay in [("bfloat16", 128, 128, True), ("float32", 128, 128, False),
                                   ("bfloat16", 7, 60, True), ("float32", 700, 256, True)]:  # fmt: skip
            yield Case("normaliser", arch, normaliser_entries(dtype, K, V, decay))


# One token. This compiler spills 24 bytes of a token with a bonus; 13.0 and 13.5 spill none.
BONUS = {("sm_100a", 13, 2): 24}
EVERY_CELL = [(decay, erase) for decay in Decay for erase in Erase]
HEAVY = [(Decay.VECTOR, FREE), (Decay.SCALAR, DELTA)]
STEPS = [("bfloat16", 128, 128, EVERY_CELL, "float32"), ("float32", 256, 256, HEAVY, "float32"),
         ("float32", 255, 7, HEAVY[:1], "float32"), ("float16", 128, 64, HEAVY[:1], "float32"),
         ("bfloat16", 128, 128, HEAVY, "bfloat16"), ("float32", 256, 256, HEAVY[:1], "float16"),
         ("float16", 255, 7, HEAVY[:1], "bfloat16")]  # fmt: skip


def spilled_with_bonus(arch: str) -> int:
    return BONUS.get((arch, *nvrtc.version()), 0)


def of_tokens():
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        for dtype, K, V, cells, state in STEPS:
            yield Case(
                "step",
                arch,
                [x for cell in cells for x in step_entries(dtype, K, V, *cell, state)],
                lambda x, arch=arch: dict(x.constants)["LA_BONUS"] * spilled_with_bonus(arch),
            )
    # a token of a log: 64 numbers of the state, and the terms of two readers, in 128 registers; of small states in 64
    kinds = [(128, 128, "SCALAR", "float32"), (128, 128, "VECTOR", "float32"), (128, 128, "SCALAR", "bfloat16"),
             (255, 7, "VECTOR", "float16"), (256, 256, "VECTOR", "float32")]  # fmt: skip
    kinds += [(128, 128, "VECTOR", "float64")]
    kinds += [(128, 128, "SCALAR", "int8"), (128, 128, "VECTOR", "int8"), (128, 128, "SCALAR", "int16"),
              (256, 256, "SCALAR", "int8"), (255, 7, "VECTOR", "int12")]  # fmt: skip
    logs = [entry for K, V, decay, state in kinds for entry in log_entries(K, V, Decay[decay], state)]
    for arch in ("sm_80", "sm_90a"):
        yield Case("log", arch, logs, lambda x: 160)
    # random features: rows of 128 channels and sums of 32 columns in 128 registers, two blocks a multiprocessor
    for arch in ARCHITECTURES:
        widths = (8, 16, 32, 40, 64, 128) if arch in ("sm_80", "sm_90a") else (40, 128)
        each = [x for K in widths for x in feature_entries("bfloat16", K)]
        few = 20 if capability(arch) >= 100 else 0
        yield Case("features", arch, each, lambda x, few=few: few * (dict(x.constants)["LA_K"] == 128),
                   lambda x: None if x.file == monomials.SOURCE else HMMA)  # fmt: skip
    for arch in ("sm_80", "sm_90a"):
        yield Case("optimiser", arch, [x for dtype in STORED for x in optimiser_entries(dtype)])
    for (n, dtype), (m, width) in itertools.product(enumerate(STORED[:3]), enumerate((1, 7, 60, 128, 500))):
        arch = ("sm_80", "sm_90a")[(n + m) % 2]  # each dtype, and each width, on both
        yield Case("rows", arch, [*raw_entries(dtype, width), *step_size_entries(dtype, width), *key_entries(dtype)])
    # two blocks share a multiprocessor: a thread that holds 64 floats of a state has 128 registers; of channels, 80
    each = [(arch, "float32", 128, 128, True, False) for arch in ARCHITECTURES]
    each += [("sm_90a", "float16", 128, 64, False, True), ("sm_90a", "float32", 7, 5, False, False),
             ("sm_80", "bfloat16", 128, 64, False, True)]  # fmt: skip
    for arch, *kind in each:
        yield Case("recurrence", arch, recurrence_entries(*kind), lambda x: 200 if ", values" in x.words else 16)


# Delta. grads: 96 registers a thread beside two tiles of 32 accumulators in flight, changed together with raw
# projections. Portable: two tiles of the state are 128 registers, a chunk's writes 64 and its operands 32 more; float32
# and float16 keep one or two words an operand; 256 columns take 128 registers for the state alone.
DELTA_GRADS, RAW_GRADS = 16, 88
PORTABLE_DELTA = {("bfloat16", 128): 112, ("float16", 64): 16, ("float16", 128): 80, ("float32", 64): 16,
                  ("float32", 128): 200, ("float32", 100): 200, ("float32", 256): 2500}  # fmt: skip
DELTA_KINDS = [("sm_90a", "bfloat16", 128, 128, True), ("sm_90a", "bfloat16", 128, 128, False),
               ("sm_90a", "bfloat16", 64, 40, True), ("sm_90a", "float32", 256, 256, True),
               ("sm_80", "bfloat16", 128, 128, True), ("sm_80", "float16", 128, 128, True),
               ("sm_80", "float32", 60, 100, False), ("sm_100a", "bfloat16", 128, 128, True),
               ("sm_120a", "float32", 128, 128, True)]  # fmt: skip
ON_WARPS = (delta_plan.FACTORS, delta_plan.SEGMENTS)


def of_delta():
    for arch, dtype, K, V, decay in DELTA_KINDS:
        wgmma, most = delta_plan.takes(dtype, K, V, capability(arch)), PORTABLE_DELTA.get((dtype, max(K, V)), 0)

        def products(x, arch=arch, wgmma=wgmma):
            if not on_warps(arch) or x.file in (operands.HEAD_SUMS, portable_delta.SEGMENTS):
                return None
            return HGMMA if wgmma and x.file not in ON_WARPS else HMMA

        yield Case("delta", arch, delta_entries(dtype, K, V, capability(arch), decay),
                   lambda x, wgmma=wgmma, most=most: DELTA_GRADS * x.words.endswith("grads") if wgmma else most,
                   products)  # fmt: skip
    for raw, steps, decay in [(True, 1, True), (True, 1, False), (False, 4, True), (True, 2, True)]:
        yield Case("delta, raw or in steps", "sm_90a",
                   delta_entries("bfloat16", 128, 128, 90, decay, raw=raw, steps=steps),
                   lambda x, raw=raw: (RAW_GRADS if raw else DELTA_GRADS) * x.words.endswith("grads"))  # fmt: skip
    for dtype in ("bfloat16", "float16", "float32"):
        kind = portable_delta.PortableDeltaKind(dtype, 64, 64, 16, True, separate_erase_key=True, before=True)
        yield Case("delta with erase vectors", "sm_80", portable_delta.passes(kind, 163 * 1024, True).values(),
                   lambda x, dtype=dtype: PORTABLE_DELTA.get((dtype, 64), 0), waits=lambda x: True)  # fmt: skip


# Vector decays. A scan has 152 registers a thread of the products and 104 of the producers, faster than 160 and 96: it
# spills numbers read once a traversal. Its exact form holds three rows of 16 numbers a lane before that; with
# bounded gates, three numbers a chunk are stored behind its products. The chain has 144 and 112, the least with which
# its products do not wait for one another. Four inverses share a multiprocessor, with 64 registers. EXACT: functions
# that recompute a chunk exactly, which hold three such rows too.
VECTOR = {"scan": 36, "exact scan": 232, "scan of bounded gates": 12, "inverse of segments": 8, "chain": 36}
EXACT = {"inverse": 400, "inverse of segments": 400, "chain": 240}
VECTOR_KINDS = [(128, 128, NONE, False, False), (128, 128, NONE, True, False), (128, 128, NONE, False, True),
                (64, 40, NONE, True, True), (128, 128, DELTA, False, False), (64, 40, DELTA, False, True)]  # fmt: skip
# Backward. The reverse chain has 144 registers a thread of the products and 112 of the copies: with float32 log decays
# and narrow keys, addresses spill. The gradients share a multiprocessor in twos, 128 registers a thread, of which two
# sums of the delta rule take 64 while second terms of copies are computed.
BACKWARD = {("reverse", NONE): 16, ("reverse", DELTA): 32, ("reverse of segments", DELTA): 32,
            ("exact gradients", NONE): 48, ("exact gradients with keys of log decays", NONE): 64,
            ("gradients", DELTA): 288}  # fmt: skip
BACKWARD_KINDS = [(128, 128, NONE, False), (128, 128, NONE, True), (64, 40, NONE, True), (128, 128, DELTA, False),
                  (40, 120, DELTA, False)]  # fmt: skip


def of_vectors():
    for K, V, erase, bonus, ragged in VECTOR_KINDS:
        yield Case("vector", "sm_90a", vector_entries("bfloat16", K, V, 90, erase, bonus, ragged),
                   lambda x: VECTOR.get(name_of(x), 0), lambda x: {} if name_of(x) == "segments" else
                   HMMA if name_of(x).endswith(("inverse", "of segments")) else HGMMA,
                   lambda x: name_of(x).removeprefix("exact ") == "scan",
                   lambda x: EXACT.get(name_of(x), 0))  # fmt: skip
    builds = {"scan": {}, "exact scan": {"exact": True}, "scan of bounded gates": {"bounded": True}}
    for gate, keep in [(gate, keep) for gate in ("bfloat16", "float32") for keep in (True, False)]:
        kind = vector_plan.VectorKind(128, 128, gate)
        builds_of = {name: vector_plan.Build(keep=keep, two_term_keys=True, **build) for name, build in builds.items()}
        entries = [Entry(f"a, {name}", vector_plan.KERNELS["scan"].file, vector_plan.constants("scan", kind, build))
                   for name, build in builds_of.items()]  # fmt: skip
        yield Case("scan before a backward", "sm_90a", entries, lambda x: VECTOR[name_of(x)], waits=lambda x: True)
    for K, V, erase, bonus in BACKWARD_KINDS:
        yield Case("vector backward", "sm_90a", vector_backward_entries("bfloat16", K, V, 90, erase, bonus),
                   lambda x, erase=erase: BACKWARD.get((name_of(x), erase), 0),
                   lambda x: {} if name_of(x) in ("strengths", "bonus") else HGMMA)  # fmt: skip
    # portable: two blocks share a multiprocessor, a thread that holds 64 floats of a state has 128 registers
    each = [(arch, "float32", 128, 128, NONE, False) for arch in ARCHITECTURES]
    each += [("sm_90a", "float32", 128, 128, DELTA, False), ("sm_86", "bfloat16", 64, 60, DELTA, False),
             ("sm_90a", "float16", 128, 64, NONE, True), ("sm_90a", "float32", 7, 5, NONE, False)]  # fmt: skip
    for arch, dtype, K, V, erase, bonus in each:
        yield Case("portable", arch, portable_entries(dtype, K, V, capability(arch), erase, bonus),
                   lambda x: 300, waits=lambda x: True)  # fmt: skip


# Free. The exact factors hold the pairs of all levels, 64 numbers a thread, over their products; two blocks of the
# gradients share a multiprocessor, or one of 512 threads has it, with 128 registers.
FREE_ALLOWED = {"factors": 40, "exact factors": 200, "exact grads": 32, "grads": 16}


def of_free():
    def allowed(x):
        name = name_of(x).removesuffix(" for a backward")
        return 48 if name == "grads" and dict(x.constants)["LA_BLOCKS"] == 2 else FREE_ALLOWED.get(name, 0)

    for gate, K, V, ragged in [("bfloat16", 128, 128, False), ("bfloat16", 64, 64, False), ("float32", 64, 40, True)]:
        entries = [x for x in free_entries("bfloat16", K, V, 90, ragged=ragged) if f"in {gate}," in x.words]
        yield Case("free", "sm_90a", entries, allowed, lambda x: HGMMA)
    for gate, erasers, before, K, V in [
        ("bfloat16", "bfloat16", False, 128, 128),
        ("float32", "float32", True, 64, 40),
    ]:
        entry = Entry("erase vectors", free_delta.SOURCE, free_delta.constants(K, V, gate, erasers, before))
        yield Case("erase vectors", "sm_90a", [entry])


# Systems of chunks. A thread holds p and p Z, 128 registers at 128 channels, and 160 in float32: addresses spill, once
# an iteration; two blocks share a multiprocessor at 64.
SYSTEMS = {("bfloat16", 128): 48, ("float16", 128): 80, ("float32", 128): 64, ("bfloat16", 64): 56}


def of_systems():
    for arch, dtype, K in [("sm_80", "bfloat16", 128), ("sm_80", "float32", 60), ("sm_86", "bfloat16", 64),
                           ("sm_90a", "bfloat16", 128), ("sm_90a", "bfloat16", 64), ("sm_90a", "float16", 128),
                           ("sm_90a", "float32", 128), ("sm_90a", "float32", 7), ("sm_100a", "bfloat16", 128),
                           ("sm_120a", "bfloat16", 64)]:  # fmt: skip
        yield Case("systems of chunks", arch, system_entries(dtype, K, capability(arch)),
                   lambda x, kind=(dtype, K): SYSTEMS.get(kind, 0) * (name_of(x) == "solutions"),
                   lambda x, arch=arch: on_warps(arch) and (HMMA if name_of(x) == "solutions" else {}))  # fmt: skip


# Softmax. PaTH: rows that are read once, and a number or two of `keys` beside its tiles. Portable: kernels that need
# all 255 registers spill addresses, stored once and reloaded a tile at most.
PATH = {"path/diagonal.cu": 400, "path/groups_adjoint.cu": 320, "path/factors_adjoint.cu": 160, "path/keys.cu": 32}
PORTABLE = 80
KINDS = [
    ("bfloat16", 128, 128, False),
    ("float16", 256, 200, True),
    ("float32", 128, 128, True),
    ("float32", 7, 60, False),
]


def of_softmax():
    for element, K, V, decay in [
        ("bfloat16", 128, 128, False),
        ("bfloat16", 128, 128, True),
        ("float16", 64, 40, True),
    ]:
        yield Case("softmax", "sm_90a", softmax.softmax_entries(element, K, V, 90, decay),
                   products=lambda x: HGMMA if name_of(x) in ("forward", "backward") else {})  # fmt: skip
    for K, V, decay in [(128, 128, True), (64, 128, False)]:
        yield Case("path", "sm_90a", softmax.path_entries("bfloat16", K, V, 90, decay), lambda x: PATH.get(x.file, 0),
                   lambda x: HGMMA)  # fmt: skip
    for arch, n in [
        ("sm_80", 0),
        ("sm_80", 1),
        ("sm_90a", 2),
        ("sm_120a", 0),
        ("sm_86", 3),
        ("sm_89", 3),
        ("sm_100a", 3),
    ]:
        dtype, K, V, decay = KINDS[n]
        yield Case("portable softmax", arch, softmax.portable_entries(dtype, K, V, capability(arch), decay),
                   lambda x: PORTABLE,
                   lambda x, arch=arch: on_warps(arch) and ({} if x.file.endswith(("cache.cu", "sinks.cu")) else HMMA),
                   lambda x: True)  # fmt: skip
    for arch, n in [("sm_80", 1), ("sm_90a", 2), ("sm_120a", 0), ("sm_89", 3)]:
        entries = list(softmax.system_entries(*KINDS[n][:3], capability(arch), KINDS[n][3]))
        yield Case("systems", arch, entries if arch == "sm_90a" else entries[:2],
                   lambda x: PORTABLE * ("portable_" in x.file), lambda x, arch=arch: on_warps(arch),
                   lambda x: True)  # fmt: skip
    for arch, n in [("sm_80", 1), ("sm_90a", 0), ("sm_120a", 3)]:
        yield Case("sticks", arch, softmax.stick_entries(*KINDS[n][:3], capability(arch)), lambda x: PORTABLE,
                   lambda x, arch=arch: on_warps(arch), lambda x: True)  # fmt: skip


def of_channels():
    """Two and more blocks share a multiprocessor, 128 registers a thread of a tile of 16 or 32 numbers an array.

    The backward of lru spills a few; on an H200 it is faster than with one channel a lane, where none spills.
    """

    def allowed(x):
        return 40 * (x.words == "scan of lru, backward")

    for arch, dtype in [("sm_80", "bfloat16"), ("sm_80", "float16"), ("sm_90a", "bfloat16"), ("sm_90a", "float32")]:
        yield Case("channels", arch, channel_entries(dtype), allowed, products=lambda x: {})


# Backward of two blocks a multiprocessor: addresses spill, once a mini-batch.
LEARNERS = {"float16": 12, "float32": 68}
# The walk of the momentum delta rule holds both states of 16 columns in registers; 824 bytes are those of 128 channels.
MOMENTUM = {momentum.WALK: 824, momentum.VJP: 60, momentum.SYSTEMS: 20}


def of_learners():
    cases = [*itertools.product(("sm_80", "sm_90a"), ("bfloat16", "float16", "float32"), (64,)),
             ("sm_80", "bfloat16", 128), ("sm_90a", "bfloat16", 128), ("sm_90a", "bfloat16", 250),
             ("sm_120a", "bfloat16", 7)]  # fmt: skip
    for arch, dtype, K in cases:
        found = learner_entries(dtype, K, capability(arch))
        allowed = MOMENTUM | {learners.BACKWARD: LEARNERS.get(dtype, 0)}
        if dtype == "float16":  # those of the momentum delta rule are those of float32
            found = [x for x in found if x.file in (learners.FORWARD, learners.BACKWARD)]
        yield Case("learners", arch, found, lambda x, allowed=allowed: allowed.get(x.file, 0),
                   products=lambda x: {} if x.file in (momentum.SOURCE, rates.SOURCE) else HMMA)  # fmt: skip
    yield Case("between products", "sm_80", between_entries(), lambda x: 0, products=lambda x: {})


FAMILIES = (of_scan, of_tokens, of_delta, of_vectors, of_free, of_systems, of_softmax, of_channels,
            of_learners)  # fmt: skip
CASES = [pytest.param(case, id=f"{case.family}-{case.arch}-{n}")
         for family in FAMILIES for n, case in enumerate(family())]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_entry_compiles(case):
    entries = list(case.entries)
    assert entries
    for entry in entries:
        source, constants = sources.read(entry.file), dict(entry.constants)
        cubin, log, _ = cuda_compile.compile_source(source, constants, case.arch, cached=False)
        assert cubin.startswith(b"\x7fELF")
        own, called = spilled(log)
        assert own + called * (case.called is None) <= case.allowed(entry), (entry, log)
        assert case.called is None or called <= case.called(entry), (entry, log)
        assert case.waits(entry) or not re.search(r"C75\d\d", log), (entry, log)
        products = case.products(entry)
        if products is not None:
            found = operations(cubin) & (products or HMMA | HGMMA)
            assert bool(found) == bool(products), entry


@pytest.mark.parametrize(
    ("entries", "elements", "V"),
    [(vector_entries, ("bfloat16",), 128), (vector_backward_entries, ("bfloat16",), 128),
     (free_entries, ("bfloat16",), 128), (softmax.softmax_entries, ("bfloat16", "float16"), 128),
     (softmax.path_entries, ("bfloat16",), 128)],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_kernels_of_compute_capability_90(entries, elements, V):
    """No other card has them, nor another dtype."""
    more = (True,) if entries in (softmax.softmax_entries, softmax.path_entries) else ()
    for element in ("bfloat16", "float16", "float32"):
        cards = {c for c in SHARED if list(entries(element, 128, V, c, *more))}
        assert cards == ({90} if element in elements else set())


@pytest.mark.parametrize(("erase", "name", "two_terms"), [(NONE, "scan", True), (DELTA, "chain", False)])
def test_a_forward_that_a_backward_follows_is_compiled_ahead(erase, name, two_terms):
    """The builds that calls with gradients launch."""
    build = vector_plan.Build(keep=True, two_term_keys=two_terms)
    wanted = vector_plan.constants(name, vector_plan.VectorKind(128, 128, "bfloat16"), build)
    for backward in (False, True):
        entries = vector_entries("bfloat16", 128, 128, 90, erase, backward=backward)
        assert (wanted in [entry.constants for entry in entries]) == backward


BY_DECAY = (softmax.softmax_entries, softmax.path_entries, softmax.portable_entries, softmax.system_entries)
EVERY = (scan_entries, delta_entries, vector_entries, vector_backward_entries, free_entries, portable_entries,
         softmax.softmax_entries, softmax.path_entries, softmax.portable_entries, softmax.system_entries,
         softmax.stick_entries)  # fmt: skip


@pytest.mark.parametrize("entries", EVERY, ids=lambda f: f.__name__)
def test_shared_memory_fits_every_card(entries):
    for card, size in SHARED.items():
        for dtype, K, V in itertools.product(("bfloat16", "float16", "float32"), (1, 16, 100, 128, 129, 256), WIDTHS):
            if entries is delta_entries and portable_delta.too_large(dtype, K, V, size * 1024) is not None:
                continue
            for entry in entries(dtype, K, V, card, *((True,) if entries in BY_DECAY else ())):
                constants = dict(entry.constants)
                blocks = constants.get("LA_BLOCKS", 1) if card == 90 else 1
                assert constants.get("LA_SHARED", 0) <= size * 1024, (card, dtype, K, V, entry)
                assert blocks * constants.get("LA_SHARED", 0) <= 228 * 1024, (card, dtype, K, V, entry)


@pytest.mark.parametrize("erase", [NONE, DELTA])
def test_portable_chunks_of_a_vector_decay(erase):
    """Every card has keys and values of up to 128 channels, one of compute capability 90 of up to 256."""
    for card, width in [*((card, 128) for card in SHARED), (90, 256)]:
        assert list(portable_entries("float32", width, width, card, erase))


D = 4096
PIECES = {
    "short_conv": ({"x": (1, 40, D), "weight": (D, 4)}, {"activation": "silu"}),
    "short_conv with a bias": ({"x": (1, 40, D), "weight": (D, 4), "bias": (D,)}, {"residual": True}),
    "token_shift": ({"x": (1, 40, D), "mix": (D,)}, {}),
    "rms_norm": ({"x": (64, 128), "weight": (128,)}, {}), "rms_norm of wide rows": ({"x": (4, D), "weight": (D,)}, {}),
    "layer_norm of wide rows": ({"x": (4, D), "weight": (D,), "bias": (D,)}, {}),
    "gated_norm": ({"x": (64, 128), "gate": (64, 128), "weight": (128,)}, {}),
    "gated_norm of wide rows": ({"x": (4, D), "gate": (4, D), "weight": (D,)}, {"gate_first": True}),
    "rotary": ({"x": (2, 40, 4, 128)}, {}), "softmax": ({"x": (64, 128)}, {}), "gelu": ({"x": (64, 128)}, {}),
    "swiglu": ({"x": (64, 128), "gate": (64, 128)}, {}), "cross_entropy": ({"x": (4, 32768)}, {}),
    "token_shift of the token before": ({"x": (1, 40, D)}, {}),
    "rms_norm of rows of 8192": ({"x": (4, 8192), "weight": (8192,)}, {}),
    "layer_norm of rows of 1024": ({"x": (4, 1024), "weight": (1024,), "bias": (1024,)}, {}),
    "embedding": ({"weight": (64, D)}, {}), "dropout": ({"x": (64, 128)}, {"rng": 0}),
}  # fmt: skip
# four blocks of gradients of a convolution share a multiprocessor, faster on an H200 than three without spills
SPILLED = {"conv_vjp": 52}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_the_kernels_of_a_piece_compile(public, monkeypatch, name, arch):  # noqa: F811
    """In bfloat16, forward and backward, of the sizes of large models."""
    monkeypatch.setattr(emulation, "compiled", lambda *how: lambda *arguments: None)  # launches are listed, not run
    shapes, options = PIECES[name]
    given = {n: public.bring(np.ones(shape, ml_dtypes.bfloat16)) for n, shape in shapes.items()}
    whole = {"cross_entropy": "labels", "embedding": "ids"}.get(name)
    more = {whole: public.bring(np.zeros(4, np.int64))} if whole else {}
    y, pullback = la.vjp(getattr(la.nn, name.split()[0]), **given, **more, **options)
    pullback(public.bring(np.ones(y.shape, y.dtype)))
    check_launched(public.launched, arch, SPILLED)


def check_launched(launched, arch, allowed):
    """Every entry that was launched compiles, and spills no more than the bytes that are allowed by its name."""
    entries = {(file, constants): set() for file, _, constants, *_ in launched}
    for file, entry, constants, *_ in launched:
        entries[file, constants].add(entry)
    assert len(launched) > 1
    for (file, constants), names in entries.items():
        _, log, _ = cuda_compile.compile_source(sources.read(file), dict(constants), arch, cached=False)
        for entry in names:
            assert sum(spilled(log, entry)) <= allowed.get(entry, 0), (file, entry, constants, log)


# each dtype and each kind of decay on each of the three
OF_SELECTIVE = [(("rates", "keys")[(n + m) % 2], dtype, arch)
                for n, dtype in enumerate(("bfloat16", "float32", "float64"))
                for m, arch in enumerate(("sm_80", "sm_90a", "sm_120a"))]  # fmt: skip


@pytest.mark.parametrize(("decays", "dtype", "arch"), OF_SELECTIVE)
@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_the_kernels_of_the_selective_scan_compile(public, monkeypatch, decays, dtype, arch):  # noqa: F811
    """A prompt in segments, its backward, and one token, of the sizes of Mamba; decays of rates, or of keys."""
    monkeypatch.setattr(emulation, "compiled", lambda *how: lambda *arguments: None)
    for T in (1, 1600):
        wide, state = (1, T, 64), (1, T, 16)
        shapes = {"q": state, "k": state, "v": wide, "beta": wide}
        if decays == "rates":
            shapes = {"x": wide, "dt": wide, "A": (64, 16), "B": state, "C": state, "z": wide}
        fn, options = (la.selective_scan, {"dt_softplus": True}) if decays == "rates" else (la.diagonal_longhorn, {})
        narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        given = {n: public.bring(np.ones(shape, np.float32 if n == "A" else narrow)) for n, shape in shapes.items()}
        fn(**given, **options)
        if T > 1:
            out, pullback = la.vjp(fn, **given, **options)
            pullback(public.bring(np.ones(out.shape, out.dtype)))
    names = {"carry", "chain", "selective", "carry_back", "selective_vjp", "sums", "selective_step"}
    assert names <= {entry for _, entry, *_ in public.launched}
    launched = [one for one in public.launched if one[0].startswith("elementwise/")]
    check_launched(launched, arch, {"selective_vjp": 616, "selective_step": 8})  # addresses, once a tile of tokens


@pytest.mark.parametrize(("dtype", "N", "arch"), [
    ("bfloat16", 64, "sm_90a"),
    *((dtype, 16, arch) for dtype in ("bfloat16", "float32", "float64") for arch in ("sm_80", "sm_90a", "sm_120a")),
])  # fmt: skip
@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_the_kernels_of_a_constant_system_compile(public, monkeypatch, dtype, N, arch):  # noqa: F811
    """Forward and backward of S4D."""
    monkeypatch.setattr(emulation, "compiled", lambda *how: lambda *arguments: None)
    arrays = la.testing.sample(la.s4d, np.random.default_rng(0), B=(1,), T=64, V=64, K=N)
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    wide = np.dtype(np.float64 if dtype == "float64" else np.float32)
    kinds = {n: np.result_type(wide, np.complex64) if x.dtype.kind == "c" else wide for n, x in arrays.items()}
    given = {n: public.bring(x.astype((kinds | {"x": narrow})[n])) for n, x in arrays.items()}
    out, pullback = la.vjp(la.s4d, **given)
    pullback(public.bring(np.ones(out.shape, out.dtype)))
    launched = [one for one in public.launched if one[0].startswith("elementwise/")]
    assert {entry for _, entry, *_ in launched} == {"diagonal", "diagonal_vjp"}
    check_launched(launched, arch, {})


LATE_ROWS = [("sm_80", "bfloat16", 128, 32, 1), ("sm_90a", "bfloat16", 128, 32, 1), ("sm_90a", "float32", 255, 127, 1),
             ("sm_120a", "float32", 128, 32, 1), ("sm_80", "bfloat16", 128, 32, 4), ("sm_90a", "bfloat16", 128, 64, 4),
             ("sm_90a", "float32", 128, 64, 4), ("sm_120a", "float16", 64, 16, 2)]  # fmt: skip


@pytest.mark.parametrize(("arch", "dtype", "K", "P", "R"), LATE_ROWS)
@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_the_kernels_of_late_rows_compile(device, monkeypatch, arch, dtype, K, P, R):  # noqa: F811
    """Forward, backward and the final state, of the sizes of Mamba-3, of keys of an odd width, of several rows."""
    monkeypatch.setattr(emulation, "compiled", lambda *how: lambda *arguments: None)
    late_rows(device, LateRows(B=(1,), T=70, K=K, V=K, P=P, dtype=np.dtype(dtype), R=R))
    names = {"angle_sums", "before_parts", "late_rows", "late_rows_vjp", "after_parts", "angle_sums_vjp", "settle"}
    if R > 1:
        rows_of_tokens(device, RowsOfTokens(T=70, V=K, R=R, dtype=np.dtype(dtype)))
        names |= {"read_out", "read_out_vjp"}
    assert names <= {entry for _, entry, *_ in device.launched}
    own = [one for one in device.launched if one[0] in (trapezoid.SOURCE, ranks.SOURCE)]
    check_launched(own, arch, {"late_rows": 12 if K == 255 else 0})  # of four pieces a lane
