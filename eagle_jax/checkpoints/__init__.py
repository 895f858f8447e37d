"""Reads and writes models on disk: Hugging Face targets, draft heads, training checkpoints."""

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.checkpoints.files.gguf import GgufFile, is_gguf
from eagle_jax.checkpoints.files.hub import TOKENIZER, Hub, checkpoint_directory, config_directory, tokenizer_directory
from eagle_jax.checkpoints.files.staging import TEMPORARY, named_errors, sweep, write_whole
from eagle_jax.checkpoints.files.tensors import read_json
from eagle_jax.checkpoints.heads.load import load_head_checkpoint
from eagle_jax.checkpoints.heads.medusa import load_medusa_checkpoint, save_medusa_checkpoint
from eagle_jax.checkpoints.heads.save import carries_embedding, export_head, save_head_checkpoint, stored_dtype
from eagle_jax.checkpoints.targets.files import load_target_checkpoint, read_target_config, save_target_checkpoint
from eagle_jax.checkpoints.targets.tokens import check_same_tokens

__all__ = [
    "TEMPORARY", "TOKENIZER", "CheckpointError", "GgufFile", "Hub", "carries_embedding", "check_same_tokens",
    "checkpoint_directory", "config_directory", "export_head", "is_gguf", "load_head_checkpoint",
    "load_medusa_checkpoint", "load_target_checkpoint", "named_errors", "read_json", "read_target_config",
    "save_head_checkpoint", "save_medusa_checkpoint", "save_target_checkpoint", "stored_dtype", "sweep",
    "tokenizer_directory", "write_whole",
]  # fmt: skip
