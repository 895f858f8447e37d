"""Writes a target model in the format that `transformers` loads: the whole directory appears, or nothing changes."""

from __future__ import annotations

import os
from pathlib import Path

from eagle_jax.checkpoints.files.mapping import DECODER, check_dtype, expected_shapes, flatten
from eagle_jax.checkpoints.files.staging import replacing, write_json
from eagle_jax.checkpoints.files.weights import MAX_SHARD_BYTES, check_params, write_weights
from eagle_jax.checkpoints.targets.config import hf_config
from eagle_jax.checkpoints.targets.gpt2 import GPT2, fused, gpt2_values
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
    gpt2 = config.block == "gpt2"
    values = (gpt2_values if gpt2 else hf_config)(config, dtype)
    flat = flatten(params)
    check_params(flat, expected_shapes(config), "the target's parameters:")
    generation = {"bos_token_id": values["bos_token_id"], "eos_token_id": values["eos_token_id"]}
    with replacing(Path(directory)) as staging:
        write_json(staging / "config.json", values)
        write_json(staging / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
        written, table = (fused(flat), GPT2) if gpt2 else (flat, DECODER)
        write_weights(staging, written, table, file_dtype, max_shard_bytes=max_shard_bytes)
