"""Tests that the loader of another kind names the kind of a checkpoint."""

from __future__ import annotations

import pytest

import eagle_jax
from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.checkpoints.files.kinds import DESCRIPTIONS, kind_of

HEADS, MEDUSAS = ("eagle2", "eagle3"), ("medusa", "hydra")


@pytest.mark.parametrize(
    ("load", "wrong"),
    [
        ("load_target", HEADS + MEDUSAS),
        ("load_drafter", ("model", *MEDUSAS)),
        ("load_medusa", ("eagle3",)),
        ("load_draft_model", HEADS + MEDUSAS),
    ],
)
def test_a_loader_names_the_loader_of_another_kind(load, wrong, recwarn):
    more = () if load == "load_target" else (eagle_jax.load_target(bundled("target")),)
    for kind in wrong:
        place = bundled({"model": "target"}.get(kind, kind))
        with pytest.raises(CheckpointError) as caught:
            getattr(eagle_jax, load)(place, *more)
        wanted, found = str(caught.value).split(", got ")
        assert wanted.startswith(f"{place} must hold ") and found == ". ".join(DESCRIPTIONS[kind])
    assert not recwarn.list  # such as of tokenizers, which heads do not have


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
        ({}, ("embed_tokens.weight", "layers.0.mlp.up_proj.weight"), None),  # a head that lacks its fc
    ],
)
def test_config_and_tensor_names_determine_the_kind(values, names, kind):
    assert kind_of(values, names) == kind
