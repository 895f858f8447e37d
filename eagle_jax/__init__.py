"""EAGLE speculative decoding in JAX: the target model's own text, several tokens per pass."""

from eagle_jax import viz
from eagle_jax.api import GenerateOutput, StreamChunk, generate, load_drafter, load_target, stream
from eagle_jax.bound import BoundDrafter, DraftHead, Medusa, SmallModel, Target, shard
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig, RopeConfig, TreeConfig
from eagle_jax.demo import load_demo
from eagle_jax.detokenize import TextStream, decode_stream
from eagle_jax.finite import NotFiniteError
from eagle_jax.methods import load_draft_model, load_medusa, lookahead, prompt_lookup
from eagle_jax.profile import load_profile
from eagle_jax.types import Drafter, DraftTree, KVCache, Sampling, TargetFn

__version__ = "0.1.0"

__all__ = [
    "BoundDrafter",
    "CheckpointError",
    "ConfigError",
    "DecoderConfig",
    "DraftHead",
    "DraftTree",
    "Drafter",
    "GenerateOutput",
    "HeadConfig",
    "KVCache",
    "Medusa",
    "NotFiniteError",
    "RopeConfig",
    "Sampling",
    "SmallModel",
    "StreamChunk",
    "Target",
    "TargetFn",
    "TextStream",
    "TreeConfig",
    "decode_stream",
    "generate",
    "load_demo",
    "load_draft_model",
    "load_drafter",
    "load_medusa",
    "load_profile",
    "load_target",
    "lookahead",
    "prompt_lookup",
    "shard",
    "stream",
    "viz",
]
