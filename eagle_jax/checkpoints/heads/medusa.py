"""Reads and writes heads of Medusa, Hydra and Hydra++, in the files and names of their authors."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Unpack

from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.checkpoints.files.fields import Fields
from eagle_jax.checkpoints.files.hub import Hub, head_directory
from eagle_jax.checkpoints.files.kinds import MEDUSAS, check_kind
from eagle_jax.checkpoints.files.mapping import Rule, Table, check_dtype, expected_shapes, flatten, layer_rules
from eagle_jax.checkpoints.files.staging import replacing, write_json
from eagle_jax.checkpoints.files.tensors import TensorReader, read_json
from eagle_jax.checkpoints.files.weights import Place, TensorProblems, check_params, plan, read_planned, write_weights
from eagle_jax.checkpoints.targets.unsupported import check_features
from eagle_jax.config import DecoderConfig, MedusaConfig
from eagle_jax.core.types import Params

_PREFIX = "prefix_embeding_layer."  # as its authors spell it


def load_medusa_checkpoint(
    path_or_id: str | os.PathLike[str],
    target: DecoderConfig,
    dtype: str = "float32",
    *,
    place: Place | None = None,
    **hub: Unpack[Hub],
) -> tuple[MedusaConfig, Params]:
    """Loads configuration and parameters of Medusa or Hydra heads; the file decides their number.

    Args:
      target: the model that the heads are for. place, hub: as in `load_target_checkpoint`.

    Raises:
      CheckpointError: no such heads, heads of another width, vocabulary, architecture or model, or values that are not
        finite, naming what does not fit.

    Warns:
      UserWarning: config.json contradicts the file.
    """
    check_dtype(dtype)
    directory = head_directory(path_or_id, **hub)
    where = directory / "config.json"
    values = read_json(where)
    kind = next((kind for kind in MEDUSAS if f"{kind}_num_heads" in values), None)
    if kind is None:
        check_kind(directory, MEDUSAS, values)
        raise CheckpointError(
            f"{where}: must hold medusa_num_heads or hydra_num_heads. Load an EAGLE head with load_drafter, a model "
            "with load_target."
        )
    fields = Fields(values, where)
    check_features(fields)
    for key, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if fields.integer(key, size, null=True) != size:
            fields.fail(key, f"{size}, as the target's", "Take heads that were trained for this target.")
    if kind == "hydra" and not fields.flag("grounded_heads", True):
        fields.fail("grounded_heads", "true or absent", "Convert the heads to Medusa's format.")
    with TensorReader(directory, stem=f"{kind}_lm_head") as reader:
        prefixed = any(name.startswith(_PREFIX) for name in reader.infos)
        _compare(fields, kind, *_count(reader), prefixed)
        prefix = target.one_layer(tie_word_embeddings=False) if prefixed else None
        config = MedusaConfig(kind, target.hidden_size, target.vocab_size, *_count(reader), prefix)
        problems = TensorProblems()
        chosen = plan(reader, _table(config), _shapes(config), problems)
        problems.raise_if_any(
            f"{directory}: not the {kind} heads of a model that is {target.hidden_size} wide with "
            f"{target.vocab_size} tokens; take heads that were trained for this target, or load their own target:"
        )
        return config, {"heads": read_planned(reader, chosen, dtype, place)}


def _compare(fields: Fields, kind: str, heads: int, layers: int, prefixed: bool) -> None:
    """Warns where config.json contradicts the file, which decides."""
    for key, found in ((f"{kind}_num_heads", heads), (f"{kind}_num_layers", layers)):
        fields.contradict(key, "the file has", found, fields.integer(key, found))
    if kind == "hydra":
        arch = "prefix-mlp" if prefixed else "mlp"
        if fields.text("hydra_head_arch", arch, null=True) not in ("mlp", "prefix-mlp"):
            fields.fail("hydra_head_arch", "mlp or prefix-mlp", "Other heads of Hydra are not supported.")
        fields.contradict("hydra_head_arch", "the file has", arch)


def _count(reader: TensorReader) -> tuple[int, int]:
    """Counts (heads, residual blocks per head) in the file: published config.json files name fewer heads."""
    matches = (re.fullmatch(r"(?:hydra_mlp\.)?(\d+)\.(\d+)\.linear\.weight", name) for name in reader.infos)
    blocks = {(int(match[1]), int(match[2])) for match in matches if match}
    first = sum(head == 0 for head, _ in blocks)
    # At least one of each: `plan` reports missing tensors.
    return max(1, len({head for head, _ in blocks})), max(1, first)


def save_medusa_checkpoint(
    config: MedusaConfig, params: Params, directory: str | os.PathLike[str], dtype: str = "bfloat16"
) -> None:
    """Writes heads in their authors' layout; other files in the directory are kept.

    Raises:
      CheckpointError: the parameters do not fit `config`, or hold values that are not finite.
    """
    flat = flatten(params["heads"])
    check_params(flat, _shapes(config), "the heads' parameters:")
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


def _shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    return {path.removeprefix("heads/"): shape for path, shape in expected_shapes(config).items()}


def _table(config: MedusaConfig) -> Table:
    """Returns one rule per parameter: names differ by kind, and in Hydra++ by its dropout layers."""
    rules = list(layer_rules(f"{_PREFIX}layers.0.", "prefix_layer/"))
    rules.append(Rule(f"{_PREFIX}norm.weight", "prefix_norm/scale"))
    medusa = config.kind == "medusa"
    # In Hydra++'s sequences a dropout precedes every block: it has no weights, but it takes an index.
    stride, first = (2, 1) if config.prefix is not None else (1, 0)
    for head in range(config.num_heads):
        blocks = f"{head}" if medusa else f"hydra_mlp.{head}"
        end = f"{head}.{config.num_layers}" if medusa else f"hydra_lm_head.{head}" + (".1" if config.prefix else "")
        linear = {end: f"heads_{head}_lm_head"} | {
            f"{blocks}.{block * stride + first}.{part}": f"heads_{head}_blocks_{block}/{part}"
            for block in range(config.num_layers)
            for part in ("linear", "res_connection")
        }
        for name, path in linear.items():
            rules += [Rule(f"{name}.weight", f"{path}/kernel", True), Rule(f"{name}.bias", f"{path}/bias")]
    ignored = (rf"{_PREFIX}embed_tokens\.weight", rf"{_PREFIX}layers\.0\.self_attn\.rotary_emb\.inv_freq")
    return Table(tuple(rules), ignored)
