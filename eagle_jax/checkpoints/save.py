"""Writes targets (Hugging Face format) and heads (official EAGLE format): a whole directory appears, or nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from eagle_jax.checkpoints.errors import CheckpointError
from eagle_jax.checkpoints.finite import DIVERGED, NotFinite
from eagle_jax.checkpoints.gpt2 import GPT2, fused, gpt2_values
from eagle_jax.checkpoints.head_config import head_config_values
from eagle_jax.checkpoints.hf_config import hf_config
from eagle_jax.checkpoints.mapping import (
    DECODER,
    HEAD,
    Table,
    TensorProblems,
    cast,
    check_dtype,
    expected_shapes,
    flatten,
    transposed,
)
from eagle_jax.checkpoints.staging import replacing, write_json
from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.core.types import Params

MAX_SHARD_BYTES = 5 << 30
"""Weights beyond this are written as shards with an index, as `transformers` does."""


def save_target_checkpoint(
    config: DecoderConfig,
    params: Params,
    directory: str | os.PathLike[str],
    dtype: str = "bfloat16",
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a target so that `transformers` loads it unchanged: config, generation config, safetensors.

    The directory is replaced as a whole; other files in it (tokenizer, model card) are kept.

    Args:
      params: nested dict as `load_target_checkpoint` returns it.
      dtype: float32, bfloat16 or float16.
      max_shard_bytes: size from which the weights are split.

    Raises:
      CheckpointError: the parameters do not fit `config` or hold values that are not finite, or the directory holds
        something else.
    """
    wanted = check_dtype(dtype)
    gpt2 = config.block == "gpt2"
    values = (gpt2_values if gpt2 else hf_config)(config, dtype)
    flat = flatten(params)
    _check(flat, expected_shapes(config), "the target's parameters:")
    generation = {"bos_token_id": values["bos_token_id"], "eos_token_id": values["eos_token_id"]}
    with replacing(Path(directory)) as staging:
        write_json(staging / "config.json", values)
        write_json(staging / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
        written, table = (fused(flat), GPT2) if gpt2 else (flat, DECODER)
        _write_weights(staging, written, table, wanted, max_shard_bytes=max_shard_bytes)


def save_head_checkpoint(
    config: HeadConfig,
    params: Params,
    directory: str | os.PathLike[str],
    dtype: str = "bfloat16",
    *,
    embedding: Any | None = None,
) -> None:
    """Writes a head in the official layout of its kind (`layers.0.` for EAGLE-1/2, `midlayer.`, d2t, t2d for EAGLE-3).

    The directory is replaced as a whole; other files in it are kept.

    Args:
      params: `{"head": ..., "d2t": ...}` as `load_head_checkpoint` returns it.
      dtype: float32, bfloat16 or float16.
      embedding: [V, H], the target's embedding. Official EAGLE-1/2 files carry a copy of it; without one the file is
        smaller and readers take the target's.

    Raises:
      CheckpointError: the parameters do not fit `config` or hold values that are not finite, or the directory holds
        something else.
    """
    prefix = "midlayer." if config.kind == "eagle3" else "layers.0."
    write_head(config, params, directory, dtype, head_config_values(config, dtype), prefix=prefix, embedding=embedding)


def write_head(
    config: HeadConfig,
    params: Params,
    directory: str | os.PathLike[str],
    dtype: str,
    values: Mapping[str, Any],
    *,
    prefix: str,
    embedding: Any | None = None,
    full_tables: bool = False,
) -> None:
    """Writes a head's tensors under the names of a layout, beside the config.json that describes it.

    Args:
      values: the config.json. prefix: of the names of the one layer's tensors.
      params, dtype, embedding: as in `save_head_checkpoint`.
      full_tables: d2t and t2d are there even where draft ids are target ids.

    Raises:
      CheckpointError: as `save_head_checkpoint`.
    """
    wanted = check_dtype(dtype)
    flat = flatten(params)
    _check(flat, expected_shapes(config), "the head's parameters:")
    d2t = flat.pop("d2t", None)
    flat = {path.removeprefix("head/"): leaf for path, leaf in flat.items()}
    if embedding is not None and not config.own_embedding:
        shape = (config.layer.vocab_size, config.layer.hidden_size)
        if np.shape(embedding) != shape:
            raise CheckpointError(f"embedding is {list(np.shape(embedding))}, the head's would be {list(shape)}")
        flat["embed_tokens/embedding"] = embedding
    tables = {} if d2t is None else _vocabulary_tensors(np.asarray(d2t), config.layer.vocab_size, full_tables)
    with replacing(Path(directory)) as staging:
        write_json(staging / "config.json", values)
        _write_weights(staging, flat, HEAD, wanted, prefix=prefix, extra=tables)


def _vocabulary_tensors(d2t: np.ndarray, vocab: int, full_tables: bool) -> dict[str, np.ndarray]:
    """`d2t` and `t2d` as stored; nothing where draft ids are target ids, unless `full_tables`."""
    if len(d2t) == vocab and not d2t.any() and not full_tables:
        return {}
    difference = d2t.astype(np.int64)
    ids = difference + np.arange(len(difference))
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != len(ids):
        raise CheckpointError(f"d2t does not map draft ids to distinct target ids below {vocab}")
    reached = np.zeros((vocab,), bool)
    reached[ids] = True
    return {"d2t": difference, "t2d": reached}


def _check(flat: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], subject: str) -> None:
    problems = TensorProblems()
    problems.found["missing"] = [path for path in expected if path not in flat]
    problems.found["unexpected"] = [path for path in flat if path not in expected]
    problems.found["misshaped"] = [
        f"{path} is {list(np.shape(flat[path]))}, expected {list(shape)}"
        for path, shape in expected.items()
        if path in flat and tuple(np.shape(flat[path])) != shape
    ]
    problems.raise_if_any(subject)


def _write_weights(
    staging: Path,
    flat: Mapping[str, Any],
    table: Table,
    dtype: np.dtype,
    *,
    prefix: str = "layers.0.",
    extra: Mapping[str, np.ndarray] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the parameters shard by shard; only one shard is on the host at a time."""
    shards: list[dict[str, str]] = [{}]
    filled = 0
    for path, leaf in flat.items():
        size = int(np.prod(np.shape(leaf))) * dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][table.name_of(path)[0]] = path
        filled += size
    weight_map: dict[str, str] = {}
    spoiled = NotFinite()
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name, path in shard.items():
            host = cast(np.asarray(flat[path]), dtype, name)
            spoiled.check(name, host)
            written = name.replace("layers.0.", prefix) if table is HEAD else name
            tensors[written] = transposed(host) if table.name_of(path)[1] else np.ascontiguousarray(host)
        tensors.update(extra or {} if number == 1 else {})
        if spoiled.found:  # only counted from here on: nothing is written
            continue
        try:
            safetensors.numpy.save_file(tensors, staging / file, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # what a full disk raises
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"the weights could not be written in {staging.parent} ({reason}): make room and save again"
            ) from error
        weight_map.update(dict.fromkeys(tensors, file))
    spoiled.raise_if_any("the weights are not written", DIVERGED)
    if len(shards) > 1:
        total = sum(int(np.prod(np.shape(leaf))) * dtype.itemsize for leaf in flat.values())
        write_json(
            staging / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
