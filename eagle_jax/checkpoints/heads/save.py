"""Writes EAGLE heads in the official format: the whole directory appears, or nothing changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.checkpoints.files.mapping import HEAD, check_dtype, expected_shapes, flatten
from eagle_jax.checkpoints.files.staging import replacing, write_json
from eagle_jax.checkpoints.files.weights import check_params, write_weights
from eagle_jax.checkpoints.heads.config import head_config_values
from eagle_jax.config import HeadConfig
from eagle_jax.core.types import Params


def save_head_checkpoint(
    config: HeadConfig,
    params: Params,
    directory: str | os.PathLike[str],
    dtype: str = "bfloat16",
    *,
    embedding: Any | None = None,
) -> None:
    """Writes a head in the official layout of its kind (EAGLE-1/2 `layers.0.`; EAGLE-3 `midlayer.`, d2t, t2d).

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
    """Writes a head's tensors under the names of a layout, beside their config.json.

    Args:
      values: the config.json. prefix: of the names of the one layer's tensors.
      params, dtype, embedding: as in `save_head_checkpoint`.
      full_tables: d2t and t2d are there even where draft ids are target ids.

    Raises:
      CheckpointError: as `save_head_checkpoint`.
    """
    check_dtype(dtype)
    flat = flatten(params)
    check_params(flat, expected_shapes(config), "the head's parameters:")
    d2t = flat.pop("d2t", None)
    flat = {path.removeprefix("head/"): leaf for path, leaf in flat.items()}
    if embedding is not None and not config.own_embedding:
        shape = (config.layer.vocab_size, config.layer.hidden_size)
        if np.shape(embedding) != shape:
            raise CheckpointError(f"embedding must have shape {list(shape)}, got {list(np.shape(embedding))}.")
        flat["embed_tokens/embedding"] = embedding
    tables = {} if d2t is None else _vocabulary_tensors(np.asarray(d2t), config.layer.vocab_size, full_tables)
    with replacing(Path(directory)) as staging:
        write_json(staging / "config.json", values)
        write_weights(
            staging, flat, HEAD, check_dtype(dtype), rename=lambda name: name.replace("layers.0.", prefix), extra=tables
        )


def _vocabulary_tensors(d2t: np.ndarray, vocab: int, full_tables: bool) -> dict[str, np.ndarray]:
    """Returns `d2t` and `t2d` as stored; empty if draft ids are target ids, unless `full_tables`."""
    if len(d2t) == vocab and not d2t.any() and not full_tables:
        return {}
    difference = d2t.astype(np.int64)
    ids = difference + np.arange(len(difference))
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != len(ids):
        raise CheckpointError(f"d2t does not map draft ids to distinct target ids below {vocab}")
    reached = np.zeros((vocab,), bool)
    reached[ids] = True
    return {"d2t": difference, "t2d": reached}
