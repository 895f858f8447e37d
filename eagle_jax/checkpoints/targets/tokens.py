"""Checks that a small draft model has its target's tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.checkpoints.files.fields import Fields
from eagle_jax.checkpoints.files.hub import tokenizer_directory
from eagle_jax.checkpoints.files.tensors import read_json

FEW = 0.01
"""Largest share of ids that one tokenizer may lack, such as special tokens of the larger model's chats."""


def check_same_tokens(
    draft: str | os.PathLike[str],
    target: str | os.PathLike[str] | None,
    sizes: tuple[int, int],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> str | None:
    """Compares the tokens of every id that both have; sizes may differ by padding rows.

    Without a tokenizer that can be read as a table, compares files byte by byte, or else the sizes.

    Args:
      target: None for a target in memory. sizes: of both vocabularies.
      revision: of the draft model.

    Returns:
      None if the tokenizers were compared; if only the sizes could be, a warning with what is assumed.

    Raises:
      CheckpointError: the draft model has another tokenizer; names a token.
    """
    remedy = f"a draft model must have its target's tokenizer: {draft} is not one for {target or 'this target'}"
    places = [tokenizer_directory(draft, revision=revision, token=token, cache_dir=cache_dir)]
    if target is not None:
        places.append(tokenizer_directory(target, token=token, cache_dir=cache_dir))
        ours, theirs = (_tokens(place) for place in places)
        if ours is not None and theirs is not None:
            for number in sorted(ours.keys() & theirs.keys()):
                if ours[number] != theirs[number]:
                    raise CheckpointError(
                        f"token {number} is {ours[number]!r} in the draft model and {theirs[number]!r} in the target; "
                        f"{remedy}"
                    )
            alone = ours.keys() ^ theirs.keys()
            if len(alone) > FEW * len(theirs):
                raise CheckpointError(
                    f"{len(alone)} token ids, {min(alone)} the first, exist in one tokenizer only; {remedy}"
                )
            return None
        files = [place / "tokenizer.model" for place in places]
        if all(file.is_file() for file in files):
            if files[0].read_bytes() != files[1].read_bytes():
                raise CheckpointError(f"their tokenizer.model differ; {remedy}")
            return None
    if sizes[0] != sizes[1]:
        raise CheckpointError(f"vocabularies of {sizes[0]} and {sizes[1]} tokens; {remedy}")
    if not _has_tokenizer(places[0]):
        return f"draft model {draft} has no tokenizer files: assuming the target's"
    if target is None or not _has_tokenizer(places[1]):
        return f"target {target or 'in memory'} has no tokenizer files: assuming those of draft model {draft}"
    return (
        f"the tokenizer files of draft model {draft} and target {target} are of different kinds and were not compared: "
        "assuming one tokenizer"
    )


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model"))


def _tokens(directory: Path) -> dict[int, str] | None:
    """Reads {id: token} of a fast tokenizer or of `vocab.json`; None without either.

    Raises:
      CheckpointError: the file holds no table of tokens.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        path = directory / "vocab.json"
        if not path.is_file():
            return None
        return _by_id(read_json(path), path)
    content = Fields(read_json(path), path)
    vocab = content.mapping("model").values.get("vocab") or {}
    if isinstance(vocab, list):  # Unigram models list [token, score], the others map tokens to ids.
        if not all(isinstance(row, list) and row and isinstance(row[0], str) for row in vocab):
            raise CheckpointError(f"{path}: model.vocab must be a list of [token, score] pairs")
        pairs = dict(enumerate(row[0] for row in vocab))
    else:
        pairs = _by_id(content.mapping("model").mapping("vocab").values, path)
    added = content.values.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        content.fail("added_tokens", "a list of tokens with id and content")
    each = [Fields(token, path, f"added_tokens[{number}].") for number, token in enumerate(added)]
    return pairs | {token.integer("id", least=0): token.text("content") for token in each}


def _by_id(vocab: Mapping[str, Any], path: Path) -> dict[int, str]:
    if not all(type(number) is int for number in vocab.values()):
        raise CheckpointError(f"{path}: the vocabulary must map tokens to integers")
    return {number: text for text, number in vocab.items()}
