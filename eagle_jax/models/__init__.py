"""Exports Flax Linen modules: one decoder for all families, EAGLE, Medusa and Hydra heads."""

from eagle_jax.models.attention import by_query_blocks, cut_rows, within_window
from eagle_jax.models.decoder import Decoder, init_params, target_fn
from eagle_jax.models.heads import EagleHead, init_head_params, split_embeddings
from eagle_jax.models.layers import LayerOutput, Linear, Norm
from eagle_jax.models.medusa import MedusaHeads, init_medusa_params
from eagle_jax.models.presets import eagle3_head
from eagle_jax.models.wrapped import target_from_layers

__all__ = [
    "Decoder", "EagleHead", "LayerOutput", "Linear", "MedusaHeads", "Norm", "by_query_blocks", "cut_rows",
    "eagle3_head", "init_head_params", "init_medusa_params", "init_params", "split_embeddings", "target_fn",
    "target_from_layers", "within_window",
]  # fmt: skip
