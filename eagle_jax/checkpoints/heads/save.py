"""Writes EAGLE heads in the layouts that engines load: a whole directory, or nothing.

The layouts are read off the engines' own loaders in summer 2026: `llama_eagle3.py` of SGLang, vLLM, sglang-jax and
tpu-inference, and the `speculators` package 0.9.0.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.checkpoints.files.mapping import DTYPES, EMBEDDING, check_dtype, expected_shapes, flatten, head_table
from eagle_jax.checkpoints.files.staging import replacing, write_json
from eagle_jax.checkpoints.files.tensors import FLOAT_DTYPES, TensorReader
from eagle_jax.checkpoints.files.weights import check_params, write_weights
from eagle_jax.checkpoints.heads.supported import SWITCHES
from eagle_jax.checkpoints.targets.config import common_keys
from eagle_jax.checkpoints.targets.windows import SLIDING
from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.core.types import Params

Layout = Literal["official", "speculators", "sglang"]
"""As the reference implementation, the `speculators` package or SGLang writes a head."""


def save_head_checkpoint(
    config: HeadConfig,
    params: Params,
    directory: str | os.PathLike[str],
    dtype: str = "bfloat16",
    *,
    embedding: Any | None = None,
) -> None:
    """Writes a head in the official layout of its kind.

    Names of tensors begin with `layers.0.` (EAGLE-1/2) or `midlayer.` (EAGLE-3, with d2t and t2d). The directory is
    replaced as a whole; other files in it are kept.

    Args:
      params: `{"head": ..., "d2t": ...}` as `load_head_checkpoint` returns it.
      dtype: float32, bfloat16 or float16.
      embedding: [V, H], the target's embedding. Official EAGLE-1/2 files carry a copy of it; without one the file is
        smaller and readers take the target's.

    Raises:
      CheckpointError: the parameters do not fit `config` or hold values that are not finite, or the directory holds
        something else.
    """
    _write(config, params, directory, "official", dtype, official_values(config, dtype), embedding)


def export_head(
    config: HeadConfig,
    params: Params,
    target: DecoderConfig,
    directory: str | os.PathLike[str],
    layout: Layout,
    dtype: str = "bfloat16",
    *,
    rope: Literal["head", "target"] | None = None,
    verifier: str = "",
    speculative_tokens: int = 5,
    embedding: Any | None = None,
) -> HeadConfig:
    """Writes a head for other engines; `load_head_checkpoint` reads every layout back exactly.

    - official: as the reference implementation writes EAGLE-1/2 (with a copy of the target's embedding) and EAGLE-3.
    - sglang: EAGLE-3 for SGLang, vLLM and sglang-jax; d2t and t2d are always there.
    - speculators: EAGLE-3 for vLLM and the `speculators` package, with a copy of the target's embedding.

    The directory is replaced as a whole; other files in it are kept.

    Args:
      params: `{"head": ..., "d2t": ...}` as `load_head_checkpoint` returns it.
      target: its context length goes into the file.
      rope: whose rotary embedding to write, if the head's differs from the target's.
      verifier: hub id or path of the target (speculators only).
      speculative_tokens: length of the drafted chain (speculators only).
      embedding: [V, H], the target's, to write a copy of; required if `carries_embedding`.

    Returns:
      the configuration as written: `config` with the target's context length (and RoPE).

    Raises:
      CheckpointError: the layout cannot express this head, or an argument is missing.
    """
    layer = config.layer
    if rope is None and layer.rope != target.rope:
        ours, theirs = (f"{x.kind} theta={x.theta:g} factor={x.factor:g}" for x in (layer.rope, target.rope))
        raise CheckpointError(
            f"rope must be 'head' or 'target' where the two differ, got none for a head of {ours} and a target of "
            f"{theirs}. Choose 'head' to draft as here."
        )
    written = target.rope if rope == "target" else layer.rope
    # The context length is the limit up to which engines draft.
    layer = dataclasses.replace(layer, rope=written, max_position=target.max_position)
    config = dataclasses.replace(config, layer=layer)
    check_expressible(config, params.get("d2t"), target, layout)
    if carries_embedding(config, layout) and embedding is None and not config.own_embedding:
        raise CheckpointError(f"embedding must be the target's for the {layout} layout, got none. Pass it.")
    architecture = "LlamaForCausalLMEagle3" if layout == "sglang" else "LlamaForCausalLM"
    values = official_values(config, dtype, architecture)
    if layout == "speculators":
        values = speculators_values(config, target, dtype, verifier, speculative_tokens)
    _write(config, params, directory, layout, dtype, values, embedding)
    return config


def stored_dtype(directory: Path) -> str:
    """Returns the dtype that holds every weight of a checkpoint without loss.

    Raises:
      CheckpointError: weights cannot be written in this dtype.
    """
    with TensorReader(directory) as reader:
        found = sorted({info.dtype for info in reader.infos.values() if info.dtype in FLOAT_DTYPES})
    if not found or not {*found} <= DTYPES.keys():
        held = ", ".join(found) or "no floating-point numbers"
        raise CheckpointError(
            f"dtype must be one of {', '.join(DTYPES)}, got none, and {directory} holds {held}. Pass one."
        )
    return jnp.result_type(*map(jnp.dtype, found)).name


def _write(
    config: HeadConfig,
    params: Params,
    directory: str | os.PathLike[str],
    layout: Layout,
    dtype: str,
    values: Mapping[str, Any],
    embedding: Any | None,
) -> None:
    """Writes a head's tensors under the names of a layout, with their config.json."""
    file_dtype = check_dtype(dtype)
    flat, expected = flatten({"d2t": params.get("d2t"), **params["head"]}), dict(expected_shapes(config))
    if embedding is not None and not config.own_embedding:
        flat[EMBEDDING] = embedding
        expected[EMBEDDING] = (config.layer.vocab_size, config.layer.hidden_size)
    check_params(flat, expected, "the head's parameters:")
    d2t, tables = flat.pop("d2t", None), {}
    # A head without these tables drafts target ids; SGLang reads them in any case.
    if d2t is not None and (layout == "sglang" or len(d2t) < config.layer.vocab_size or np.any(d2t)):
        difference = np.asarray(d2t, np.int64)
        reached = np.zeros((config.layer.vocab_size,), bool)
        reached[difference + np.arange(len(difference))] = True
        tables = {"d2t": difference, "t2d": reached}
    with replacing(Path(directory)) as staging:
        write_json(staging / "config.json", values)
        prefix = "layers.0." if layout == "speculators" or config.kind == "eagle1" else "midlayer."
        write_weights(staging, flat, head_table(prefix), file_dtype, extra=tables)


def carries_embedding(config: HeadConfig, layout: Layout) -> bool:
    """Returns whether files of a layout hold a copy of the target's embedding.

    The `speculators` package (0.9.0) should take a missing one from the target, but does so only if its uninitialised
    memory happens to hold a NaN.
    """
    return layout == "speculators" or config.kind == "eagle1"


def check_expressible(config: HeadConfig, d2t: Any | None, target: DecoderConfig, layout: Layout) -> None:
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
        "a sliding window": any(layer.windows),
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
            "MLP biases together with norms of queries and keys": layer.mlp_bias and layer.qk_norm,
            "a d2t that permutes the whole vocabulary": (
                config.draft_vocab_size == layer.vocab_size and d2t is not None and bool(np.any(d2t))
            ),
        }
    found = [name for name, lacking in lacks.items() if lacking]
    if found:
        named = ", ".join(found)
        raise CheckpointError(f"layout must hold the head, got {layout!r}, which cannot hold {named}. Choose another.")


def official_values(config: HeadConfig, dtype: str, architecture: str = "LlamaForCausalLM") -> dict[str, Any]:
    """Returns config.json of a head in the official and the sglang layout; only the switches that are on."""
    layer = config.layer
    values: dict[str, Any] = {"architectures": [architecture], **_layer_values(layer, dtype)}
    if layer.qkv_bias:
        values |= {"qkv_bias": True, "attention_bias": True}
    if layer.mlp_bias:
        values["mlp_bias"] = True
    if any(layer.windows):  # the other layouts refuse a window
        values |= {"sliding_window": layer.windows[0], "use_sliding_window": True, "layer_types": [SLIDING]}
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
      verifier: hub id or path of the target, which vLLM loads together with the head.
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
    """Returns the keys of a layer without a window, which all layouts share."""
    common = common_keys(layer, dtype)
    return {"model_type": "llama", **common, "num_hidden_layers": 1, "tie_word_embeddings": False}
