"""Exports the engine: pure functions over explicit parameters. It imports no Flax itself."""

from eagle_jax.core.cache import commit
from eagle_jax.core.costs import CycleCost, Payoff
from eagle_jax.core.lanes import Jobs, Replies, RolloutState, advance_rollout, default_room, rollout, start_rollout
from eagle_jax.core.loop import emitted_log_probs, emitted_tokens, generate, step
from eagle_jax.core.prompts import extend, prefill, required_slots
from eagle_jax.core.randomness import RowRandomness, gumbel, row_keys, threefry_keys, uniform, verify_key
from eagle_jax.core.sampling import LogProbs, largest, make_sampling, noise, process_logits
from eagle_jax.core.tree import ancestor_mask, node_depths
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
from eagle_jax.core.verify import VerifyFn, deterministic, walk

__all__ = [
    "FINITE", "PADDING", "ROOT", "Acceptance", "Batch", "CycleCost", "DraftTree", "Drafter", "Engine", "GenerateState",
    "Jobs", "KVCache", "LogProbs", "NewKV", "Params", "Payoff", "Replies", "RolloutState", "RowRandomness", "Sampling",
    "Sizes", "StepInfo", "TargetFn", "TargetOutput", "Verified", "VerifyFn", "advance_rollout", "ancestor_mask",
    "commit", "default_room", "deterministic", "emitted_log_probs", "emitted_tokens", "empty_cache", "empty_tree",
    "extend", "generate", "gumbel", "largest", "make_sampling", "node_depths", "noise", "prefill",
    "process_logits", "required_slots", "rollout", "row_keys", "start_rollout", "step", "threefry_keys", "uniform",
    "verify_key", "walk",
]  # fmt: skip
