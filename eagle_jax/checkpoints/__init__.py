"""Reads and writes models on disk: Hugging Face targets, draft heads, training checkpoints."""

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.checkpoints.files.hub import Hub, checkpoint_directory, config_directory, tokenizer_directory
from eagle_jax.checkpoints.heads.load import load_head_checkpoint
from eagle_jax.checkpoints.heads.medusa import load_medusa_checkpoint, save_medusa_checkpoint
from eagle_jax.checkpoints.heads.save import (
    carries_embedding,
    check_unoccupied,
    export_head,
    save_head_checkpoint,
    stored_dtype,
)
from eagle_jax.checkpoints.targets.files import load_target_checkpoint, read_target_config, save_target_checkpoint
from eagle_jax.checkpoints.targets.tokens import check_same_tokens

__all__ = [
    "CheckpointError",
    "Hub",
    "carries_embedding",
    "check_same_tokens",
    "check_unoccupied",
    "checkpoint_directory",
    "config_directory",
    "export_head",
    "load_head_checkpoint",
    "load_medusa_checkpoint",
    "load_target_checkpoint",
    "read_target_config",
    "save_head_checkpoint",
    "save_medusa_checkpoint",
    "save_target_checkpoint",
    "stored_dtype",
    "tokenizer_directory",
]
