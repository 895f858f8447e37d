"""Reads and writes heads of Medusa, Hydra and Hydra++, in the files and names of their authors."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
from pathlib import Path

import jax

from eagle_jax.checkpoints.files.errors import CheckpointError, notice
from eagle_jax.checkpoints.files.fields import Fields
from eagle_jax.checkpoints.files.hub import head_directory
from eagle_jax.checkpoints.files.kinds import MEDUSAS, check_kind
from eagle_jax.checkpoints.files.mapping import Rule, Table, check_dtype, flatten
from eagle_jax.checkpoints.files.staging import replacing, write_json
from eagle_jax.checkpoints.files.tensors import TensorReader, read_json
from eagle_jax.checkpoints.files.weights import (
    Place,
    TensorProblems,
    check_params,
    plan,
    read_planned,
    write_weights,
)
from eagle_jax.checkpoints.targets.unsupported import check_features
from eagle_jax.config import ConfigError, DecoderConfig, MedusaConfig
from eagle_jax.core.types import Params
from eagle_jax.models.medusa import init_medusa_params

_PREFIX = "prefix_embeding_layer."  # as its authors spell it
_MOST = 64  # heads, or blocks per head: bounds what a wrong number in config.json allocates


def load_medusa_checkpoint(
    path_or_id: str | os.PathLike[str],
    target: DecoderConfig,
    dtype: str = "float32",
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    place: Place | None = None,
) -> tuple[MedusaConfig, Params]:
    """Loads configuration and parameters `{"heads": ...}` of Medusa or Hydra heads.

    Args:
      target: the model that the heads are for; place: as in `load_target_checkpoint`.

    The number of heads and of their blocks is that of the file.

    Raises:
      CheckpointError: no such heads, heads of another width, vocabulary, architecture or model, or values that are not
        finite, naming what does not fit.

    Warns:
      UserWarning: config.json names other numbers or another architecture than the file holds.
    """
    check_dtype(dtype)
    directory = head_directory(path_or_id, revision=revision, token=token, cache_dir=cache_dir)
    where = directory / "config.json"
    values = read_json(where)
    kind = next((kind for kind in ("medusa", "hydra") if f"{kind}_num_heads" in values), None)
    if kind is None:
        check_kind(directory, MEDUSAS, values, _model_tensors(directory))
        raise CheckpointError(
            f"{where}: must hold medusa_num_heads or hydra_num_heads. Load another kind of head with load_drafter."
        )
    fields = Fields(values, where)
    check_features(fields)
    for key, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if fields.integer(key, size, null=True) != size:
            fields.fail(key, f"{size}, as the target's", "Take heads that were trained for this target.")
    if kind == "hydra" and not fields.flag("grounded_heads", True):
        raise CheckpointError(
            f"{where}: grounded_heads must be true for Hydra, got false. Convert the heads to Medusa's format."
        )
    with TensorReader(directory, stem=f"{kind}_lm_head") as reader:
        prefixed = any(name.startswith(_PREFIX) for name in reader.infos)
        if kind == "hydra":
            _compare_prefix(fields, prefixed)
        prefix = target.one_layer(tie_word_embeddings=False) if prefixed else None
        heads, layers = _counted(fields, kind, reader)
        try:
            config = MedusaConfig(
                kind,  # type: ignore[arg-type]
                target.hidden_size,
                target.vocab_size,
                heads,
                layers,
                prefix,
            )
        except ConfigError as error:
            raise CheckpointError(f"{where}: {error}") from error
        problems = TensorProblems()
        ignored = (rf"{_PREFIX}embed_tokens\.weight", rf"{_PREFIX}layers\.0\.self_attn\.rotary_emb\.inv_freq")
        chosen = plan(reader, Table(_rules(config), ignored), _shapes(config), problems)
        problems.raise_if_any(
            f"{directory}: not the {kind} heads of a model that is {target.hidden_size} wide with "
            f"{target.vocab_size} tokens; take heads that were trained for this target, or load their own target:"
        )
        return config, {"heads": read_planned(reader, chosen, dtype, place)}


def _compare_prefix(fields: Fields, prefixed: bool) -> None:
    """Compares `hydra_head_arch` with the file, which decides whether there is a prefix layer.

    Raises:
      CheckpointError: heads of another architecture.

    Warns:
      UserWarning: config.json has the other one.
    """
    found = "prefix-mlp" if prefixed else "mlp"
    named = fields.text("hydra_head_arch", found, null=True)
    if named not in ("mlp", "prefix-mlp"):
        fields.fail("hydra_head_arch", "mlp or prefix-mlp", "Other heads of Hydra are not supported.")
    if named != found:
        held = "a" if prefixed else "no"
        notice(
            f"{fields.where}: hydra_head_arch is {named!r} and the file holds {held} prefix layer: uses the file's, "
            f"{found!r}"
        )


def _counted(fields: Fields, kind: str, reader: TensorReader) -> tuple[int, int]:
    """Counts (heads, residual blocks per head) in the file: published config.json files name fewer heads.

    Warns:
      UserWarning: config.json has other numbers.
    """
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
    values = {"model_type": config.kind, f"{config.kind}_num_heads": config.num_heads,
              f"{config.kind}_num_layers": config.num_layers, "torch_dtype": dtype}  # fmt: skip
    if config.kind == "hydra":
        values |= {"grounded_heads": True, "hydra_head_arch": "mlp" if config.prefix is None else "prefix-mlp"}
    table, size = Table(_rules(config)), check_dtype(dtype)
    with replacing(Path(directory)) as staging:
        write_json(staging / "config.json", values)
        # One file whatever its size: its authors' loaders read no shards.
        write_weights(staging, flat, table, size, stem=f"{config.kind}_lm_head", max_shard_bytes=sys.maxsize)


def _model_tensors(directory: Path) -> list[str]:
    """Returns the tensor names of a model or EAGLE head in the directory; empty if it holds none."""
    try:
        with TensorReader(directory) as reader:
            return list(reader.infos)
    except CheckpointError:  # there are none, or none that tell
        return []


@functools.lru_cache(maxsize=64)
def _shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    heads = jax.eval_shape(lambda: init_medusa_params(config, jax.random.key(0)))["heads"]
    return {path: tuple(leaf.shape) for path, leaf in flatten(heads).items()}


def _rules(config: MedusaConfig) -> tuple[Rule, ...]:
    """Returns one rule per parameter: names differ by kind, and in Hydra++ by its dropout layers."""
    rules = []
    # In Hydra++'s sequences every block stands behind a dropout, which has no weights but a number.
    stride, first = (2, 1) if config.prefix is not None else (1, 0)
    for head in range(config.num_heads):
        for block in range(config.num_layers):
            number = block * stride + first
            name = f"{head}.{number}" if config.kind == "medusa" else f"hydra_mlp.{head}.{number}"
            path = f"heads_{head}_blocks_{block}"
            for part in ("linear", "res_connection"):
                rules += [
                    Rule(f"{name}.{part}.weight", f"{path}/{part}/kernel", True),
                    Rule(f"{name}.{part}.bias", f"{path}/{part}/bias"),
                ]
        end = f"{head}.{config.num_layers}" if config.kind == "medusa" else f"hydra_lm_head.{head}"
        end += ".1" if config.prefix is not None else ""
        rules += [
            Rule(f"{end}.weight", f"heads_{head}_lm_head/kernel", True),
            Rule(f"{end}.bias", f"heads_{head}_lm_head/bias"),
        ]
    layer = f"{_PREFIX}layers.0."
    for part in ("self_attn", "mlp"):
        rules += [
            Rule(f"{layer}{part}.{{proj}}_proj.weight", f"prefix_layer/{part}/{{proj}}_proj/kernel", True),
            Rule(f"{layer}{part}.{{proj}}_proj.bias", f"prefix_layer/{part}/{{proj}}_proj/bias"),
        ]
    rules += [
        Rule(f"{layer}self_attn.{{norm}}_norm.weight", "prefix_layer/self_attn/{norm}_norm/scale"),
        Rule(f"{layer}{{norm}}_layernorm.weight", "prefix_layer/{norm}_layernorm/scale"),
        Rule(f"{_PREFIX}norm.weight", "prefix_norm/scale"),
    ]
    return tuple(rules)
