"""Imports models of other JAX libraries from memory: `names` maps parameters by the tables of the other modules."""

from eagle_jax.checkpoints.memory.gemma import gemma_config, gemma_names
from eagle_jax.checkpoints.memory.maxtext import maxtext_leaves, maxtext_names
from eagle_jax.checkpoints.memory.names import Leaf, Names, check_leaves, import_params, leaves_by_path
from eagle_jax.checkpoints.memory.tunix import tunix_config, tunix_names

__all__ = [
    "Leaf", "Names", "check_leaves", "gemma_config", "gemma_names", "import_params", "leaves_by_path",
    "maxtext_leaves", "maxtext_names", "tunix_config", "tunix_names",
]  # fmt: skip
