"""Reads parameters in the layout of MaxText: Llama 2/3, Qwen2, Qwen3 and Gemma 3, dense.

Names and values follow `maxtext/checkpoint_conversion/utils/param_mapping.py` at commit e591f30, which converts to the
names of Hugging Face:

- Llama rotates neighbouring dimensions (2k, 2k + 1), and its query kernel has the factor head_dim**-0.5.
- Gemma's norms multiply by their scale, not by 1 + scale. Its embedding has the factor sqrt(H), rounded to bfloat16.
- The vocabulary may be padded.
- Layers that `scan_layers` stacks are an axis of every leaf.
"""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.checkpoints.memory.names import Leaf, Names, leaves_by_path
from eagle_jax.config import DecoderConfig

_IN, _OUT, _LINEAR = "DNH->NH,D", "NHD->D,NH", "DF->F,D"
_LAYER = "decoder/layers_{i}/"
_PERIOD = 6  # layers of a scanned block of Gemma 3


def _neighbours_to_halves(array: Array, config: DecoderConfig) -> Array:
    return jnp.concatenate([array[..., ::2], array[..., 1::2]], axis=-1)


def _llama_query(array: Array, config: DecoderConfig) -> Array:
    scaled = array.astype(jnp.float32) * np.float32(np.sqrt(config.head_dim))
    return _neighbours_to_halves(scaled.astype(array.dtype), config)


def _minus_one(array: Array, config: DecoderConfig) -> Array:
    return array - jnp.ones((), array.dtype)


def _known_rows(array: Array, config: DecoderConfig) -> Array:
    return array[: config.vocab_size]


def _known_columns(array: Array, config: DecoderConfig) -> Array:
    return array[:, : config.vocab_size]


def _unscaled(array: Array, config: DecoderConfig) -> Array:
    array = _known_rows(array, config)
    return (array / jnp.asarray(config.hidden_size**0.5, jnp.bfloat16).astype(array.dtype)).astype(array.dtype)


def maxtext_names(config: DecoderConfig) -> Names:
    """Returns the table of a family.

    Raises:
      CheckpointError: the family is not supported, or has experts.
    """
    known = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"
    if config.architecture not in known or config.experts is not None:
        got = f"{config.architecture} with experts" if config.experts else config.architecture
        raise CheckpointError(
            f"config must be of a dense {', '.join(known)}, got {got}. Convert the checkpoint to Hugging Face's format."
        )
    gemma, llama = config.block == "gemma3", config.architecture == "LlamaForCausalLM"
    norm = _minus_one if gemma else None
    attention, query = f"{_LAYER}self_attention/", _llama_query if llama else None
    norms = {
        "input_layernorm": "pre_self_attention_norm", "post_attention_layernorm": "post_self_attention_norm",
        "pre_feedforward_layernorm": "pre_ffw_norm", "post_feedforward_layernorm": "post_ffw_norm",
    } if gemma else {
        "input_layernorm": "pre_self_attention_layer_norm",
        "post_attention_layernorm": "post_self_attention_layer_norm",
    }  # fmt: skip
    key = _neighbours_to_halves if llama else None
    kernels = (("q", "query", query), ("k", "key", key), ("v", "value", None))
    return Names(
        (
            Leaf("embed_tokens/embedding", "token_embedder/embedding", convert=_unscaled if gemma else _known_rows),
            *(Leaf(f"layers_{{i}}/self_attn/{p}_proj/weight", f"{attention}{name}/kernel", _IN, convert=convert)
              for p, name, convert in kernels),
            *(Leaf(f"layers_{{i}}/self_attn/{p}_proj/bias", f"{attention}{name}/bias", "NH->NH")
              for p, name, _ in kernels),
            Leaf("layers_{i}/self_attn/o_proj/weight", f"{attention}out/kernel", _OUT),
            Leaf("layers_{i}/self_attn/q_norm/scale", f"{attention}query_norm/scale", convert=norm),
            Leaf("layers_{i}/self_attn/k_norm/scale", f"{attention}key_norm/scale", convert=norm),
            Leaf("layers_{i}/mlp/gate_proj/weight", f"{_LAYER}mlp/wi_0/kernel", _LINEAR),
            Leaf("layers_{i}/mlp/up_proj/weight", f"{_LAYER}mlp/wi_1/kernel", _LINEAR),
            Leaf("layers_{i}/mlp/down_proj/weight", f"{_LAYER}mlp/wo/kernel", _LINEAR),
            *(Leaf(f"layers_{{i}}/{ours}/scale", f"{_LAYER}{theirs}/scale", convert=norm)
              for ours, theirs in norms.items()),
            Leaf("norm/scale", "decoder/decoder_norm/scale", convert=norm),
            Leaf("lm_head/weight", "decoder/logits_dense/kernel", "DV->V,D", convert=_known_columns),
        ),
        ignored=(r"vision_encoder/.*",),
    )  # fmt: skip


def maxtext_leaves(state: Any, config: DecoderConfig, scan_axis: int = 1) -> dict[str, Any]:
    """Returns {path: array} of a MaxText state, with a leaf per layer: stacks of `scan_layers` are sliced.

    Args:
      state: parameters, with or without the key "params" around them. scan_axis: `param_scan_axis` of MaxText.

    Raises:
      CheckpointError: the stacks have another number of layers than the configuration.
    """
    found: dict[str, Any] = {}
    for given, array in leaves_by_path(state).items():
        path = re.sub(r"^(params/|base/)+", "", given)
        stack = re.match(r"decoder/layers/(?:layers_(\d+)/)?(.*)", path)
        rest = re.match(r"decoder/layers_remainder/layers_(\d+)/(.*)", path)
        whole = config.num_layers - config.num_layers % _PERIOD
        if rest is not None:
            found[f"decoder/layers_{whole + int(rest[1])}/{rest[2]}"] = array
        elif stack is None:
            found[path] = array
        else:
            first, step = (0, 1) if stack[1] is None else (int(stack[1]), _PERIOD)
            layers = range(first, config.num_layers if stack[1] is None else whole, step)
            if array.ndim <= scan_axis or array.shape[scan_axis] != len(layers):
                raise CheckpointError(
                    f"state: {path} must have {len(layers)} layers on axis {scan_axis}, got shape {list(array.shape)}. "
                    "Pass the configuration of this model and MaxText's param_scan_axis."
                )
            for index, layer in enumerate(layers):
                found[f"decoder/layers_{layer}/{stack[2]}"] = array[(slice(None),) * scan_axis + (index,)]
    return found
