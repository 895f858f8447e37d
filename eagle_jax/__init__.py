"""EAGLE speculative decoding in JAX: the target model's own text, several tokens per pass."""

from eagle_jax.api import (
    DraftHead,
    GenerateOutput,
    StreamChunk,
    Target,
    generate,
    load_demo,
    load_drafter,
    load_target,
    shard,
    stream,
)
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig, RopeConfig, TreeConfig
from eagle_jax.types import Drafter, DraftTree, KVCache, Sampling, TargetFn

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DecoderConfig",
    "DraftHead",
    "DraftTree",
    "Drafter",
    "GenerateOutput",
    "HeadConfig",
    "KVCache",
    "RopeConfig",
    "Sampling",
    "StreamChunk",
    "Target",
    "TargetFn",
    "TreeConfig",
    "generate",
    "load_demo",
    "load_drafter",
    "load_target",
    "shard",
    "stream",
]
