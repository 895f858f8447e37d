"""Whether two checkpoints have the same tokens: what a small draft model must share with its target."""

from __future__ import annotations

import os
from pathlib import Path

from eagle_jax.checkpoints.errors import CheckpointError
from eagle_jax.checkpoints.hub import tokenizer_directory
from eagle_jax.checkpoints.tensors import read_json

FEW = 0.01
"""Share of the target's tokens that may be missing: special tokens that only the larger model's chats use."""


def check_same_tokens(
    draft: str | os.PathLike[str],
    target: str | os.PathLike[str],
    sizes: tuple[int, int],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Compares the tokens of every id that both have; sizes may differ by rows that only pad an embedding.

    Where a checkpoint has no tokenizer that can be read as a table, files are compared as they are, or else the sizes.

    Args:
      sizes: of their vocabularies. revision: of the draft model.

    Raises:
      CheckpointError: the draft model has another tokenizer, naming a token.
    """
    places = (
        tokenizer_directory(draft, revision=revision, token=token, cache_dir=cache_dir),
        tokenizer_directory(target, token=token, cache_dir=cache_dir),
    )
    remedy = f"a draft model must have its target's tokenizer: {draft} is not one for {target}"
    own, wanted = (_tokens(place) for place in places)
    if own is not None and wanted is not None:
        for number in sorted(own.keys() & wanted.keys()):
            if own[number] != wanted[number]:
                raise CheckpointError(f"token {number} is {own[number]!r} here and {wanted[number]!r} there; {remedy}")
        alone = own.keys() ^ wanted.keys()
        if len(alone) > FEW * len(wanted):
            raise CheckpointError(f"{len(alone)} token ids, {min(alone)} the first, are only in one of them; {remedy}")
        return
    files = [place / "tokenizer.model" for place in places]
    if all(file.is_file() for file in files):
        if files[0].read_bytes() != files[1].read_bytes():
            raise CheckpointError(f"their tokenizer.model differ; {remedy}")
    elif sizes[0] != sizes[1]:
        raise CheckpointError(f"vocabularies of {sizes[0]} and {sizes[1]} tokens; {remedy}")


def _tokens(directory: Path) -> dict[int, str] | None:
    """Id to token of a fast tokenizer or of a `vocab.json`; None where there is neither."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        path = directory / "vocab.json"
        if not path.is_file():
            return None
        return {number: text for text, number in read_json(path).items()}
    content = read_json(path)
    vocab = content.get("model", {}).get("vocab", {})
    # Unigram models list [token, score], the others map tokens to ids.
    pairs = enumerate(row[0] for row in vocab) if isinstance(vocab, list) else ((n, text) for text, n in vocab.items())
    return dict(pairs) | {added["id"]: added["content"] for added in content.get("added_tokens", [])}
