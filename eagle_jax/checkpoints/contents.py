"""What a checkpoint directory holds: for the message of a loader that was given another kind."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from eagle_jax.checkpoints.errors import CheckpointError
from eagle_jax.checkpoints.head_config import canonical_name
from eagle_jax.checkpoints.tensors import TensorReader, read_json

LOADERS = {
    "a model": "load_target, or load_draft_model for a small one that drafts (--target, --draft-model)",
    "an EAGLE head": "load_drafter (--eagle2 or --eagle3)",
    "Medusa heads": "load_medusa (--medusa)",
    "Hydra heads": "load_medusa (--hydra)",
}
"""By what there is, what loads it; in brackets the options of programs that compare methods."""
_LAYER = re.compile(r"(model\.|transformer\.)?(layers|h)\.1\.")


def held(directory: Path) -> str | None:
    """One of `LOADERS`; None for what is none of them, or cannot be read."""
    with contextlib.suppress(CheckpointError):  # the caller is about to say what is wrong with it
        values = read_json(directory / "config.json")
        for kind in ("medusa", "hydra"):
            if f"{kind}_num_heads" in values:
                return f"{kind.capitalize()} heads"
        with TensorReader(directory) as reader:
            names = {canonical_name(name) for name in reader.infos}
        if "fc.weight" in names:
            return "an EAGLE head"
        if any(_LAYER.match(name) for name in names):
            return "a model"
    return None


@contextlib.contextmanager
def wanting(directory: Path, *wanted: str) -> Iterator[None]:
    """Within it a checkpoint of another kind is refused by what it is, and not by the tensors that it lacks.

    Args:
      wanted: of `LOADERS`.

    Raises:
      CheckpointError: naming the directory, what it holds, and what loads that.
    """
    try:
        yield
    except CheckpointError as error:
        found = held(directory)
        if found is None or found in wanted:
            raise
        raise CheckpointError(f"{directory} holds {found} and not {wanted[0]}: it is for {LOADERS[found]}") from error
