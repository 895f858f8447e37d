"""The draft vocabulary of an EAGLE-3 head: the tokens that are supervised most often."""

from __future__ import annotations

import numpy as np

from eagle_jax.config import ConfigError


def count_tokens(tokens: np.ndarray, supervised: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often every token is supervised, [V] int64."""
    return np.bincount(tokens[supervised], minlength=vocab_size)


def draft_vocabulary(counts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Keeps the `size` most frequent tokens, the lower id on ties.

    Returns:
      kept: [Vd] int32, target ids in ascending order. d2t: [Vd] int32, `kept[i] - i`, as checkpoints store it.
      coverage: share of the counted tokens that are kept.

    Raises:
      ConfigError: `size` is not between 1 and the vocabulary.
    """
    if not 1 <= size <= len(counts):
        raise ConfigError(f"draft vocabulary size {size} must be between 1 and the target's {len(counts)}")
    kept = np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)
    return kept, kept - np.arange(size, dtype=np.int32), float(counts[kept].sum() / max(counts.sum(), 1))
