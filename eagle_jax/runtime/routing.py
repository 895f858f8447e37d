"""Measures how often rounding changes the experts of a token between a pass of one token and a pass of many."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eagle_jax.core import KVCache, Params, TargetOutput
from eagle_jax.core.cache import commit
from eagle_jax.models.experts import recorded_routes
from eagle_jax.runtime.target import Target, check_target


def routing_changes(target: Target, tokens: np.ndarray, width: int = 60) -> np.ndarray:
    """Compares the experts of the last `width` tokens of texts: decoded one by one, and in one pass as a tree is.

    Every pass reads a cache of the tokens before. Rounding differs with the shapes of a pass, and two experts whose
    logits are equal within rounding change places.

    Args:
      tokens: [B, S] texts, S > width.

    Returns:
      [L, B, width] bool, L layers with experts: True where the chosen sets differ. Its mean is the rate per choice.

    Raises:
      ValueError: the target has no experts, or the texts are not longer than `width`.
    """
    check_target(target)
    if target.config.experts is None:
        raise ValueError(f"target must have experts, got {target.config.architecture}. Its layers route no tokens.")
    rows, length = np.shape(tokens)
    if not 0 < width < length:
        raise ValueError(f"width must be from 1 to {length - 1}, the texts' length less one, got {width}. Change it.")
    start = length - width

    def run(params: Params, cache: KVCache | None, new: Array) -> tuple[TargetOutput, Array]:
        size = new.shape[1]
        first = jnp.zeros(rows, jnp.int32) if cache is None else cache.length
        positions = first[:, None] + jnp.arange(size)[None]
        with recorded_routes() as chosen:
            out = target.fn.forward(params, new, positions, jnp.tril(jnp.ones((size, size), bool)), cache)
        return out, jnp.sort(jnp.stack(chosen), axis=-1)

    @jax.jit
    def compare(params: Params, texts: Array) -> Array:
        cache = target.fn.init_cache(rows, length)
        # Without the empty cache, which XLA would compute with while it compiles.
        new, count = run(params, None, texts[:, :start])[0].new, jnp.full(rows, start, jnp.int32)
        cache = commit(cache, new, count, windows=target.fn.windows)

        def one(cache: KVCache, token: Array) -> tuple[KVCache, Array]:
            out, chosen = run(params, cache, token[:, None])
            cache = commit(cache, out.new, jnp.ones(rows, jnp.int32), windows=target.fn.windows)
            return cache, chosen[:, :, 0]

        together = run(params, cache, texts[:, start:])[1]
        alone = jnp.moveaxis(jax.lax.scan(one, cache, texts[:, start:].T)[1], 0, 2)
        return jnp.any(together != alone, axis=-1)

    return np.asarray(compare(target.params, jnp.asarray(tokens, jnp.int32)))
