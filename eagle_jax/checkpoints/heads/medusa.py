"""Reads and writes heads of Medusa, Hydra and Hydra++, in the files and names of their authors."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Unpack

from eagle_jax.checkpoints.files.fields import CheckpointError, Fields
from eagle_jax.checkpoints.files.hub import Hub, head_directory
from eagle_jax.checkpoints.files.kinds import MEDUSAS, check_kind
from eagle_jax.checkpoints.files.mapping import (
    Rule,
    Table,
    check_dtype,
    check_scheme,
    expected_shapes,
    flatten,
    layer_rules,
    linear_rules,
)
from eagle_jax.checkpoints.files.staging import replacing, write_json
from eagle_jax.checkpoints.files.tensors import TensorReader, read_json
from eagle_jax.checkpoints.files.weights import Place, TensorProblems, check_params, plan, read_planned, write_weights
from eagle_jax.checkpoints.targets.config import check_supported
from eagle_jax.config import DecoderConfig, MedusaConfig
from eagle_jax.core.types import Params

_PREFIX = "prefix_embeding_layer."  # as its authors spell it


def load_medusa_checkpoint(
    path_or_hub_id: str | os.PathLike[str],
    target: DecoderConfig,
    dtype: str = "float32",
    *,
    place: Place | None = None,
    weights: str | None = None,
    **hub: Unpack[Hub],
) -> tuple[MedusaConfig, Params]:
    """Loads configuration and parameters of Medusa or Hydra heads; the file decides their number.

    Args:
      target: the model that the heads are for. place, weights, hub: as in `load_target_checkpoint`.

    Raises:
      CheckpointError: no such heads, heads of another width, vocabulary, architecture or model, or values that are not
        finite, naming what does not fit.

    Warns:
      UserWarning: config.json contradicts the file.
    """
    check_dtype(dtype)
    scheme = check_scheme(weights)
    directory = head_directory(path_or_hub_id, **hub)
    where = directory / "config.json"
    values = read_json(where)
    kind = next((kind for kind in MEDUSAS if f"{kind}_num_heads" in values), None)
    if kind is None:
        check_kind(directory, MEDUSAS, values)
        raise CheckpointError(
            f"{where} must hold medusa_num_heads or hydra_num_heads, got neither. Load an EAGLE head with "
            "load_drafter, a model with load_target."
        )
    fields = Fields(values, where)
    check_supported(fields, {})
    for key, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if fields.integer(key, size, null=True) != size:
            fields.fail(key, f"{size}, as the target's", "Take heads that were trained for this target.")
    if kind == "hydra" and not fields.flag("grounded_heads", True):
        fields.fail("grounded_heads", "true or absent", "Convert the heads to Medusa's format.")
    with TensorReader(directory, stem=f"{kind}_lm_head") as reader:
        prefixed = any(name.startswith(_PREFIX) for name in reader.infos)
        matches = (re.fullmatch(r"(?:hydra_mlp\.)?(\d+)\.(\d+)\.linear\.weight", name) for name in reader.infos)
        blocks = {(int(match[1]), int(match[2])) for match in matches if match}
        # Published config.json files name fewer heads. At least one of each: `plan` reports missing tensors.
        heads, layers = max(1, len({head for head, _ in blocks})), max(1, sum(head == 0 for head, _ in blocks))
        for key, found in ((f"{kind}_num_heads", heads), (f"{kind}_num_layers", layers)):
            fields.contradict(key, "the file has", found, fields.integer(key, found))
        if kind == "hydra":
            arch = "prefix-mlp" if prefixed else "mlp"
            if fields.text("hydra_head_arch", arch, null=True) not in ("mlp", "prefix-mlp"):
                fields.fail("hydra_head_arch", "mlp or prefix-mlp", "Load another head: these are not supported.")
            fields.contradict("hydra_head_arch", "the file has", arch)
        prefix = target.one_layer(tie_word_embeddings=False) if prefixed else None
        config = MedusaConfig(kind, target.hidden_size, target.vocab_size, heads, layers, prefix)
        problems = TensorProblems()
        chosen = plan(reader, _table(config), expected_shapes(config), problems)
        problems.raise_if_any(
            f"{directory}: not the {kind} heads of a model that is {target.hidden_size} wide with "
            f"{target.vocab_size} tokens:",
            "Take heads that were trained for this target, or load their own target.",
        )
        return config, {"heads": read_planned(reader, chosen, dtype, place, scheme)}


def save_medusa_checkpoint(
    config: MedusaConfig, params: Params, directory: str | os.PathLike[str], dtype: str = "bfloat16"
) -> None:
    """Writes heads in their authors' layout; other files in the directory are kept.

    Raises:
      CheckpointError: the parameters do not fit `config`, or hold values that are not finite.
    """
    flat = flatten(params["heads"])
    check_params(flat, expected_shapes(config), "the heads' parameters:")
    file_dtype = check_dtype(dtype)
    values = {"model_type": config.kind, f"{config.kind}_num_heads": config.num_heads,
              f"{config.kind}_num_layers": config.num_layers, "torch_dtype": dtype}  # fmt: skip
    if config.kind == "hydra":
        values |= {"grounded_heads": True, "hydra_head_arch": "mlp" if config.prefix is None else "prefix-mlp"}
    with replacing(Path(directory)) as staging:
        write_json(staging / "config.json", values)
        # One file whatever its size: its authors' loaders read no shards.
        stem = f"{config.kind}_lm_head"
        write_weights(staging, flat, _table(config), file_dtype, stem=stem, max_shard_bytes=sys.maxsize)


def _table(config: MedusaConfig) -> Table:
    """Returns rules of the names of Medusa, Hydra or Hydra++; a dropout takes an index in sequences."""
    medusa, prefixed = config.kind == "medusa", config.prefix is not None
    blocks, end = "{i}", f"{{i}}.{config.num_layers}"
    if not medusa:
        blocks, end = "hydra_mlp.{i}", "hydra_lm_head.{i}.1" if prefixed else "hydra_lm_head.{i}"
    rules = [*layer_rules(f"{_PREFIX}layers.0.", "prefix_layer/"), Rule(f"{_PREFIX}norm.weight", "prefix_norm/scale")]
    rules += linear_rules(end, "heads_{i}_lm_head")
    for block in range(config.num_layers):
        place = 2 * block + 1 if prefixed else block
        rules += linear_rules(f"{blocks}.{place}.{{name}}", f"heads_{{i}}_blocks_{block}/{{name}}")
    return Table(tuple(rules), (rf"{_PREFIX}embed_tokens\.weight",))
