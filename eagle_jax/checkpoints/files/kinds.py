"""Detects which kind of model a checkpoint holds, for the error of a loader of another kind."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from eagle_jax.checkpoints.files.fields import CheckpointError, Fields
from eagle_jax.checkpoints.files.mapping import canonical_name

Kind = Literal["model", "eagle2", "eagle3", "medusa", "hydra", "other"]

DESCRIPTIONS: dict[Kind, tuple[str, str]] = {
    "model": ("a whole model", "Load it with load_target (--target), or as a small draft model with load_draft_model "
              "(--draft-model of infer.*, --kind draft_model of train.evaluate)."),
    "eagle2": ("an EAGLE-1/2 head", "Load it with load_drafter (--eagle2 of infer.*, --head of train.*), together with "
               "the model it was trained for."),
    "eagle3": ("an EAGLE-3 head", "Load it with load_drafter (--eagle3 of infer.*, --head of train.*), together with "
               "the model it was trained for."),
    "medusa": ("Medusa heads", "Load them with load_medusa (--medusa of infer.*, --kind medusa of train.evaluate), "
               "together with the model they were trained for."),
    "hydra": ("Hydra heads", "Load them with load_medusa (--hydra of infer.*, --kind medusa of train.evaluate), "
              "together with the model they were trained for."),
    "other": ("a draft head of a kind that is not read here", "Give the model it was trained for."),
}  # fmt: skip
"""Name of each kind, and the function and the options that load it."""
MODELS: tuple[Kind, ...] = ("model",)
EAGLES: tuple[Kind, ...] = ("eagle2", "eagle3", "other")
MEDUSAS: tuple[Literal["medusa", "hydra"], ...] = ("medusa", "hydra")
"""Kinds that each loader reads; the loader of EAGLE heads reports other draft heads itself."""


def kind_of(values: Mapping[str, Any], names: Collection[str] = (), where: object = "config.json") -> Kind | None:
    """Returns the kind of a checkpoint by its config.json and tensor names; None if it is not clear.

    Args:
      names: of the tensors as stored. Without them, EAGLE-1/2 heads are not detected: their config.json is that of
        a model.

    Raises:
      CheckpointError: architectures is no list of strings.
    """
    for heads in MEDUSAS:
        # A model that was trained together with such heads names them in its own config.json.
        if f"{heads}_num_heads" in values and "hidden_size" not in values:
            return heads
    if (algorithm := values.get("speculators_model_type")) is not None:
        return "eagle3" if algorithm == "eagle3" else "other"
    stored = {canonical_name(name.removeprefix("transformer.")) for name in names}
    named = " ".join(Fields(values, where).names_of("architectures")).lower()
    if re.search(r"peagle|dflash|dspark|mtp|nextn|assistant", named):
        return "other"
    if "medusa" in named:
        return "medusa"
    if "eagle3" in named or values.get("draft_vocab_size") or "layers.0.hidden_norm.weight" in stored:
        return "eagle3"
    if "eagle" in named or "fc.weight" in stored:
        return "eagle2"
    # The embedding of GPT-2, or the last norm of the others, which EAGLE-1/2 heads have not.
    return "model" if stored & {"wte.weight", "norm.weight", "layers.1.input_layernorm.weight"} else None


def check_kind(
    where: object, accepted: Collection[Kind], values: Mapping[str, Any], names: Collection[str] = ()
) -> None:
    """Checks that the checkpoint in the directory `where` is of an accepted kind.

    Raises:
      CheckpointError: it is of another kind; the message names the loader of that kind.
    """
    kind = kind_of(values, names, f"{where}/config.json")
    if kind is not None and kind not in accepted:
        wanted = " or ".join(DESCRIPTIONS[one][0] for one in accepted if one != "other")
        found, remedy = DESCRIPTIONS[kind]
        raise CheckpointError(f"{where} must hold {wanted}, got {found}. {remedy}")
