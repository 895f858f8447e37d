"""Exports the pure functions of training: losses and updates of heads, draft models and small targets."""

from eagle_jax.training.draft_models import Divergence, distillation_loss, medusa_loss
from eagle_jax.training.hardware import PEAK, compiler_options, keep_freed_memory, peak_flops, product_flops
from eagle_jax.training.initialisation import fresh_draft_model, fresh_head, fresh_medusa, fresh_target
from eagle_jax.training.losses import count_rows
from eagle_jax.training.objective import PRESETS, Objective, TargetOutputs
from eagle_jax.training.on_policy import Rollouts, adapt, gather_replies, pack_replies, rollout_taps
from eagle_jax.training.optimisers import OptimiserKind, head_optimiser, target_optimiser
from eagle_jax.training.train_steps import (
    Frozen,
    HeadTrainState,
    MicroBatch,
    UpdateReport,
    feature_scale,
    fold_scale,
    head_loss,
    head_train_step,
    observe,
    read_target,
    train_step,
)

__all__ = [
    "PEAK", "PRESETS", "Divergence", "Frozen", "HeadTrainState", "MicroBatch", "Objective", "OptimiserKind", "Rollouts",
    "TargetOutputs", "UpdateReport", "adapt", "compiler_options", "count_rows", "distillation_loss", "feature_scale",
    "fold_scale", "fresh_draft_model", "fresh_head", "fresh_medusa", "fresh_target", "gather_replies", "head_loss",
    "head_optimiser", "head_train_step", "keep_freed_memory", "medusa_loss", "observe", "pack_replies", "peak_flops",
    "product_flops", "read_target", "rollout_taps", "target_optimiser", "train_step",
]  # fmt: skip
