"""Ranks, threads or processes of MPI, share the batches of a step: the run has the bits of one rank."""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import linattn_np as la
from linattn_np.distributed import in_threads
from linattn_np.experiments import train
from linattn_np.runtime.cuda import launch
from tests.distributed.test_processes import MPIEXEC, ROOT, environment, mpi

MODEL = la.layers.language_model(16, D=16, layers=1, mixers="gated_delta_rule", heads=2, hidden=12)
BATCH = la.train.Tokens([np.tile([1, 5, 2, 9, 3, 7], 50)]).batches(2, 11)
OPTIMISERS = {"adamw": la.train.AdamW(), "muon": la.train.Muon()}


def fit(run, accumulate=4, steps=3, **options):
    rate = la.train.cosine(1e-2, 8)
    return la.train.fit(MODEL.loss, run, BATCH, steps, rate, accumulate=accumulate, bar=False, **options)


def assert_same_bits(run, other):
    assert run.losses == other.losses
    assert (run.step, run.position) == (other.step, other.position)
    assert run.params.vector.tobytes() == other.params.vector.tobytes()
    for kind, moment in run.moments.items():
        assert moment.vector.tobytes() == other.moments[kind].vector.tobytes()


@pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_bits_of_one(size, optimiser):
    one = fit(la.train.Run.start(MODEL.loss, optimiser))
    for run in in_threads(size, lambda comm: fit(la.train.Run.start(MODEL.loss, optimiser), comm=comm), timeout=30.0):
        assert_same_bits(run, one)


def test_three_ranks_have_the_same_run_and_the_mean_gradient():
    one = fit(la.train.Run.start(MODEL.loss), 6, 1)
    each = in_threads(3, lambda comm: fit(la.train.Run.start(MODEL.loss), 6, 1, comm=comm), timeout=30.0)
    for run in each:
        assert_same_bits(run, each[0])
    assert np.allclose(each[0].moments["m"].vector, one.moments["m"].vector, rtol=1e-4, atol=1e-8)
    assert np.allclose(each[0].losses, one.losses, rtol=1e-6)


def test_rank_0_alone_saves_and_all_resume_from_its_file(tmp_path):
    def work(comm):
        fit(la.train.Run.start(MODEL.loss), steps=2, save=tmp_path / str(comm.rank), comm=comm)

    in_threads(2, work, timeout=30.0)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    for run in in_threads(2, lambda comm: fit(la.train.Run.load(tmp_path / "0"), comm=comm), timeout=30.0):
        assert_same_bits(run, fit(la.train.Run.start(MODEL.loss)))


def test_ranks_with_other_runs_are_an_error():
    with pytest.raises(ValueError, match="fit: the runs of the ranks differ, expected the same seed, or the same file"):
        in_threads(2, lambda comm: fit(la.train.Run.start(MODEL.loss, seed=comm.rank), comm=comm), timeout=30.0)


@pytest.mark.parametrize("accumulate", [3, 1])
def test_batches_that_ranks_cannot_share_are_an_error(accumulate):
    message = f"fit: accumulate is {accumulate}, expected a multiple of the 2 ranks"
    with pytest.raises(ValueError, match=message):
        in_threads(2, lambda comm: fit(la.train.Run.start(MODEL.loss), accumulate, comm=comm), timeout=30.0)


@pytest.mark.parametrize("accumulate", [0, -2, 1.5, True])
def test_a_number_of_batches_that_is_none_is_an_error(accumulate):
    with pytest.raises(ValueError, match=r"fit: accumulate is .*, expected a whole number from 1"):
        fit(la.train.Run.start(MODEL.loss), accumulate)


def test_a_gradient_that_is_not_finite_ends_all_ranks():
    def work(comm):
        run = la.train.Run.start(MODEL.loss)
        run.params.arrays["norm/weight"][0] = np.nan
        with pytest.raises(FloatingPointError, match="step 0"):
            fit(run, comm=comm)

    in_threads(2, work, timeout=30.0)


