"""Files of arrays: every dtype, other programs' files, damaged files."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from linattn_np.train.safetensors import KINDS, load, save


def every_dtype():
    rng = np.random.default_rng(0)
    return {f"x/{name}": (4 * rng.random((3, 5))).astype(kind) for name, kind in KINDS.items()}


def test_every_dtype_comes_back_to_the_bit(tmp_path):
    given = every_dtype() | {"scalar": np.float32(2.5), "empty": np.zeros((0, 3)), "apart": np.arange(12.0)[::3]}
    save(tmp_path / "x.safetensors", given, {"of": "words é"})
    found, about = load(tmp_path / "x.safetensors")
    assert about == {"of": "words é"}
    assert found.keys() == given.keys()
    for n, x in given.items():
        assert found[n].dtype == x.dtype
        assert found[n].shape == x.shape
        assert found[n].tobytes() == np.ascontiguousarray(x).tobytes(), n
        assert not found[n].flags.writeable


def test_big_endian_arrays_are_written_as_little_endian(tmp_path):
    save(tmp_path / "x", {"x": np.arange(3, dtype=">f4")})
    assert load(tmp_path / "x")[0]["x"].tolist() == [0, 1, 2]


def test_other_programs_read_and_write_the_same(tmp_path):
    other = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    given = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}
    other.save_file(given, tmp_path / "theirs", {"k": "v"})
    found, about = load(tmp_path / "theirs")
    assert about == {"k": "v"}
    assert found["b"].dtype == ml_dtypes.bfloat16
    assert found["b"].tolist() == [1.5, -2.0]
    save(tmp_path / "ours", found, about)
    back = other.load_file(tmp_path / "ours")
    assert all(torch.equal(back[n], x) for n, x in given.items())


def test_what_is_no_such_file_is_named(tmp_path):
    path = tmp_path / "x"
    save(path, {"x": np.arange(100.0)})
    whole = path.read_bytes()
    for text in (b"", b"abc", b"\xff" * 40, whole[:60], (3).to_bytes(8, "little") + b"[1]", whole[:-8]):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=r"x( is no safetensors file|: x has the bytes)"):
            load(path)
    with pytest.raises(TypeError, match="save: x has dtype complex128"):
        save(path, {"x": np.zeros(2, complex)})
    with pytest.raises(TypeError, match="save: n of about is no text"):
        save(path, {}, {"n": 1})


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x"
    save(path, {"x": np.arange(3.0)})
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(path, {"x": np.zeros(9)})
    assert load(path)[0]["x"].tolist() == [0, 1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
