"""Generates the target model's own text, several tokens per pass: EAGLE speculative decoding in JAX."""

from eagle_jax import viz
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.config import ConfigError, DecoderConfig, ExpertsConfig, HeadConfig, RopeConfig, TreeConfig
from eagle_jax.core import Drafter, DraftTree, KVCache, Sampling, TargetFn
from eagle_jax.data.chat import TextStream, chat_ids, decode_stream, load_tokenizer, stop_ids
from eagle_jax.devices import DeviceError
from eagle_jax.runtime.compilation import use_compilation_cache
from eagle_jax.runtime.drafters import BoundDrafter, DraftHead, Medusa, SmallModel, lookahead, prompt_lookup, shard
from eagle_jax.runtime.errors import NotFiniteError
from eagle_jax.runtime.generation import GenerateOutput, StreamChunk, generate, stream
from eagle_jax.runtime.loading import load_demo, load_draft_model, load_drafter, load_medusa, load_target
from eagle_jax.runtime.profile import load_profile
from eagle_jax.runtime.rollouts import RolloutOutput, rollout
from eagle_jax.runtime.session import Session
from eagle_jax.runtime.target import Target

__version__ = "0.1.0"

__all__ = [
    "BoundDrafter",
    "CheckpointError",
    "ConfigError",
    "DecoderConfig",
    "DeviceError",
    "DraftHead",
    "DraftTree",
    "Drafter",
    "ExpertsConfig",
    "GenerateOutput",
    "HeadConfig",
    "KVCache",
    "Medusa",
    "NotFiniteError",
    "RolloutOutput",
    "RopeConfig",
    "Sampling",
    "Session",
    "SmallModel",
    "StreamChunk",
    "Target",
    "TargetFn",
    "TextStream",
    "TreeConfig",
    "chat_ids",
    "decode_stream",
    "generate",
    "load_demo",
    "load_draft_model",
    "load_drafter",
    "load_medusa",
    "load_profile",
    "load_target",
    "load_tokenizer",
    "lookahead",
    "prompt_lookup",
    "rollout",
    "shard",
    "stop_ids",
    "stream",
    "use_compilation_cache",
    "viz",
]
