"""Ranks that are processes: MPI by mpi4py, torch.distributed by gloo. Bits are those of one rank."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from linattn_np.distributed import in_threads
from tests.distributed.worker import computed

ROOT = Path(__file__).parents[2]
BESIDE = Path(sys.executable).parent / "mpiexec"
MPIEXEC = BESIDE if BESIDE.exists() else shutil.which("mpiexec")
AS_ROOT = {  # Open MPI: as root, and more ranks than cores; other libraries do not read these
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}  # fmt: skip
HAS_MPI = MPIEXEC is not None and importlib.util.find_spec("mpi4py") is not None
mpi = pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec")
torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


def environment():
    return os.environ | AS_ROOT | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}


def by_mpi(size, folder, task):
    command = [str(MPIEXEC), "-n", str(size), sys.executable, "-m", "tests.distributed.worker", "mpi", folder, task]
    return [subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)]


def by_torch(size, folder, task):
    command = [sys.executable, "-m", "tests.distributed.worker", "torch"]
    run = functools.partial(
        subprocess.Popen, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    each = [run([*command, str(rank), str(size), folder, task]) for rank in range(size)]
    if task == "silent":
        each[0].wait(200)
        each[1].kill()
    told = [one.communicate(timeout=200) for one in each]
    return [subprocess.CompletedProcess(one.args, one.returncode, *text) for one, text in zip(each, told, strict=True)]


@pytest.fixture(scope="module")
def one_rank():
    return in_threads(1, computed)[0]


def joined(folder, size):
    """The results of all ranks, put together along the axis of tokens."""
    ranks = [np.load(Path(folder) / f"{rank}.npz") for rank in range(size)]
    found = {}
    for name in ranks[0].files:
        each = [rank[name] for rank in ranks]
        if " end " in name:
            assert all(np.array_equal(x, each[0]) for x in each)
            found[name] = each[0]
        else:
            found[name] = np.concatenate(each, axis=1)
    return found


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        assert np.array_equal(x, wanted[name]), name


@mpi
@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_of_mpi_compute_the_bits_of_one(size, tmp_path, one_rank):
    (done,) = by_mpi(size, str(tmp_path), "compute")
    assert done.returncode == 0, done.stderr
    assert_same_bits(joined(tmp_path, size), one_rank)


@torch
def test_processes_of_torch_compute_the_bits_of_one(tmp_path, one_rank):
    for done in by_torch(2, str(tmp_path), "compute"):
        assert done.returncode == 0, done.stderr
    assert_same_bits(joined(tmp_path, 2), one_rank)


@mpi
def test_a_silent_process_of_mpi_is_an_error_after_the_time_limit(tmp_path):
    (done,) = by_mpi(2, str(tmp_path), "silent")
    assert "RankError distributed: rank 0 waited 0.5 s for the other ranks" in done.stdout


@torch
@pytest.mark.parametrize("task", ["silent", "gone"])
def test_a_process_of_torch_that_does_not_answer_is_an_error(task, tmp_path):
    assert "RankError distributed: rank 0: " in by_torch(2, str(tmp_path), task)[0].stdout
