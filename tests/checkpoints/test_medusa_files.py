"""Files of Medusa and Hydra heads: as PyTorch modules of the published form write them, round trips, errors."""

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
from eagle_jax.models.medusa import MedusaHeads, init_medusa_params
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
def test_round_trip_is_the_identity(kind, tmp_path):
    config, params = saved(tmp_path, kind, layers=2)
    again, loaded = load_medusa_checkpoint(tmp_path, TARGET)
    assert again == config
    assert_same(loaded, params)


def test_the_default_tree_is_medusas(tmp_path):
    target = tiny_target(16)
    config = MedusaConfig("medusa", 16, 16, num_heads=3)
    save_medusa_checkpoint(config, init_medusa_params(config, jax.random.key(0)), tmp_path, "float32")
    edit_json(tmp_path / "config.json", medusa_num_heads=2)
    with pytest.warns(UserWarning, match="medusa_num_heads is 2"):
        tree = eagle_jax.load_medusa(tmp_path, target).tree
    assert (tree.num_nodes, tree.depth, tree.top_k) == (61, 3, 10)


@pytest.mark.parametrize(("kind", "layers"), [("medusa", 2), ("hydra", 2), ("hydra++", 1), ("hydra++", 4)])
def test_heads_of_pytorch(kind, layers, tmp_path):
    """The published form, written once more: sequences of residual blocks and an lm_head.

    Hydra's authors repeat one block (a list times a number), so that those behind the first share their weights, which
    the file has under every name; in Hydra++ a dropout stands before each and before the lm_head.
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
    if prefixed:  # the decoder layer has its parity where decoders have it; here it has to be there
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


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize(("part", "named", "stored"), [("heads", 1, 3), ("heads", 5, 3), ("layers", 1, 2)])
def test_the_file_decides_the_number_of_heads_and_blocks(kind, part, named, stored, tmp_path):
    config, params = saved(tmp_path, kind, layers=2, **{f"{kind}_num_{part}": named})
    message = rf"{kind}_num_{part} is {named}, and {kind}_lm_head\.safetensors holds {stored}: uses the file's"
    with pytest.warns(UserWarning, match=message):
        again, loaded = load_medusa_checkpoint(tmp_path, TARGET)
    assert again == config
    assert_same(loaded, params)


@pytest.mark.parametrize(("kind", "stated"), [("hydra++", "mlp"), ("hydra", "prefix-mlp")])
def test_the_file_decides_on_hydras_prefix_layer(kind, stated, tmp_path):
    config, _ = saved(tmp_path, kind, hydra_head_arch=stated)
    with pytest.warns(UserWarning, match=f"hydra_head_arch is '{stated}' and the file holds .*: uses the file's"):
        assert load_medusa_checkpoint(tmp_path, TARGET)[0] == config


@pytest.mark.parametrize(
    ("kind", "changes"), [("medusa", {"vocab_size": 12, "hidden_size": 16}), ("hydra", {"hydra_head_arch": None})]
)
def test_neutral_values_are_read_without_a_warning(kind, changes, tmp_path):
    saved(tmp_path, kind, **changes)
    with quiet():
        load_medusa_checkpoint(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("medusa", {"medusa_num_heads": 0}, "medusa_num_heads must be an integer from 1 to 64, got 0"),
        ("medusa", {"medusa_num_heads": None}, "medusa_num_heads must be an integer from 1 to 64, got None"),
        ("medusa", {"medusa_num_layers": "two"}, "medusa_num_layers must be an integer from 1 to 64, got 'two'"),
        ("medusa", {"medusa_num_layers": 10**6}, "medusa_num_layers must be an integer from 1 to 64, got 1000000"),
        ("medusa", {"medusa_num_heads": ...}, "must hold medusa_num_heads or hydra_num_heads"),
        ("medusa", {"is_causal": False}, "is_causal must be true or absent, got False"),
        ("medusa", {"vocab_size": 54}, "vocab_size must be 12, as the target's, got 54"),
        ("hydra", {"hidden_size": 32}, "hidden_size must be 16, as the target's, got 32"),
        ("hydra", {"hidden_size": "16"}, "hidden_size must be an integer from 1 to 2147483647, got '16'"),
        ("hydra", {"hydra_head_arch": "eagle-attn"}, "hydra_head_arch must be mlp or prefix-mlp, got 'eagle-attn'"),
        ("hydra", {"hydra_head_arch": 3}, "hydra_head_arch must be a string, got 3"),
        ("hydra", {"grounded_heads": False}, "grounded_heads must be true for Hydra, got False"),
    ],
)
def test_a_value_of_the_config_is_named(kind, changes, message, tmp_path):
    saved(tmp_path, kind, **changes)
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        load_medusa_checkpoint(tmp_path, TARGET)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    config, params = saved(tmp_path, layers=2)
    for other, sizes in (
        (dataclasses.replace(TARGET, vocab_size=13), "16 wide with 13 tokens"),
        (dataclasses.replace(TARGET, hidden_size=18), "18 wide with 12 tokens"),
    ):
        message = rf"not the medusa heads of a model that is {sizes}; take heads that were trained for this target, or"
        with pytest.raises(CheckpointError, match=message):
            load_medusa_checkpoint(tmp_path, other)
    weights = tmp_path / "medusa_lm_head.safetensors"
    edit_tensors(weights, lambda tensors: tensors.update({"9.0.linear.weight": tensors.pop("2.0.linear.weight")}))
    with pytest.raises(CheckpointError, match=r"missing \(1\): 2\.0\.linear\.weight\n.*unexpected \(1\): 9\.0\.linear"):
        load_medusa_checkpoint(tmp_path, TARGET)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"no weights; expected medusa_lm_head\.safetensors or medusa_lm"):
        load_medusa_checkpoint(tmp_path, TARGET)
    fewer = dataclasses.replace(config, num_heads=2)
    with pytest.raises(CheckpointError, match=r"heads' parameters:\n  unexpected \(5\): heads_2_blocks_0/linear/bias"):
        save_medusa_checkpoint(fewer, params, tmp_path / "new")
    assert not (tmp_path / "new").exists()
