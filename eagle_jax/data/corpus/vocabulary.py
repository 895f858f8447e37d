"""Chooses the draft vocabulary of an EAGLE-3 head: the most frequent supervised tokens."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from eagle_jax.checkpoints.files.staging import write_whole
from eagle_jax.config import ConfigError
from eagle_jax.data.corpus.documents import Corpus


def count_tokens(tokens: np.ndarray, supervised: np.ndarray, vocab_size: int) -> np.ndarray:
    """Counts how often every token is supervised, [V] int64."""
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
    return kept, kept - np.arange(size, dtype=np.int32), coverage_of(counts, kept)


def coverage_of(counts: np.ndarray, kept: np.ndarray) -> float:
    """Returns the share of the counted tokens that `kept` covers."""
    return float(counts[kept].sum() / max(counts.sum(), 1))


def cached_vocabulary(
    corpus: Corpus, key: str, size: int, vocab_size: int, cache: Path
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the draft vocabulary of a corpus; counts once and caches `vocabulary-KEY-SIZE.npz`.

    A file that is damaged, or of another target's vocabulary, is made anew.

    Args:
      key: of the corpus, as `corpus_key` gives it. size: Vd. vocab_size: V. cache: directory, made where it is missing.

    Raises:
      ConfigError: as `draft_vocabulary`.
    """
    path = cache / f"vocabulary-{key}-{size}.npz"
    found = _read(path, size, vocab_size)
    if found is not None:
        return found
    counts = count_tokens(corpus.tokens, corpus.supervised, vocab_size)
    kept, d2t, coverage = draft_vocabulary(counts, size)
    content = io.BytesIO()
    np.savez(content, kept=kept, coverage=coverage, vocab_size=vocab_size)
    write_whole(path, content.getvalue())
    return kept, d2t, coverage


def _read(path: Path, size: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray, float] | None:
    try:
        with np.load(path, allow_pickle=False) as stored:
            kept, coverage = stored["kept"], float(stored["coverage"])
            whole = int(stored["vocab_size"]) == vocab_size and kept.shape == (size,) and kept.dtype == np.int32
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile):
        return None
    return (kept, kept - np.arange(size, dtype=np.int32), coverage) if whole else None
