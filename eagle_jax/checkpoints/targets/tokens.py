"""Checks that a small draft model has its target's tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

from tokenizers import Tokenizer

from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.checkpoints.files.hub import Hub, tokenizer_directory

_FEW = 0.01  # largest share of ids that one tokenizer may lack, such as special tokens of the larger model's chats
_TABLE, _OTHERS = "tokenizer.json", ("tokenizer.model", "vocab.json")


def check_same_tokens(
    draft: str | os.PathLike[str], target: str | os.PathLike[str] | None, sizes: tuple[int, int], **hub: Unpack[Hub]
) -> str | None:
    """Compares the tokens of every id that both have; sizes may differ by padding rows.

    Without a tokenizer.json in both, compares other tokenizer files byte by byte, or else the sizes.

    Args:
      target: None for a target in memory. sizes: of both vocabularies.
      hub: revision (of the draft model), token and cache_dir of hub ids.

    Returns:
      None if the tokenizers were compared; if only the sizes could be, a warning with what is assumed.

    Raises:
      CheckpointError: the draft model has another tokenizer; names a token.
    """
    remedy = f"a draft model must have its target's tokenizer: {draft} is not one for {target or 'this target'}"
    if target is not None:
        ours_at = tokenizer_directory(draft, **hub)
        hub["revision"] = None
        places = (ours_at, tokenizer_directory(target, **hub))
        if all((place / _TABLE).is_file() for place in places):
            ours, theirs = (_tokens(place / _TABLE) for place in places)
            _compare(ours, theirs, remedy)
            return None
        for name in _OTHERS:
            files = [place / name for place in places]
            if all(file.is_file() for file in files):
                if files[0].read_bytes() != files[1].read_bytes():
                    raise CheckpointError(f"their {name} differ; {remedy}")
                return None
    if sizes[0] != sizes[1]:
        raise CheckpointError(f"vocabularies of {sizes[0]} and {sizes[1]} tokens; {remedy}")
    return (
        f"draft model {draft} and target {target or 'in memory'} have no tokenizer files of one kind to compare: "
        "assuming one tokenizer"
    )


def _compare(ours: dict[int, str], theirs: dict[int, str], remedy: str) -> None:
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            raise CheckpointError(
                f"token {number} is {ours[number]!r} in the draft model and {theirs[number]!r} in the target; {remedy}"
            )
    alone = ours.keys() ^ theirs.keys()
    if len(alone) > _FEW * len(theirs):
        raise CheckpointError(f"{len(alone)} token ids, {min(alone)} the first, exist in one tokenizer only; {remedy}")


def _tokens(path: Path) -> dict[int, str]:
    """Returns {id: token} of a tokenizer.json."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no subclass
        raise CheckpointError(f"{path}: cannot be read as JSON of a tokenizer: {error}") from error
    return {number: token for token, number in tokenizer.get_vocab().items()}
