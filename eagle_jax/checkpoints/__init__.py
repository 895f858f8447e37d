"""Models on disk: Hugging Face targets and EAGLE heads, read strictly and written atomically."""

from eagle_jax.checkpoints.errors import CheckpointError
from eagle_jax.checkpoints.head import load_head_checkpoint
from eagle_jax.checkpoints.hub import checkpoint_directory, tokenizer_directory
from eagle_jax.checkpoints.save import save_head_checkpoint, save_target_checkpoint
from eagle_jax.checkpoints.target import load_target_checkpoint, read_target_config

__all__ = [
    "CheckpointError",
    "checkpoint_directory",
    "load_head_checkpoint",
    "load_target_checkpoint",
    "read_target_config",
    "save_head_checkpoint",
    "save_target_checkpoint",
    "tokenizer_directory",
]
