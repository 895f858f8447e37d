"""Exports the drafting methods, one per file: a method builds a `Drafter`."""

from eagle_jax.drafters.combined import combined_drafter
from eagle_jax.drafters.eagle import eagle_drafter
from eagle_jax.drafters.lookahead_decoding import lookahead_drafter
from eagle_jax.drafters.medusa import medusa_drafter
from eagle_jax.drafters.pld import History, pack_history, prompt_lookup_drafter
from eagle_jax.drafters.small_model import small_model_drafter
from eagle_jax.drafters.vanilla import vanilla_drafter

__all__ = [
    "History", "combined_drafter", "eagle_drafter", "lookahead_drafter", "medusa_drafter", "pack_history",
    "prompt_lookup_drafter", "small_model_drafter", "vanilla_drafter",
]  # fmt: skip
