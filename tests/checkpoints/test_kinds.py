"""What a checkpoint is, told by the loader that it was given to in place of the right one."""

from __future__ import annotations

import json

import pytest

import eagle_jax
from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.checkpoints.files.kinds import kind_of

WORDS = {
    "target": "a whole model and no draft head: load it with load_target (--target), or as a small draft model",
    "eagle2": "an EAGLE-1/2 head and no model: load it with load_drafter (--eagle2 of infer.*, --head of train.*)",
    "eagle3": "an EAGLE-3 head and no model: load it with load_drafter (--eagle3 of infer.*, --head of train.*)",
    "medusa": "Medusa heads: load them with load_medusa (--medusa of infer.*, --kind medusa of train.evaluate)",
    "hydra": "Hydra heads: load them with load_medusa (--hydra of infer.*, --kind medusa of train.evaluate)",
}


@pytest.fixture(scope="module")
def target():
    return eagle_jax.load_target(bundled("target"))


@pytest.mark.parametrize(
    ("load", "wrong"),
    [
        ("load_target", ("eagle2", "eagle3", "medusa", "hydra")),
        ("load_drafter", ("target", "medusa", "hydra")),
        ("load_medusa", ("target", "eagle2", "eagle3")),
        ("load_draft_model", ("eagle2", "eagle3", "medusa", "hydra")),
    ],
)
def test_the_wrong_loader_names_the_right_one(load, wrong, target, recwarn):
    for name in wrong:
        more = () if load == "load_target" else (target,)
        with pytest.raises(CheckpointError) as caught:
            getattr(eagle_jax, load)(bundled(name), *more)
        assert str(caught.value).startswith(f"{bundled(name)} holds {WORDS[name]}")
        assert "\n" not in str(caught.value)
    assert not recwarn.list  # nothing about tokenizers of what is no model


@pytest.mark.parametrize(
    ("values", "names", "kind"),
    [
        ({"medusa_num_heads": 5}, (), "medusa"),
        ({"medusa_num_heads": 5, "hidden_size": 8, "architectures": ["LlamaForCausalLM"]}, (), None),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, (), "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 9}, (), "eagle3"),
        ({"speculators_model_type": "eagle3"}, (), "eagle3"),
        ({"speculators_model_type": "mlp"}, (), "other"),
        ({"architectures": ["EagleForCausalLM"]}, (), "eagle2"),
        ({}, ("model.fc.weight", "model.embed_tokens.weight"), "eagle2"),
        ({}, ("fc.weight", "midlayer.hidden_norm.weight", "norm.weight"), "eagle3"),
        ({}, ("model.layers.0.mlp.up_proj.weight", "model.norm.weight"), "model"),  # a single layer
        ({}, ("transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"), "model"),
        ({}, ("wte.weight",), "model"),
        ({}, ("embed_tokens.weight", "layers.0.mlp.up_proj.weight"), None),  # a head that lacks its fc
        ({}, (), None),
    ],
)
def test_kinds(values, names, kind):
    assert kind_of(values, names) == kind


def test_a_damaged_head_is_still_told_what_it_lacks(tmp_path, target):
    """And not taken for something else."""
    import safetensors.numpy

    tensors = safetensors.numpy.load_file(bundled("eagle3") / "model.safetensors")
    del tensors["fc.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((bundled("eagle3") / "config.json").read_text())))
    with pytest.raises(CheckpointError, match=r"missing \(1\): fc\.weight"):
        eagle_jax.load_drafter(tmp_path, target)
