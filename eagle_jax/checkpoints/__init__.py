"""Models on disk: Hugging Face targets and EAGLE heads, read strictly and written atomically."""

from eagle_jax.checkpoints.errors import CheckpointError
from eagle_jax.checkpoints.export import (
    carries_embedding,
    check_unoccupied,
    export_head,
    share_embedding,
    stored_dtype,
)
from eagle_jax.checkpoints.head import load_head_checkpoint
from eagle_jax.checkpoints.hub import checkpoint_directory, config_directory, tokenizer_directory
from eagle_jax.checkpoints.medusa import load_medusa_checkpoint, save_medusa_checkpoint
from eagle_jax.checkpoints.save import save_head_checkpoint, save_target_checkpoint
from eagle_jax.checkpoints.target import load_target_checkpoint, read_target_config, read_target_embedding
from eagle_jax.checkpoints.vocabulary import check_same_tokens

__all__ = [
    "CheckpointError",
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
    "read_target_embedding",
    "save_head_checkpoint",
    "save_medusa_checkpoint",
    "save_target_checkpoint",
    "share_embedding",
    "stored_dtype",
    "tokenizer_directory",
]
