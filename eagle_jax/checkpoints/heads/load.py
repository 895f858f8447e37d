"""Loads EAGLE draft heads: EAGLE-1/2 and EAGLE-3, in the official layout, its variants and that of speculators."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.files.errors import CheckpointError, notice
from eagle_jax.checkpoints.files.hub import checkpoint_directory
from eagle_jax.checkpoints.files.kinds import EAGLES, check_kind
from eagle_jax.checkpoints.files.mapping import HEAD, LM_HEAD, Table, canonical_name, check_dtype, expected_shapes
from eagle_jax.checkpoints.files.tensors import TensorReader, read_json
from eagle_jax.checkpoints.files.weights import Place, TensorProblems, cast, plan, read_planned
from eagle_jax.checkpoints.heads.config import flat_config, head_config
from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig
from eagle_jax.core.types import Params

_EMBEDDING = "embed_tokens.weight"


def load_head_checkpoint(
    path_or_id: str | os.PathLike[str],
    target: DecoderConfig,
    dtype: str = "float32",
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    rope_theta: float | int | None = None,
    taps: Sequence[int] | None = None,
    embedding: jax.Array | np.ndarray | None = None,
    lm_head: jax.Array | np.ndarray | None = None,
    place: Place | None = None,
) -> tuple[HeadConfig, Params]:
    """Loads configuration and parameters of a draft head for `target`.

    Args:
      path_or_id: a directory with config.json and weights, or a hub id.
      target: configuration of the target the head is to draft for.
      dtype: float32, bfloat16 or float16.
      revision, token, cache_dir: for a hub id, as in `huggingface_hub`.
      rope_theta: replaces the head's own; some published heads draft better at 10000 than at their config's value.
      taps: replaces the hidden states that the config names, in `transformers` numbering.
      embedding: [V, H], the target's embedding. Where the file's is a copy of it, as EAGLE-1/2 files carry one, the
        head shares the target's instead of holding it twice; where it differs, the head uses its own.
      lm_head: [H, V], the target's. Compared with one that an EAGLE-1/2 file carries, which is not used.
      place: `(path, host array) -> device array` for a sharded load.

    Returns:
      config, and `{"head": ..., "d2t": [Vd] int32}` (`d2t` for EAGLE-3 only: target id minus draft id).

    Raises:
      CheckpointError: naming the file and everything in it that does not fit, or does not fit this target, an option
        that would change the drafts and is not supported, or tensors that hold NaN or infinity.

    Warns:
      UserWarning: options that are not known, a head trained for a target of another family, or an lm_head in the file
        that is not used and differs from the target's.
    """
    check_dtype(dtype)
    directory = checkpoint_directory(path_or_id, revision=revision, token=token, cache_dir=cache_dir)
    where = str(directory / "config.json")
    written = read_json(directory / "config.json")
    check_kind(directory, EAGLES, written)  # Medusa's weights are in other files
    values = flat_config(written, where)
    with TensorReader(directory) as reader:
        check_kind(directory, EAGLES, written, reader.infos)
        problems = TensorProblems()
        names = {canonical_name(name): name for name in reader.infos}
        stored = {plain: reader.infos[name] for plain, name in names.items()}
        shared = _is_copy(reader, names, embedding, dtype)
        if shared:
            del stored[_EMBEDDING]
        try:
            config = head_config(values, stored, target, where, problems, taps=taps)
        except ConfigError as error:
            raise CheckpointError(f"{where}: {error}") from error
        if rope_theta is not None:
            if isinstance(rope_theta, bool | str) or not 0 < rope_theta < math.inf:
                raise CheckpointError(f"rope_theta={rope_theta!r} must be a positive number")
            rope = dataclasses.replace(config.layer.rope, theta=float(rope_theta))
            config = dataclasses.replace(config, layer=dataclasses.replace(config.layer, rope=rope))
        # Some published EAGLE-1/2 heads ship the target's lm_head, which is what they read anyway.
        ignored = HEAD.ignored + ((re.escape(LM_HEAD),) if config.kind == "eagle1" else ())
        if config.kind == "eagle1" and lm_head is not None and LM_HEAD in names:
            _compare_lm_head(reader, names[LM_HEAD], lm_head)
        prefix = "midlayer." if any("midlayer." in name for name in reader.infos) else "layers.0."
        shapes = expected_shapes(config)
        chosen = plan(
            reader,
            Table(HEAD.rules, ignored),
            {path.removeprefix("head/"): shape for path, shape in shapes.items() if path != "d2t"},
            problems,
            canonical=canonical_name,
            spelled=lambda name: name.replace("layers.0.", prefix),
            handled=(("d2t", "t2d") if config.kind == "eagle3" else ()) + ((_EMBEDDING,) if shared else ()),
        )
        d2t = _read_d2t(reader, names, config, problems) if config.kind == "eagle3" else None
        problems.raise_if_any(f"{directory}: not a usable {config.kind} head for this target:")
        params = {"head": read_planned(reader, chosen, dtype, place)}
        if d2t is not None:
            params["d2t"] = jnp.asarray(d2t) if place is None else place("d2t", d2t)
        return config, params


def _is_copy(reader: TensorReader, names: dict[str, str], embedding: jax.Array | np.ndarray | None, dtype: str) -> bool:
    """Returns whether the file's embedding equals the target's, in either's dtype."""
    name = names.get(_EMBEDDING)
    if embedding is None or name is None or reader.infos[name].shape != embedding.shape:
        return False
    loaded, stored = check_dtype(dtype), reader.read(name)
    # A copy that was rounded when it was saved is still one.
    ours = np.asarray(embedding).astype(loaded).astype(stored.dtype)
    return np.array_equal(cast(stored, loaded, name).astype(stored.dtype), ours)


