"""Describes the layouts of EAGLE heads on disk: config.json, names of tensors, limits of each.

Read off the engines' own loaders in summer 2026: `llama_eagle3.py` of SGLang, vLLM, sglang-jax and tpu-inference, and
the `speculators` package 0.9.0.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.checkpoints.heads.config import SWITCHES
from eagle_jax.checkpoints.targets.config import common_keys
from eagle_jax.config import DecoderConfig, HeadConfig

Layout = Literal["official", "speculators", "sglang"]
"""As the reference implementation, the `speculators` package or SGLang writes a head."""


def layer_prefix(config: HeadConfig, layout: Layout) -> str:
    """Returns the prefix of the layer's tensors in a layout."""
    return "layers.0." if layout == "speculators" or config.kind == "eagle1" else "midlayer."


def carries_embedding(config: HeadConfig, layout: Layout) -> bool:
    """Returns whether files of a layout hold a copy of the target's embedding.

    The `speculators` package (0.9.0) should take a missing one from the target, but does so only if its uninitialised
    memory happens to hold a NaN.
    """
    return layout == "speculators" or config.kind == "eagle1"


def check_expressible(config: HeadConfig, d2t: np.ndarray | None, target: DecoderConfig, layout: Layout) -> None:
    """Checks that `layout` can hold the head: SGLang silently skips unknown keys and tensors.

    Raises:
      CheckpointError: it cannot; the message names everything that it lacks.
    """
    if layout == "official":
        return
    if config.kind != "eagle3":
        raise CheckpointError(f"layout must be 'official' for an EAGLE-1/2 head, got {layout!r}. Pass 'official'.")
    layer, taps = config.layer, config.taps
    # Engines collect the taps in the order of the layers, each where the residual stream enters one.
    ascending = list(taps) == sorted(set(taps)) and taps[0] >= 1 and taps[-1] < target.num_layers
    lacks = {
        "a bias of fc": config.fc_bias,
        f"taps {taps} (they must ascend, from 1 to {target.num_layers - 1})": not ascending,
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
        raise CheckpointError(f"the {layout} layout cannot hold {', '.join(found)}. Choose another layout.")


def official_values(config: HeadConfig, dtype: str, architecture: str = "LlamaForCausalLM") -> dict[str, Any]:
    """Returns config.json of a head in the official and the sglang layout; only the switches that are on."""
    layer = config.layer
    values: dict[str, Any] = {"architectures": [architecture], **_layer_values(layer, dtype)}
    if layer.qkv_bias:
        values |= {"qkv_bias": True, "attention_bias": True}
    if layer.mlp_bias:
        values["mlp_bias"] = True
    if config.kind == "eagle1":
        return values | {"bias": config.fc_bias}
    values["draft_vocab_size"] = config.draft_vocab_size
    if config.target_hidden_size != layer.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    values |= {name: True for name in SWITCHES if getattr(config, name)}
    # In both numberings, each for its readers; see `tapped_states`.
    values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps]}
    values["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
    return values


def speculators_values(
    config: HeadConfig, target: DecoderConfig, dtype: str, verifier: str, speculative_tokens: int
) -> dict[str, Any]:
    """Returns config.json of the speculators layout.

    Args:
      verifier: hub id or path of the target, which vLLM loads beside the head.
      speculative_tokens: length of the chain that vLLM drafts by default.
    """
    layer = config.layer
    layer_values = _layer_values(layer, dtype) | {"attention_bias": layer.qkv_bias, "mlp_bias": layer.mlp_bias}
    if layer.qk_norm:
        layer_values["model_type"] = "qwen3"
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
        "speculators_version": "0.9.0",  # the version of the package whose files the layout copies
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


def _layer_values(layer: DecoderConfig, dtype: str) -> dict[str, Any]:
    common = common_keys(layer, dtype)
    return {"model_type": "llama", **common, "num_hidden_layers": 1, "tie_word_embeddings": False}
