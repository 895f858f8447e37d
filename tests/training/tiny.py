"""Random parameters and packed texts for tests of losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.packed import PackedTokens


def random_params(init: Callable[..., Any], config: Any, seed: int = 0, size: float = 0.4) -> Any:
    """Returns normal weights shaped as `init(config, key)`; size 0.4 makes attention and norms matter."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    return jax.tree.map(lambda leaf: jnp.asarray(size * rng.normal(size=leaf.shape), leaf.dtype), shapes)


def packed_texts(lengths: tuple[tuple[int, ...], ...], width: int, vocab: int) -> PackedTokens:
    """Returns rows of `width` tokens with documents of these lengths; most tokens are supervised."""
    rng = np.random.default_rng(4)
    segments, positions = np.zeros((2, len(lengths), width), np.int32)
    for row, sizes in enumerate(lengths):
        documents = np.repeat(np.arange(len(sizes)), sizes)
        segments[row, : len(documents)] = documents + 1
        positions[row, : len(documents)] = np.concatenate([np.arange(size) for size in sizes])
    supervised = (rng.random(segments.shape) < 0.8) & (positions > 0)
    tokens = rng.integers(0, vocab, segments.shape, np.int32)
    return PackedTokens(*map(jnp.asarray, (tokens, supervised, segments, positions)))
