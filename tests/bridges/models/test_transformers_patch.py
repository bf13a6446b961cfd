"""The patch of transformers: its replacements, errors and messages."""

from __future__ import annotations

import inspect
import logging
import re
import tomllib
import types
from pathlib import Path

import pytest

from tests.bridges.models.tiny_models import MODELS, build

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23", reason="the extra `transformers`")

from transformers.utils import TransformersKwargs  # noqa: E402

from linattn_np.bridges import causal_conv1d, fla, mamba_ssm, modules, packed  # noqa: E402
from linattn_np.bridges import transformers as bridge  # noqa: E402
from linattn_np.bridges.transformers import FUNCTIONS, METHODS, patch_transformers, unpatch_transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
VERSION = re.escape(transformers.__version__)
ADAPTERS = [
    *fla.FUNCTIONS.values(), mamba_ssm.mamba_chunk_scan_combined, mamba_ssm.mamba_split_conv1d_scan_combined,
    mamba_ssm.selective_state_update, mamba_ssm.selective_scan_fn, mamba_ssm.mamba_inner_fn,
    causal_conv1d.causal_conv1d_fn, causal_conv1d.causal_conv1d_update,
    modules.causal_conv1d, modules.rms_norm_gated, modules.FusedRMSNormGated(4).forward,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet_and_unpatched():
    transformers.utils.logging.set_verbosity_error()
    yield
    unpatch_transformers()


def tokens(*shape):
    return torch.randint(2, 61, shape, generator=torch.Generator().manual_seed(0))


def replaced():
    """(owner, name, its label in messages) of every function and method that computes here."""
    with patch_transformers() as patch:
        found = [(owner, name) for owner, name, _ in patch.replaced]
    functions = [(owner, name, name) for owner, name in found if isinstance(owner, types.ModuleType)]
    methods = [(owner, name, owner.__name__) for owner, name in found if f"{owner.__name__}.{name}" in METHODS]
    return functions + methods


@pytest.mark.parametrize(("owner", "name", "label"), replaced(), ids=lambda x: getattr(x, "__name__", x))
def test_a_replacement_refuses_a_keyword_with_a_value_that_it_does_not_know(owner, name, label):
    said = rf"^{label}: linattn_np does not know the argument tree_mask of transformers {VERSION}, expected None"
    args = (torch.ones(1),) if isinstance(owner, types.ModuleType) else (None, torch.ones(1))
    with patch_transformers():
        for value in (torch.ones(1), True, 0, "causal"):
            with pytest.raises(TypeError, match=said):
                getattr(owner, name)(*args, tree_mask=value)


@pytest.mark.parametrize("value", [None, False])
def test_an_unknown_keyword_without_a_value_is_let_through(value):
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    layer = next(m for m in build("minimax").modules() if isinstance(m, MiniMaxLightningAttention))
    q, g, x = torch.randn(1, 5, 2, 8), -torch.rand(1, 5, 2), torch.randn(1, 5, 32)
    with patch_transformers():
        out = qwen.torch_chunk_gated_delta_rule(q, q, q, g, -g)[0]
        assert torch.equal(qwen.torch_chunk_gated_delta_rule(q, q, q, g, -g, tree_mask=value)[0], out)
        assert torch.equal(layer(x, None, None, tree_mask=value)[0], layer(x, None, None)[0])


@pytest.mark.parametrize("fn", ADAPTERS, ids=lambda fn: fn.__qualname__)
def test_an_adapter_refuses_a_keyword_that_it_does_not_know(fn):
    required = [n for n, p in inspect.signature(fn).parameters.items()
                if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]  # fmt: skip
    with pytest.raises((TypeError, ValueError), match="tree_mask"):
        fn(**dict.fromkeys(required, torch.ones(1)), tree_mask=torch.ones(1))


def test_every_keyword_of_layers_in_transformers_is_computed_or_known_to_have_no_effect():
    assert set(TransformersKwargs.__annotations__) <= {*bridge.WITHOUT_EFFECT, packed.OFFSETS, packed.NUMBERS}


def test_arguments_by_position_are_those_of_the_function_that_is_replaced():
    """The fourth of causal_conv1d_fn is the activation there, and seq_idx in the package causal-conv1d."""
    from transformers.models.lfm2 import modeling_lfm2 as lfm

    x, w = torch.randn(2, 3, 7), torch.randn(3, 4)
    expected = lfm.causal_conv1d_fn(x, w, None, "silu")
    with patch_transformers():
        torch.testing.assert_close(lfm.causal_conv1d_fn(x, w, None, "silu"), expected)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_layer_takes_its_cache_by_every_name(name):
    from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxLightningAttention

    layer = next(m for m in build("minimax").modules() if isinstance(m, MiniMaxLightningAttention))
    x, cache = torch.randn(2, 6, 32), MiniMaxCache()
    with patch_transformers(), torch.no_grad():
        whole = layer(x, None, None)[0]
        parts = [layer(part, None, None, **{name: cache})[0] for part in x.split([4, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_everything_is_put_back_and_instances_follow(caplog):
    from transformers.models.minimax import modeling_minimax as minimax
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    def seen():
        model = qwen.Qwen3NextModel.forward
        return qwen.torch_chunk_gated_delta_rule, minimax.MiniMaxLightningAttention.forward, model

    before, model, ids = seen(), build("qwen3_next"), tokens(1, 9)
    plain = model(ids).logits
    with caplog.at_level(logging.INFO, logger="linattn_np"):
        patch_transformers(["qwen3_next", "minimax"])
    assert [r.getMessage() for r in caplog.records] == [
        f"linattn_np computes the linear attention of transformers {transformers.__version__}: minimax, qwen3_next"
    ]
    assert not torch.equal(model(ids).logits, plain)  # built before
    assert all(a is not b for a, b in zip(seen(), before, strict=True))
    unpatch_transformers()
    unpatch_transformers()
    assert seen() == before
    assert torch.equal(model(ids).logits, plain)
    with patch_transformers(["qwen3_next"]):
        assert seen()[0] is not before[0]
    assert seen() == before


def test_the_table_names_what_transformers_has():
    """Every function and class of the table is found in some model, every model has one, and each is tested."""
    patch = patch_transformers()
    assert {*patch.by_model()} == {*bridge.MODELS} == {*MODELS}
    names = {(owner.__name__, name) for owner, name, _ in patch.replaced}
    assert {name for _, name in names} == {*FUNCTIONS, "forward", "_rnn_scan"}
    assert METHODS.keys() <= {f"{owner}.{name}" for owner, name in names}


def test_a_version_without_the_functions(monkeypatch):
    monkeypatch.setattr(bridge, "FUNCTIONS", {})
    monkeypatch.setattr(bridge, "METHODS", {})
    with pytest.raises(RuntimeError, match=r"expected a version >= 5\.23"):
        patch_transformers(["qwen3_next"])


@pytest.mark.parametrize("version", ["5.22.4", "5.25.0.dev0", "6.0.0"])
def test_an_untested_version_is_said(version, monkeypatch, recwarn):
    monkeypatch.setattr(transformers, "__version__", version)
    with patch_transformers(["lfm2"]):
        pass
    assert [str(w.message) for w in recwarn if w.category is UserWarning] == [
        f"patch_transformers: transformers {version} is untested, 5.23 to 5.24 are tested: compare a model's outputs "
        "with and without the patch"]  # fmt: skip


def test_the_extra_installs_the_tested_versions():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    (oldest, newest), extras = bridge.TESTED, project["project"]["optional-dependencies"]
    assert f"transformers>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}" in extras["transformers"]


def test_a_tested_version_is_not_warned_of(recwarn):
    with patch_transformers(["lfm2"]):
        assert not [w for w in recwarn if w.category is UserWarning]


@pytest.mark.parametrize(("models", "kind", "said"), [
    ("qwen3_next", TypeError, "models is the string 'qwen3_next', expected a list of names, ['qwen3_next']"),
    (torch.nn.Linear(1, 1), TypeError, "models is a Linear, expected a list of names such as ['qwen3_next']: the patch "
                                       "is of classes, and models that exist already follow it"),
    (7, TypeError, "models is a int, expected a list of names or None"),
    (["lfm2", "qwen9"], ValueError, "models has 'qwen9', expected names among bailing_hybrid, bamba, "),
    ([torch.nn.Linear], ValueError, "models has <class 'torch.nn.modules.linear.Linear'>, expected names among "),
])  # fmt: skip
def test_what_is_no_list_of_names(models, kind, said):
    with pytest.raises(kind, match="^" + re.escape(f"patch_transformers: {said}")):
        patch_transformers(models)
    assert repr(patch_transformers(["lfm2"])).startswith(f"Patch of transformers {transformers.__version__}, 1 model")


def test_a_second_call_returns_the_patch_or_says_what_it_lacks(caplog):
    with caplog.at_level(logging.INFO, logger="linattn_np"), patch_transformers(["qwen3_next", "minimax"]) as patch:
        caplog.clear()
        assert patch_transformers(["minimax"]) is patch
        assert [r.getMessage() for r in caplog.records] == ["linattn_np: transformers is patched already"]
        with pytest.raises(RuntimeError, match=r"a patch without lfm2 is active, expected unpatch"):
            patch_transformers(["qwen3_next", "lfm2"])
        with pytest.raises(RuntimeError, match="a patch without bailing_hybrid, bamba, "):
            patch_transformers()
    with patch_transformers() as patch:
        assert patch_transformers() is patch


def test_the_representation_lists_what_is_replaced():
    patch = patch_transformers(["minimax", "lfm2"])
    assert (
        repr(patch)
        == f"""Patch of transformers {transformers.__version__}, 2 models
  minimax: MiniMaxLightningAttention.forward, MiniMaxModel.forward
  lfm2: causal_conv1d_fn, causal_conv1d_update, Lfm2Model.forward"""
    )
    patch.undo()
    assert repr(patch) == f"Patch of transformers {transformers.__version__}, 0 models"


def test_a_module_that_cannot_be_imported_leaves_nothing_replaced(monkeypatch):
    from transformers.models.lfm2 import modeling_lfm2 as lfm

    before, find = lfm.causal_conv1d_fn, bridge.import_module

    def import_module(name):
        if "bamba" in name:
            raise ImportError(name)
        return find(name)

    monkeypatch.setattr(bridge, "import_module", import_module)
    with pytest.raises(ImportError):
        patch_transformers(["lfm2", "bamba"])
    assert lfm.causal_conv1d_fn is before


def test_what_the_fallback_does_where_a_tensor_is_not_supported():
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    q = torch.empty(1, 4, 2, 8, device="meta")
    with patch_transformers(["qwen3_next"]):
        out, _ = qwen.torch_chunk_gated_delta_rule(q, q, q, g=q[..., 0], beta=q[..., 0])
    assert out.device.type == "meta"
