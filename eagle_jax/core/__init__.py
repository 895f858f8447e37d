"""Exports the engine: pure functions over explicit parameters. No Flax, no files, no host code."""

from eagle_jax.core.loop import emitted_log_probs, emitted_tokens, extend, generate, prefill, required_slots, step
from eagle_jax.core.randomness import RowRandomness, verify_key
from eagle_jax.core.sampling import LogProbs, make_sampling, noise, process_logits
from eagle_jax.core.types import (
    FINITE,
    PADDING,
    ROOT,
    Acceptance,
    Batch,
    Drafter,
    DraftTree,
    Engine,
    GenerateState,
    KVCache,
    NewKV,
    Params,
    Sampling,
    Sizes,
    StepInfo,
    TargetFn,
    TargetOutput,
    Verified,
    empty_cache,
    empty_tree,
)
from eagle_jax.core.verify import VerifyFn, deterministic

__all__ = [
    "FINITE", "PADDING", "ROOT", "Acceptance", "Batch", "DraftTree", "Drafter", "Engine", "GenerateState", "KVCache",
    "LogProbs", "NewKV", "Params", "RowRandomness", "Sampling", "Sizes", "StepInfo", "TargetFn", "TargetOutput",
    "Verified", "VerifyFn", "deterministic", "emitted_log_probs", "emitted_tokens", "empty_cache", "empty_tree",
    "extend", "generate", "make_sampling", "noise", "prefill", "process_logits", "required_slots", "step",
    "verify_key",
]  # fmt: skip
