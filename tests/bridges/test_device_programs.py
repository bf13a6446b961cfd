"""Which buffer each pointer of a recorded program is: launches and buffers that only record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import linattn_np as la
from linattn_np.bridges import device_programs
from linattn_np.bridges.device_programs import DeviceProgram, Recorded
from linattn_np.bridges.programs import SavedArrays, Signature
from linattn_np.bridges.shapes import Abstract

X, S = Abstract((1, 4, 2, 8), np.dtype(np.float32)), Abstract((3, 8, 8), np.dtype(np.float32))


class Launches:
    """A sequence that notes the pointers that it is launched on."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def launch(self, pointers: list[Any], stream: int) -> None:
        self.seen.append((pointers, stream))


@pytest.fixture
def program() -> DeviceProgram:
    """linear_attention(q, k, v) -> (out, state): the state and an extra array are residuals.

    forward allocates [state, out, scratch], saving [out, extra, state, scratch], backward [dv, scratch, dq, dk].
    """
    signature = Signature(la.linear_attention.spec, ("q", "k", "v"), None, (("return_state", True),))
    found = DeviceProgram(signature, (X,) * 3)
    forward = Recorded(Launches(), (1, 0, 2), (S,))
    saving = Recorded(Launches(), (0, 2, 1, 4), (S,))  # outputs: out, state, extra, key, scratch
    backward = Recorded(Launches(), (2, 3, 0, 1), (S,))  # outputs: dq, dk, dv, scratch
    found.__dict__["recorded"] = {"forward": forward, "saving": saving, "backward": backward}
    found.__dict__["_saved"] = SavedArrays(None, (1,), (S,), None)
    found.device = 0
    return found


def launched(program: DeviceProgram, kind: str) -> Any:
    (found,) = program.recorded[kind].sequence.seen
    return found


def test_outputs_and_inputs_of_each_function(program):
    assert len(program.outputs("saving")) == 4  # out, state, extra, key
    program.launch("forward", ["out", "state", "scratch"], ["q", "k", "v"], 7)
    assert launched(program, "forward") == (["q", "k", "v", "state", "out", "scratch"], 7)
    program.launch("saving", ["out", "state", "extra", "key", "scratch"], ["q", "k", "v"], 7)
    assert launched(program, "saving") == (["q", "k", "v", "out", "extra", "state", "scratch"], 7)
    given = ["q", "k", "v", "state", "extra", "key", "dout", "dstate"]
    program.launch("backward", ["dq", "dk", "dv", "scratch"], given, 7)
    read = ["q", "k", "v", "state", "extra", "dout", "dstate"]
    assert launched(program, "backward") == ([*read, "dv", "scratch", "dq", "dk"], 7)


def test_a_pullback_is_both(program):
    """Its scratch: out, state, extra, the scratch of saving, that of backward."""
    memory = ["out", "state", "extra", "scratch", "more"]
    assert len(program.scratch("pullback")) == len(memory)
    program.launch("pullback", ["dq", "dk", "dv", *memory], ["q", "k", "v", "dout", "dstate"], 7)
    assert launched(program, "saving")[0] == ["q", "k", "v", "out", "extra", "state", "scratch"]
    assert launched(program, "backward")[0] == ["q", "k", "v", "state", "extra", "dout", "dstate", "dv", "more", "dq",
                                                "dk"]  # fmt: skip


def test_a_program_on_another_device_is_not_launched(program, monkeypatch):
    """Its residuals are not those of the launches: CuPy computes."""
    calls: list[Any] = []
    monkeypatch.setattr(device_programs, "pointer", lambda x: x)
    monkeypatch.setattr(device_programs, "view", lambda x, device: (x, device))
    monkeypatch.setattr(DeviceProgram, "forward", lambda self, out, given: calls.append((self.saved, out)))

    class Place:
        def __enter__(self) -> None:
            calls.append("entered")

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(device_programs, "current", lambda device, stream: Place())
    device_programs.execute(program, "forward", (0, 5), ["out", "state", "scratch"], ["q", "k", "v"])
    assert launched(program, "forward")[1] == 5
    assert not calls
    device_programs.execute(program, "forward", (1, 5), ["out"], ["q", "k", "v"])
    assert calls == ["entered", (None, [("out", 1)])]
