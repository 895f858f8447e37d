"""Loads EAGLE-1/2 and EAGLE-3 heads, in the official layout, its variants and the speculators layout."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.files.fields import CheckpointError, notice
from eagle_jax.checkpoints.files.hub import Hub, checkpoint_directory
from eagle_jax.checkpoints.files.kinds import EAGLES, check_kind
from eagle_jax.checkpoints.files.mapping import (
    LM_HEAD,
    canonical_name,
    check_dtype,
    check_scheme,
    expected_shapes,
    head_table,
)
from eagle_jax.checkpoints.files.tensors import FLOAT_DTYPES, TensorReader, cast, read_json
from eagle_jax.checkpoints.files.weights import Place, TensorProblems, plan, read_planned
from eagle_jax.checkpoints.heads.config import flat_config, head_config
from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig
from eagle_jax.core.types import Params
from eagle_jax.models.quantised import is_quantised, quantise

_EMBEDDING = "embed_tokens.weight"


def load_head_checkpoint(
    path_or_hub_id: str | os.PathLike[str],
    target: DecoderConfig,
    dtype: str = "float32",
    *,
    rope_theta: float | int | None = None,
    taps: Sequence[int] | None = None,
    embedding: Any | None = None,
    lm_head: Any | None = None,
    place: Place | None = None,
    weights: str | None = None,
    **hub: Unpack[Hub],
) -> tuple[HeadConfig, Params]:
    """Loads configuration and parameters of a draft head for `target`.

    Args:
      path_or_hub_id: a directory with config.json and weights, or a hub id.
      target: configuration of the target the head is to draft for.
      dtype: float32, bfloat16 or float16.
      rope_theta: replaces the head's own; some published heads draft better at 10000 than at their config's value.
      taps: replaces the hidden states that the config names, in `transformers` numbering.
      embedding: the target's embedding, [V, H], which may be quantised. If the file holds a copy, the head shares the
        target's array.
      lm_head: the target's lm_head, [V, H]; used only to warn: EAGLE-1/2 heads always draft through it.
      place: `(path, host array) -> device array` for a sharded load.
      weights: scheme to quantise the head's matrices by.
      hub: revision, token and cache_dir of a hub id, as in `huggingface_hub`.

    Returns:
      config, and `{"head": ..., "d2t": [Vd] int32}` (`d2t` for EAGLE-3 only: target id minus draft id).

    Raises:
      CheckpointError: a file or its tensors do not fit this target; tensors hold NaN or infinity; or an option that
        would change the drafts is not supported. The message names all of them.

    Warns:
      UserWarning: an option or an lm_head is unknown or has no effect, or contradicts the tensors or the target.
    """
    check_dtype(dtype)
    scheme = check_scheme(weights)
    directory = checkpoint_directory(path_or_hub_id, **hub)
    where = str(directory / "config.json")
    written = read_json(directory / "config.json")
    check_kind(directory, EAGLES, written)  # Medusa's weights are in other files
    values = flat_config(written, where)
    with TensorReader(directory) as reader:
        check_kind(directory, EAGLES, written, reader.infos)
        problems = TensorProblems()
        names = {canonical_name(name): name for name in reader.infos}
        stored = {plain: reader.infos[name] for plain, name in names.items()}
        table = head_table("midlayer." if any("midlayer." in name for name in reader.infos) else "layers.0.")
        if _is_copy(reader, names.get(_EMBEDDING), embedding, dtype):
            del stored[_EMBEDDING]
            table = table.ignoring(_EMBEDDING)
        try:
            config = head_config(values, stored, target, where, problems, taps=taps)
        except ConfigError as error:
            raise CheckpointError(f"{where}: {error}") from error
        if rope_theta is not None:
            if isinstance(rope_theta, bool | str) or not 0 < rope_theta < math.inf:
                raise CheckpointError(
                    f"rope_theta must be a positive number, got {rope_theta!r}. Pass 10000, or None for the head's own."
                )
            rope = dataclasses.replace(config.layer.rope, theta=float(rope_theta))
            config = dataclasses.replace(config, layer=dataclasses.replace(config.layer, rope=rope))
        expected = dict(expected_shapes(config))
        d2t = None
        if config.kind == "eagle3":
            del expected["d2t"]
            table = table.ignoring("d2t", "t2d")
            d2t = _read_d2t(reader, names, config, problems)
        else:
            table = table.ignoring(LM_HEAD)  # some published files hold a copy of the target's, which the head reads
            own = names.get(LM_HEAD)
            if own and lm_head is not None and not _is_copy(reader, own, lm_head, dtype):
                notice(f"{directory}: {own} differs from the target's lm_head, and EAGLE-1/2 drafts through the latter")
        chosen = plan(reader, table, expected, problems)
        problems.raise_if_any(
            f"{directory}: not a usable {config.kind} head for this target:",
            "Load a head of this target, or the target of this head. If they belong together, correct config.json or "
            "download it again.",
        )
        params = {"head": read_planned(reader, chosen, dtype, place, scheme)}
        if d2t is not None:
            params["d2t"] = jnp.asarray(d2t) if place is None else place("d2t", d2t)
        return config, params


def _is_copy(reader: TensorReader, name: str | None, theirs: Any | None, dtype: str) -> bool:
    """Returns whether a tensor of the file equals the target's, up to rounding to either dtype.

    A quantised weight of the target is compared with the tensor quantised in the same way.
    """
    if theirs is None or name is None or reader.infos[name].dtype not in FLOAT_DTYPES:
        return False
    loaded, stored = check_dtype(dtype), reader.read(name)
    if is_quantised(theirs):
        schemes = {"int8": "int8", "int4": "int4", "float8_e4m3fn": "fp8"}
        theirs_scheme: Any = schemes[theirs["q"].dtype.name]
        if "zero" in theirs or math.prod(theirs["q"].shape) != stored.size:
            return False
        again = quantise(cast(stored, np.dtype(np.float32)), theirs_scheme, loaded)
        return all(np.array_equal(again[key], np.asarray(theirs[key])) for key in again)
    # A copy rounded on saving still counts as a copy.
    rounded = np.asarray(theirs).astype(loaded).astype(stored.dtype)
    return stored.shape == theirs.shape and np.array_equal(cast(stored, loaded).astype(stored.dtype), rounded)


def _read_d2t(
    reader: TensorReader, names: Mapping[str, str], config: HeadConfig, problems: TensorProblems
) -> np.ndarray | None:
    """Reads d2t, target id minus draft id, [Vd] int32; checks it against the target vocabulary and `t2d`."""
    vocab, draft_vocab = config.layer.vocab_size, config.draft_vocab_size
    if "d2t" not in names:
        if draft_vocab == vocab:
            return np.zeros((draft_vocab,), np.int32)
        problems.found["missing"].append("d2t")
        return None
    misshaped = []
    for name, size, dtypes in (("d2t", draft_vocab, r"u?int\d+"), ("t2d", vocab, r"u?int\d+|bool")):
        info = reader.infos[names[name]] if name in names else None
        if info is not None and (info.shape != (size,) or not re.fullmatch(dtypes, info.dtype)):
            misshaped.append(f"{names[name]} is {info.dtype} {list(info.shape)}, expected integers {[size]}")
    if misshaped:
        problems.found["misshaped"] += misshaped
        return None
    difference = reader.read(names["d2t"]).astype(np.int64)
    ids = difference + np.arange(draft_vocab)
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != draft_vocab:
        problems.found["other"].append(f"{names['d2t']} does not map draft ids to distinct target ids below {vocab}")
    elif "t2d" in names and not np.array_equal(np.flatnonzero(reader.read(names["t2d"])), np.sort(ids)):
        problems.found["other"].append(f"{names['t2d']} marks other target ids than {names['d2t']} reaches")
    return difference.astype(np.int32)