@mpi
def test_the_command_trains_on_ranks_of_mpi(tmp_path):
    text = tmp_path / "text"
    text.write_text("the delta rule erases what a key held. " * 40)
    more = f"{text} --layers 1 --width 16 --heads 2 --batch 2 --length 16 --steps 3 --accumulate 2".split()
    for out, front, own in (("one", [], []), ("two", [str(MPIEXEC), "-n", "2"], ["--mpi"])):
        command = [*front, sys.executable, "-m", "linattn_np", "train", *more, *own, "--out", str(tmp_path / out)]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("validation loss") == 1
    one, two = (la.train.Run.load(tmp_path / out / "run.safetensors") for out in ("one", "two"))
    assert_same_bits(one, two)


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs of a machine: those in use, in order; a communicator of NCCL is its arguments."""
    used = []
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDeviceCount=lambda: 2), Device=lambda n: SimpleNamespace(use=lambda: used.append(n))
    )
    monkeypatch.setattr(launch, "cupy", lambda: SimpleNamespace(cuda=cuda, asarray=np.asarray))
    monkeypatch.setattr(train.nccl, "unique_id", lambda: "id")
    monkeypatch.setattr(la.distributed, "NCCL", lambda *given: given)
    return used


@pytest.mark.parametrize(
    ("local", "on_machine", "device", "gpu"),
    [(1, 2, "cuda", 1), (2, 3, "cuda", 0), (1, 2, "cpu", None)],
    ids=["a GPU each", "more ranks than GPUs", "CPUs"],
)
def test_ranks_of_mpi_have_a_gpu_each(monkeypatch, gpus, local, on_machine, device, gpu):
    """Rank 3 of 4. Ranks that share a GPU exchange through the host: NCCL refuses them."""
    machine = SimpleNamespace(Get_rank=lambda: local, Get_size=lambda: on_machine)
    world = SimpleNamespace(
        Get_rank=lambda: 3,
        Get_size=lambda: 4,
        Split_type=lambda kind: machine,
        allreduce=lambda x, how: x,
        bcast=lambda x: "id of rank 0" if x is None else x,
    )
    mpi4py = ModuleType("mpi4py")
    mpi4py.MPI = SimpleNamespace(COMM_WORLD=world, COMM_TYPE_SHARED=0, LAND=0)
    monkeypatch.setitem(sys.modules, "mpi4py", mpi4py)
    comm = train.ranks(True, device)
    assert gpus == ([] if gpu is None else [gpu])
    if gpu == 1:
        assert comm == (3, 4, "id of rank 0")
    else:
        assert (type(comm), comm.rank, comm.size) == (la.distributed.MPI, 3, 4)


class Thread(threading.Thread):
    """A process of multiprocessing, as a thread."""

    exitcode = None

    def run(self):
        try:
            self._target(*self._args)
        except SystemExit as ended:
            self.exitcode = ended.code


def command(tmp_path, *more):
    (tmp_path / "text").write_text("the delta rule erases what a key held. " * 40)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    sizes = f"{tmp_path / 'text'} --layers 1 --width 16 --heads 2 --batch 2 --length 16 --steps 3 --accumulate 2"
    return parser.parse_args([*sizes.split(), *more])


def test_the_command_trains_on_gpus_of_a_machine(tmp_path, monkeypatch, gpus, capsys):
    """Its processes are threads, its GPUs a CPU; the run is that of one."""
    comms = la.distributed.Threads.of(2, timeout=60.0)
    assert train.run(command(tmp_path, "--out", str(tmp_path / "one"))) == 0
    monkeypatch.setattr(la.distributed, "NCCL", lambda rank, size, unique_id: comms[rank])
    monkeypatch.setattr(la.train.Run, "to", lambda self, device: self)
    monkeypatch.setattr(train.multiprocessing, "get_context", lambda kind: SimpleNamespace(Process=Thread))
    assert train.run(command(tmp_path, "--out", str(tmp_path / "two"), "--gpus", "2")) == 0
    assert sorted(gpus) == [0, 1]
    assert_same_bits(*(la.train.Run.load(tmp_path / out / "run.safetensors") for out in ("one", "two")))
    for more in (["--gpus", "3"], ["--gpus", "2", "--mpi"]):
        assert train.run(command(tmp_path, *more)) == 2
        told = f"linattn train: --gpus is {more[1]}, expected at most 2, the GPUs of this machine, and no --mpi"
        assert told in capsys.readouterr().err


def test_a_rank_that_is_gone_ends_the_command(tmp_path, capsys):
    class Gone:
        rank, size = 0, 2

        def all_gather(self, x):
            raise la.distributed.RankError("distributed: rank 0 waited 1 s for the other ranks")

    assert train.on_rank(command(tmp_path, "--out", str(tmp_path / "out")), Gone()) == 1
    assert "waited 1 s for the other ranks; linattn train --resume" in capsys.readouterr().err
