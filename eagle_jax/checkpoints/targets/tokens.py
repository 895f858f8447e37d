"""Checks that a small draft model has its target's tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

from tokenizers import Tokenizer

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.checkpoints.files.gguf import GgufFile, is_gguf
from eagle_jax.checkpoints.files.hub import Hub, tokenizer_directory

_FEW = 0.01  # largest share of ids that one tokenizer may lack, such as special tokens of the larger model's chats
_REMEDY = "Choose a draft model that was trained with this tokenizer."
_UNUSED = 5  # llama.cpp's type of the tokens that fill up a vocabulary
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
    rule = f"draft model {draft} must have the tokenizer of {target or 'its target'}"
    if target is not None:
        ours_at = tokenizer_directory(draft, **hub)
        hub["revision"] = None
        places = (ours_at, tokenizer_directory(target, **hub))
        tables = [place if is_gguf(place) else place / _TABLE for place in places]
        if all(table.is_file() for table in tables):
            ours, theirs = (_tokens(table) for table in tables)
            for number in sorted(ours.keys() & theirs.keys()):
                if ours[number] != theirs[number]:
                    got = f"{ours[number]!r} for {theirs[number]!r} (token {number})"
                    raise CheckpointError(f"{rule}, got {got}. {_REMEDY}")
            alone = ours.keys() ^ theirs.keys()
            if len(alone) > _FEW * len(theirs):
                got = f"{len(alone)} token ids, from {min(alone)}, that only one has"
                raise CheckpointError(f"{rule}, got {got}. {_REMEDY}")
            return None
        for name in _OTHERS:
            files = [place / name for place in places]
            if all(file.is_file() for file in files):
                if files[0].read_bytes() != files[1].read_bytes():
                    raise CheckpointError(f"{rule}, got another {name}. {_REMEDY}")
                return None
    if sizes[0] != sizes[1]:
        raise CheckpointError(f"{rule} with {sizes[1]} tokens, got {sizes[0]} tokens. {_REMEDY}")
    return (
        f"draft model {draft} and target {target or 'in memory'} have no tokenizer files of one kind to compare: "
        "assuming one tokenizer"
    )


def _tokens(path: Path) -> dict[int, str]:
    """Returns {id: token} of a tokenizer.json or a GGUF file."""
    if is_gguf(path):
        metadata = GgufFile(path).metadata
        tokens, kinds = (metadata.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type"))
        unused = {number for number, kind in enumerate(kinds) if kind == _UNUSED}
        return {number: token for number, token in enumerate(tokens) if number not in unused}
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no subclass
        raise CheckpointError(f"{path}: cannot be read as JSON of a tokenizer ({error}). Fetch it again.") from error
    return {number: token for token, number in tokenizer.get_vocab().items()}