def _compare_lm_head(reader: TensorReader, name: str, lm_head: jax.Array | np.ndarray) -> None:
    """Warns if the file's lm_head differs from the target's, through which EAGLE-1/2 heads draft."""
    ours = np.asarray(lm_head)
    stored = reader.read(name)
    same = stored.shape == ours.shape[::-1] and np.array_equal(
        stored.astype(ours.dtype), ours.T.astype(stored.dtype).astype(ours.dtype)
    )
    if not same:
        notice(
            f"{reader.directory / reader.infos[name].file}: {name} differs from the target's lm_head and is not used: "
            "an EAGLE-1/2 head drafts through its target's"
        )


def _read_d2t(
    reader: TensorReader, names: dict[str, str], config: HeadConfig, problems: TensorProblems
) -> np.ndarray | None:
    """Reads d2t, target id minus draft id, [Vd] int32; checks it against the target vocabulary and `t2d`."""
    vocab, draft_vocab = config.layer.vocab_size, config.draft_vocab_size
    if "d2t" not in names:
        if draft_vocab == vocab:
            return np.zeros((draft_vocab,), np.int32)
        problems.found["missing"].append("d2t")
        return None
    misshaped = [
        f"{names[name]} is {list(reader.infos[names[name]].shape)}, expected {[size]}"
        for name, size in (("d2t", draft_vocab), ("t2d", vocab))
        if name in names and reader.infos[names[name]].shape != (size,)
    ]
    if misshaped:
        problems.found["misshaped"] += misshaped
        return None
    for name in ("d2t", "t2d"):
        if name in names and not re.fullmatch(r"u?int\d+|bool", reader.infos[names[name]].dtype):
            stored = reader.infos[names[name]].dtype
            problems.found["other"].append(f"{names[name]} is stored as {stored}, expected integers")
            return None
    difference = reader.read(names["d2t"]).astype(np.int64)
    ids = difference + np.arange(draft_vocab)
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != draft_vocab:
        problems.found["other"].append(f"{names['d2t']} does not map draft ids to distinct target ids below {vocab}")
        return None
    # t2d says the same from the other side; a file in which the two disagree was put together from two trainings.
    if "t2d" in names and not np.array_equal(np.flatnonzero(reader.read(names["t2d"])), np.sort(ids)):
        problems.found["other"].append(f"{names['t2d']} marks other target ids than {names['d2t']} reaches")
        return None
    return difference.astype(np.int32)
