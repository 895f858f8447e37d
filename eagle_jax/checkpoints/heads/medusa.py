"""Reads and writes heads of Medusa, Hydra and Hydra++, in the files and names of their authors."""

from __future__ import annotations

import itertools
import os
import re
import sys
from pathlib import Path
from typing import Literal, Unpack

from eagle_jax.checkpoints.files.errors import CheckpointError, notice
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
_MOST = 64  # heads, or blocks per head: bounds what a wrong number in config.json allocates


def load_medusa_checkpoint(
    path_or_id: str | os.PathLike[str],
    target: DecoderConfig,
    dtype: str = "float32",
    *,
    place: Place | None = None,
    **hub: Unpack[Hub],
) -> tuple[MedusaConfig, Params]:
    """Loads configuration and parameters `{"heads": ...}` of Medusa or Hydra heads; the file decides their number.

    Args:
      target: the model that the heads are for. place, hub: as in `load_target_checkpoint`.

    Raises:
      CheckpointError: no such heads, heads of another width, vocabulary, architecture or model, or values that are not
        finite, naming what does not fit.

    Warns:
      UserWarning: config.json names other numbers or another architecture than the file holds.
    """
    check_dtype(dtype)
    directory = head_directory(path_or_id, **hub)
    where = directory / "config.json"
    values = read_json(where)
    kind: Literal["medusa", "hydra"]
    if "medusa_num_heads" in values:
        kind = "medusa"
    elif "hydra_num_heads" in values:
        kind = "hydra"
    else:
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
        fields.fail("grounded_heads", "true for Hydra", "Convert the heads to Medusa's format.")
    with TensorReader(directory, stem=f"{kind}_lm_head") as reader:
        prefixed = any(name.startswith(_PREFIX) for name in reader.infos)
        if kind == "hydra":
            _compare_prefix(fields, prefixed)
        prefix = target.one_layer(tie_word_embeddings=False) if prefixed else None
        heads, layers = _counted(fields, kind, reader)
        config = MedusaConfig(kind, target.hidden_size, target.vocab_size, heads, layers, prefix)
        problems = TensorProblems()
        chosen = plan(reader, _table(config), _shapes(config), problems)
        problems.raise_if_any(
            f"{directory}: not the {kind} heads of a model that is {target.hidden_size} wide with "
            f"{target.vocab_size} tokens; take heads that were trained for this target, or load their own target:"
        )
        return config, {"heads": read_planned(reader, chosen, dtype, place)}


def _compare_prefix(fields: Fields, prefixed: bool) -> None:
    """Warns if `hydra_head_arch` contradicts the file, which decides whether there is a prefix layer."""
    found = "prefix-mlp" if prefixed else "mlp"
    named = fields.text("hydra_head_arch", found, null=True)
    if named not in ("mlp", "prefix-mlp"):
        fields.fail("hydra_head_arch", "mlp or prefix-mlp", "Other heads of Hydra are not supported.")
    if named != found:
        notice(f"{fields.where}: hydra_head_arch is {named!r} and the file holds {found!r}: uses the file's")


def _counted(fields: Fields, kind: str, reader: TensorReader) -> tuple[int, int]:
    """Counts (heads, residual blocks per head) in the file: published config.json files name fewer heads."""
    blocks: dict[int, set[int]] = {}
    for name in reader.infos:
        match = re.match(r"(?:hydra_mlp\.)?(\d+)\.(\d+)\.linear\.weight$", name)
        if match:
            blocks.setdefault(int(match[1]), set()).add(int(match[2]))
    stored = next(number for number in itertools.count() if number not in blocks)
    found = {"heads": stored, "layers": len(blocks.get(0, ()))}
    for part, count in found.items():
        key = f"{kind}_num_{part}"
        named = fields.integer(key, most=_MOST)
        if not count:  # no such tensors: `plan` reports them as missing
            found[part] = named
        elif named != count:
            file = next(iter(reader.infos.values())).file
            notice(f"{fields.where}: {key} is {named}, and {file} holds {count}: uses the file's number")
    return found["heads"], found["layers"]


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
