"""Files of Medusa and Hydra heads: as PyTorch modules of the published form write them, round trips, refusals."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

import eagle_jax
from eagle_jax import TreeConfig
from eagle_jax.checkpoints import CheckpointError, load_medusa_checkpoint, save_medusa_checkpoint
from eagle_jax.config import MedusaConfig
from eagle_jax.models.medusa import MedusaHeads, init_medusa_params
from tests.models import random_prompts, tiny_medusa, tiny_target

KINDS = ["medusa", "hydra", "hydra++"]


def heads(kind):
    found = tiny_medusa(kind, TreeConfig.chain(2))
    return found.config, found.params


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_loaded_again(kind, tmp_path):
    config, params = heads(kind)
    save_medusa_checkpoint(config, params, tmp_path, "float32")
    again, loaded = load_medusa_checkpoint(tmp_path, tiny_target().config)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    method = eagle_jax.load_medusa(tmp_path, tiny_target(), TreeConfig.static([-1, -1, 0, 2]))
    prompts = random_prompts([4, 9], 12)
    plain = eagle_jax.generate(tiny_target(), None, prompts, max_new_tokens=12)
    assert eagle_jax.generate(tiny_target(), method, prompts, max_new_tokens=12).tokens == plain.tokens


def test_the_default_tree_is_medusas(tmp_path):
    vocab = 16
    target = tiny_target(vocab)
    config = MedusaConfig("medusa", 16, vocab, num_heads=3)
    save_medusa_checkpoint(config, init_medusa_params(config, jax.random.key(0)), tmp_path, "float32")
    method = eagle_jax.load_medusa(tmp_path, target)
    assert (method.tree.num_nodes, method.tree.depth, method.tree.top_k) == (61, 3, 10)


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
        model.hydra_mlp = nn.ModuleList(
            [
                nn.Sequential(*before, Block(size * (i + 2)), *[*before, Block(size)] * (layers - 1))
                for i in range(count)
            ]
        )
        ends = [nn.Linear(size, vocab) for _ in range(count)]
        model.hydra_lm_head = nn.ModuleList([nn.Sequential(*before, end) if prefixed else end for end in ends])
    tensors = model.state_dict()
    if prefixed:  # the decoder layer has its parity where decoders have it; here it has to be there
        own, params = heads(kind)
        save_medusa_checkpoint(own, params, tmp_path / "own", "float32")
        found = safetensors.numpy.load_file(tmp_path / "own" / "hydra_lm_head.safetensors")
        tensors |= {
            name: torch.tensor(part) for name, part in found.items() if name.startswith("prefix_embeding_layer")
        }
    torch.save(tensors, tmp_path / f"{family}_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps({f"{family}_num_heads": count, f"{family}_num_layers": layers}))
    config, params = load_medusa_checkpoint(tmp_path, tiny_target().config)
    assert (config.prefix is not None) == prefixed
    for head in range(count):
        x = torch.randn(5, size if kind == "medusa" else size * (head + 2))
        theirs = model[head](x) if kind == "medusa" else model.hydra_lm_head[head](model.hydra_mlp[head](x))
        ours = MedusaHeads(config).apply({"params": params["heads"]}, jax.numpy.asarray(x.numpy()), head)
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)


def test_heads_that_do_not_fit_are_refused_by_name(tmp_path):
    config, params = heads("medusa")
    save_medusa_checkpoint(config, params, tmp_path, "float32")
    own = tiny_target().config
    for other, sizes in (
        (tiny_target(vocab=13).config, "16 wide with 13 tokens"),
        (dataclasses.replace(own, hidden_size=18), "18 wide with 12 tokens"),
    ):
        message = rf"not the medusa heads of a model that is {sizes}; take heads that were trained for this target, or"
        with pytest.raises(CheckpointError, match=message):
            load_medusa_checkpoint(tmp_path, other)
    tensors = safetensors.numpy.load_file(tmp_path / "medusa_lm_head.safetensors")
    tensors["9.0.linear.weight"] = tensors.pop("3.0.linear.weight")
    safetensors.numpy.save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(CheckpointError, match=r"missing \(1\): 3\.0\.linear\.weight\n.*unexpected \(1\): 9\.0\.linear"):
        load_medusa_checkpoint(tmp_path, tiny_target().config)
    values = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"medusa_num_heads": 0}, "medusa_num_heads must be a positive integer, got 0"),
        ({"medusa_num_layers": "two"}, "medusa_num_layers must be a positive integer, got 'two'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(CheckpointError, match=message):
            load_medusa_checkpoint(tmp_path, tiny_target().config)
    (tmp_path / "config.json").write_text(json.dumps({"hydra_num_heads": 2, "hydra_num_layers": 1}))
    with pytest.raises(CheckpointError, match=r"no weights; expected hydra_lm_head\.safetensors or hydra_lm_head\.pt"):
        load_medusa_checkpoint(tmp_path, tiny_target().config)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="must hold medusa_num_heads or hydra_num_heads"):
        load_medusa_checkpoint(tmp_path, tiny_target().config)
    with pytest.raises(CheckpointError, match=r"heads' parameters:\n  unexpected \(5\): heads_3_blocks_0/linear/bias"):
        save_medusa_checkpoint(MedusaConfig("medusa", 16, 12, 3, 2), params, tmp_path / "new")
    assert not (tmp_path / "new").exists()
