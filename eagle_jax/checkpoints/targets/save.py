"""Writes a target model as `transformers` loads it: a whole directory, or nothing."""

from __future__ import annotations

import os
from pathlib import Path

from eagle_jax.checkpoints.files.mapping import check_dtype, expected_shapes, flatten
from eagle_jax.checkpoints.files.staging import replacing, write_json
from eagle_jax.checkpoints.files.weights import MAX_SHARD_BYTES, check_params, write_weights
from eagle_jax.checkpoints.targets.config import config_values
from eagle_jax.checkpoints.targets.families import FAMILIES
from eagle_jax.config import DecoderConfig
from eagle_jax.core.types import Params


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
    file_dtype = check_dtype(dtype)
    values = config_values(config, dtype)
    family = FAMILIES[config.architecture]
    flat = flatten(params)
    check_params(flat, expected_shapes(config), "the target's parameters:")
    generation = {"bos_token_id": values["bos_token_id"], "eos_token_id": values["eos_token_id"]}
    with replacing(Path(directory)) as staging:
        write_json(staging / "config.json", values)
        write_json(staging / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
        write_weights(staging, family.joined(flat), family.table, file_dtype, max_shard_bytes=max_shard_bytes)
