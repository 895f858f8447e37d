"""Tests files of Medusa and Hydra heads: the published form, round trips, errors."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

import eagle_jax
from eagle_jax.checkpoints import CheckpointError, load_medusa_checkpoint, save_medusa_checkpoint
from eagle_jax.config import MedusaConfig
from eagle_jax.models import MedusaHeads, init_medusa_params
from tests.checkpoints.common import assert_same, edit_json, edit_tensors, quiet
from tests.models import tiny_target

TARGET = tiny_target().config


def saved(path, kind="medusa", layers=1, **changes):
    """Saves three random heads, "hydra++" with a prefix layer, and edits their config.json."""
    prefix = TARGET.one_layer(tie_word_embeddings=False) if kind == "hydra++" else None
    config = MedusaConfig(kind.removesuffix("++"), TARGET.hidden_size, TARGET.vocab_size, 3, layers, prefix)
    params = init_medusa_params(config, jax.random.key(0))
    save_medusa_checkpoint(config, params, path, "float32")
    edit_json(path / "config.json", **changes)
    return config, params


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++"])
def test_saved_heads_load_as_the_same_heads(kind, tmp_path):
    config, params = saved(tmp_path, kind, layers=2)
    with quiet():
        again, loaded = load_medusa_checkpoint(tmp_path, TARGET)
    assert again == config
    assert_same(loaded, params)


@pytest.mark.filterwarnings("ignore:.*medusa_num_heads is 2")
def test_the_number_of_heads_comes_from_the_tensors(tmp_path):
    """Published config.json files name fewer heads than the file has."""
    _, params = saved(tmp_path, medusa_num_heads=2)
    drafter = eagle_jax.load_medusa(tmp_path, tiny_target())
    assert_same(load_medusa_checkpoint(tmp_path, TARGET)[1], params)
    assert (drafter.tree.num_nodes, drafter.tree.depth) == (61, 3)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("medusa", {"medusa_num_heads": 2}, "medusa_num_heads is 2, but the file has 3"),
        ("medusa", {"medusa_num_layers": 7}, "medusa_num_layers is 7, but the file has 1"),
        ("hydra", {"hydra_num_heads": 5}, "hydra_num_heads is 5, but the file has 3"),
        ("hydra", {"hydra_head_arch": "prefix-mlp"}, "hydra_head_arch is 'prefix-mlp', but the file has 'mlp'"),
        ("hydra++", {"hydra_head_arch": "mlp"}, "hydra_head_arch is 'mlp', but the file has 'prefix-mlp'"),
    ],
)
def test_a_config_that_contradicts_the_file_causes_a_warning(kind, changes, message, tmp_path):
    config, _ = saved(tmp_path, kind, **changes)
    with pytest.warns(UserWarning, match=f"/config.json: {message}: uses the latter"):
        assert load_medusa_checkpoint(tmp_path, TARGET)[0] == config


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("hydra", {"hydra_head_arch": "eagle-attn"}, "hydra_head_arch must be mlp or prefix-mlp, got 'eagle-attn'"),
        ("hydra", {"grounded_heads": False}, "grounded_heads must be true or absent, got False"),
        ("medusa", {"is_causal": False}, "is_causal must be true or absent, got False"),
        ("medusa", {"vocab_size": 13}, "vocab_size must be 12, as the target's, got 13"),
        ("medusa", {"hidden_size": 32}, "hidden_size must be 16, as the target's, got 32"),
        ("medusa", {"medusa_num_heads": "3"}, "medusa_num_heads must be an integer from 1 to .*, got '3'"),
    ],
)
def test_an_option_that_changes_the_drafts_is_an_error(kind, changes, message, tmp_path):
    saved(tmp_path, kind, **changes)
    with pytest.raises(CheckpointError, match=f"/config.json: {message}"):
        load_medusa_checkpoint(tmp_path, TARGET)


@pytest.mark.parametrize(("kind", "layers"), [("medusa", 2), ("hydra", 2), ("hydra++", 1), ("hydra++", 4)])
def test_heads_compute_the_outputs_of_pytorch(kind, layers, tmp_path):
    """The published modules: sequences of residual blocks and an lm_head.

    Hydra's authors repeat one block, so the later blocks share weights, stored under every name. In Hydra++ a dropout
    precedes each block and the lm_head.
    """
    torch = pytest.importorskip("torch", reason="needs torch: pip install eagle-jax[test]")
    nn, size, vocab, count = torch.nn, 16, 12, 3
    torch.manual_seed(0)
    family, prefixed = kind.removesuffix("++"), kind == "hydra++"

    class Block(nn.Module):
        def __init__(self, inputs):
            super().__init__()
            self.linear = nn.Linear(inputs, size)
            self.res_connection = nn.Linear(inputs, size) if inputs != size else nn.Identity()

        def forward(self, x):
            return self.res_connection(x) + nn.functional.silu(self.linear(x))

    before = [nn.Dropout(0.0)] if prefixed else []
    if kind == "medusa":
        model = nn.ModuleList(
            [nn.Sequential(*[Block(size) for _ in range(layers)], nn.Linear(size, vocab, bias=False)) for _ in range(3)]
        )
    else:
        model = nn.Module()
        blocks = [[*before, Block(size * (i + 2)), *[*before, Block(size)] * (layers - 1)] for i in range(count)]
        model.hydra_mlp = nn.ModuleList([nn.Sequential(*part) for part in blocks])
        ends = [nn.Linear(size, vocab) for _ in range(count)]
        model.hydra_lm_head = nn.ModuleList([nn.Sequential(*before, end) if prefixed else end for end in ends])
    tensors = model.state_dict()
    if prefixed:  # other tests compare the decoder layer with PyTorch
        saved(tmp_path / "own", kind)
        found = safetensors.numpy.load_file(tmp_path / "own" / "hydra_lm_head.safetensors")
        tensors |= {name: torch.tensor(found[name]) for name in found if name.startswith("prefix_embeding_layer")}
    torch.save(tensors, tmp_path / f"{family}_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps({f"{family}_num_heads": count, f"{family}_num_layers": layers}))
    config, params = load_medusa_checkpoint(tmp_path, TARGET)
    assert (config.prefix is not None) == prefixed
    for head in range(count):
        x = torch.randn(5, size if kind == "medusa" else size * (head + 2))
        theirs = model[head](x) if kind == "medusa" else model.hydra_lm_head[head](model.hydra_mlp[head](x))
        ours = MedusaHeads(config).apply({"params": params["heads"]}, jax.numpy.asarray(x.numpy()), head)
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)


def test_an_error_names_tensors_that_do_not_fit(tmp_path):
    config, params = saved(tmp_path, layers=2)
    for other, sizes in (
        (dataclasses.replace(TARGET, vocab_size=13), "16 wide with 13 tokens"),
        (dataclasses.replace(TARGET, hidden_size=18), "18 wide with 12 tokens"),
    ):
        message = rf"(?s)not the medusa heads of a model that is {sizes}:.*Take heads that were trained for this target"
        with pytest.raises(CheckpointError, match=message):
            load_medusa_checkpoint(tmp_path, other)
    weights = tmp_path / "medusa_lm_head.safetensors"
    edit_json(tmp_path / "config.json", medusa_num_heads=...)
    with pytest.raises(CheckpointError, match=r"config\.json must hold medusa_num_heads or hydra_num_heads"):
        load_medusa_checkpoint(tmp_path, TARGET)
    edit_json(tmp_path / "config.json", medusa_num_heads=3)
    edit_tensors(weights, lambda tensors: tensors.update({"9.0.linear.weight": tensors.pop("2.0.linear.weight")}))
    with pytest.raises(CheckpointError, match=r"missing .*: 2\.0\.linear\.weight; .*\n.*unexpected .*: 9\.0\.linear"):
        load_medusa_checkpoint(tmp_path, TARGET)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"must hold medusa_lm_head\.safetensors or medusa_lm_head\.pt, got"):
        load_medusa_checkpoint(tmp_path, TARGET)
    fewer = dataclasses.replace(config, num_heads=2)
    with pytest.raises(CheckpointError, match=r"heads' parameters:\n  unexpected \(5\): heads_2_blocks_0/linear/bias"):
        save_medusa_checkpoint(fewer, params, tmp_path / "new")
    assert not (tmp_path / "new").exists()
