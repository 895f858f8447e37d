"""Builds config.json of a head in the layouts of other engines, and checks what each layout can hold.

Read off the engines' own loaders in summer 2026: `llama_eagle3.py` of SGLang, vLLM, sglang-jax and tpu-inference, and
the `speculators` package 0.9.0.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.checkpoints.heads.config import SWITCHES, head_config_values
from eagle_jax.checkpoints.targets.config import common_keys
from eagle_jax.config import DecoderConfig, HeadConfig, RopeConfig

Layout = Literal["official", "speculators", "sglang"]
"""As the reference implementation writes a head, as the `speculators` package does, or as SGLang wants it."""

SPECULATORS_VERSION = "0.9.0"
"""Of the package whose files the speculators layout copies."""


def with_target_positions(
    config: HeadConfig, target: DecoderConfig, rope: Literal["head", "target"] | None
) -> HeadConfig:
    """Gives a head its target's context length: engines draft no further than the head's config says.

    Args:
      rope: whose rotary embedding it gets. None wants the two to be equal: another one gives other drafts.

    Raises:
      CheckpointError: they differ and `rope` is None.
    """
    layer = config.layer
    if rope is None and layer.rope != target.rope:
        raise CheckpointError(
            f"the head's RoPE is {_rope_words(layer.rope)}, its target's {_rope_words(target.rope)}: choose rope "
            f"'head', which drafts as it does here, or rope 'target'"
        )
    chosen = target.rope if rope == "target" else layer.rope
    layer = dataclasses.replace(layer, rope=chosen, max_position=target.max_position)
    return dataclasses.replace(config, layer=layer)


def _rope_words(rope: RopeConfig) -> str:
    changed = {
        field.name: getattr(rope, field.name)
        for field in dataclasses.fields(rope)
        if field.name not in ("kind", "theta") and getattr(rope, field.name) != field.default
    }
    return " ".join([rope.kind, f"theta={rope.theta:g}", *(f"{name}={value}" for name, value in changed.items())])


def check_expressible(config: HeadConfig, d2t: np.ndarray | None, target: DecoderConfig, layout: Layout) -> None:
    """Checks that `layout` can hold the head: SGLang silently skips unknown keys and tensors.

    Raises:
      CheckpointError: naming everything that has no place there.
    """
    if layout == "official":
        return
    if config.kind != "eagle3":
        raise CheckpointError(f"layout must be 'official' for an EAGLE-1/2 head, got {layout!r}.")
    layer, taps = config.layer, config.taps
    lacks = {
        "a bias of fc": config.fc_bias,
        # Engines collect the taps in the order of the layers, each where the residual stream enters one.
        f"taps {taps} (they must ascend, from 1 to {target.num_layers - 1})": (
            list(taps) != sorted(set(taps)) or taps[0] < 1 or taps[-1] >= target.num_layers
        ),
    }
    if layout == "sglang":
        lacks |= {
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "biases of the layer": layer.qkv_bias or layer.out_bias or layer.mlp_bias,
            "norms of queries and keys": layer.qk_norm,
            # There the target's embedding takes the place of the head's where their widths agree.
            "an embedding that is not the target's": (
                config.own_embedding and layer.hidden_size == config.target_hidden_size
            ),
        }
    else:
        lacks |= {
            "biases of only some attention projections": layer.qkv_bias != layer.out_bias,
            "MLP biases beside norms of queries and keys": layer.mlp_bias and layer.qk_norm,
            "norm_before_fc together with fc_norm": config.norm_before_fc and config.fc_norm,
            "a d2t that permutes the whole vocabulary": (
                config.draft_vocab_size == layer.vocab_size and d2t is not None and bool(d2t.any())
            ),
        }
    found = [name for name, lacking in lacks.items() if lacking]
    if found:
        raise CheckpointError(f"the {layout} layout cannot hold {', '.join(found)}")


def sglang_values(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """Returns config.json of the layout that SGLang, vLLM and sglang-jax read."""
    return head_config_values(config, dtype) | {"architectures": ["LlamaForCausalLMEagle3"]}


def speculators_values(
    config: HeadConfig, target: DecoderConfig, dtype: str, verifier: str, speculative_tokens: int
) -> dict[str, Any]:
    """Returns config.json of the speculators layout.

    Args:
      verifier: hub id or path of the target, which vLLM loads beside the head.
      speculative_tokens: length of the chain that vLLM drafts by default.
    """
    layer = config.layer
    layer_values = {
        "model_type": "qwen3" if layer.qk_norm else "llama",
        **common_keys(layer, dtype),
        "num_hidden_layers": 1,
        "attention_bias": layer.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        "tie_word_embeddings": False,
    }
    if len(config.taps) != 3:
        layer_values["num_aux_hidden_states"] = len(config.taps)  # vLLM takes three for granted
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    wider = config.target_hidden_size != layer.hidden_size
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": [target.architecture]},
        },
        "transformer_layer_config": layer_values,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size if wider else None,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        # Always written out: readers differ in what they take an absent one for.
        **{name: getattr(config, name) for name in SWITCHES},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
