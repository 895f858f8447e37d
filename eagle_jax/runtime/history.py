"""Packs earlier samples and their prompts for prompt lookup, after checks."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_jax.drafters import History, pack_history
from eagle_jax.runtime.tokens import token_rows

NESTING = "Pass a list of such lists."


def packed_history(samples: Any, vocab: int, prompts: Any = None, ngram: int = 0, name: str = "history") -> History:
    """Returns `pack_history` of samples, each behind the last `ngram` tokens of its prompt if there are prompts.

    Args:
      samples: token ids per sample; empty ones are left out. vocab: the target's. prompts: one per sample, or None.
      name: of the samples in messages.

    Raises:
      ValueError: a sample or prompt is not a list of token ids, or their numbers differ.
    """
    rows = token_rows(samples, name, vocab, nesting=NESTING, empty=True)
    if prompts is None:
        return pack_history([row for row in rows if row.size])
    owners = token_rows(prompts, "prompts", vocab, nesting=NESTING, empty=True)
    if len(owners) != len(rows):
        raise ValueError(
            f"prompts must have one prompt for each of the {len(rows)} samples, got {len(owners)}. Give as many of "
            "both."
        )
    pairs = [(row, owner) for row, owner in zip(rows, owners, strict=True) if row.size]
    return pack_history([np.concatenate([owner[-ngram:], row]) for row, owner in pairs], [owner for _, owner in pairs])
