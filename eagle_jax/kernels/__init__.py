"""Kernels for one kind of device. Each equals a plain definition in `eagle_jax.models`, which selects it."""

from eagle_jax.kernels.gpu_attention import attend_cache
from eagle_jax.kernels.tpu_attention import attend_cached, blocks_read, tile_of

__all__ = ["attend_cache", "attend_cached", "blocks_read", "tile_of"]
