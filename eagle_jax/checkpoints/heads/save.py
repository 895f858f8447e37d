"""Writes EAGLE heads in the layouts that engines load: a whole directory, or nothing."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.checkpoints.files.mapping import DTYPES, EMBEDDING, check_dtype, expected_shapes, flatten, head_table
from eagle_jax.checkpoints.files.staging import replacing, write_json
from eagle_jax.checkpoints.files.tensors import FLOAT_DTYPES, TensorReader
from eagle_jax.checkpoints.files.weights import check_params, write_weights
from eagle_jax.checkpoints.heads.layouts import (
    Layout,
    carries_embedding,
    check_expressible,
    layer_prefix,
    official_values,
    speculators_values,
)
from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.core.types import Params


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
    config = _with_target_positions(config, target, rope)
    d2t = params.get("d2t")
    check_expressible(config, None if d2t is None else np.asarray(d2t), target, layout)
    if carries_embedding(config, layout) and embedding is None and not config.own_embedding:
        raise CheckpointError(f"embedding must be the target's for the {layout} layout, got none. Pass it.")
    architecture = "LlamaForCausalLMEagle3" if layout == "sglang" else "LlamaForCausalLM"
    values = official_values(config, dtype, architecture)
    if layout == "speculators":
        values = speculators_values(config, target, dtype, verifier, speculative_tokens)
    _write(config, params, directory, layout, dtype, values, embedding)
    return config


def check_unoccupied(directory: str | os.PathLike[str]) -> None:
    """Raises `CheckpointError` unless a directory is missing or empty."""
    path = Path(directory).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(
            f"{path} must be missing or an empty directory, got one in use. Choose another, or pass --overwrite."
        )


def stored_dtype(directory: Path) -> str:
    """Returns the dtype that holds every weight of a checkpoint without loss.

    Raises:
      CheckpointError: weights cannot be written in this dtype.
    """
    with TensorReader(directory) as reader:
        found = sorted({info.dtype for info in reader.infos.values() if info.dtype in FLOAT_DTYPES})
    widest = functools.reduce(jnp.promote_types, found[1:], jnp.dtype(found[0])).name if found else None
    if widest not in DTYPES:
        held = ", ".join(found) or "no floating-point numbers"
        raise CheckpointError(
            f"dtype must be one of {', '.join(DTYPES)}, got none, and {directory} holds {held}. Pass one."
        )
    return widest


def _with_target_positions(
    config: HeadConfig, target: DecoderConfig, rope: Literal["head", "target"] | None
) -> HeadConfig:
    """Gives a head its target's context length, the limit up to which engines draft, and the chosen RoPE."""
    layer = config.layer
    if rope is None and layer.rope != target.rope:
        ours, theirs = (
            f"{rope.kind} theta={rope.theta:g} factor={rope.factor:g}" for rope in (layer.rope, target.rope)
        )
        raise CheckpointError(
            f"rope must be 'head' or 'target' where the two differ, got none for a head of {ours} and a target of "
            f"{theirs}. Choose 'head' to draft as here."
        )
    chosen = target.rope if rope == "target" else layer.rope
    return dataclasses.replace(config, layer=dataclasses.replace(layer, rope=chosen, max_position=target.max_position))


def _write(
    config: HeadConfig,
    params: Params,
    directory: str | os.PathLike[str],
    layout: Layout,
    dtype: str,
    values: Mapping[str, Any],
    embedding: Any | None,
) -> None:
    """Writes a head's tensors under the names of a layout, beside their config.json."""
    file_dtype = check_dtype(dtype)
    flat = {path.removeprefix("head/"): leaf for path, leaf in flatten(params).items()}
    expected = {path.removeprefix("head/"): shape for path, shape in expected_shapes(config).items()}
    if embedding is not None and not config.own_embedding:
        flat[EMBEDDING] = embedding
        expected[EMBEDDING] = (config.layer.vocab_size, config.layer.hidden_size)
    check_params(flat, expected, "the head's parameters:")
    d2t = flat.pop("d2t", None)
    tables = {} if d2t is None else _vocabulary_tensors(np.asarray(d2t), config.layer.vocab_size, layout == "sglang")
    with replacing(Path(directory)) as staging:
        write_json(staging / "config.json", values)
        write_weights(staging, flat, head_table(layer_prefix(config, layout)), file_dtype, extra=tables)


def _vocabulary_tensors(d2t: np.ndarray, vocab: int, always: bool) -> dict[str, np.ndarray]:
    """Returns `d2t` and `t2d` as stored; empty if draft ids are target ids, unless `always`."""
    if len(d2t) == vocab and not d2t.any() and not always:
        return {}
    difference = d2t.astype(np.int64)
    reached = np.zeros((vocab,), bool)
    reached[difference + np.arange(len(difference))] = True
    return {"d2t": difference, "t2d": reached}
