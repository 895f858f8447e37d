"""Writes targets (Hugging Face format) and heads (official EAGLE format): a whole directory appears, or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from eagle_jax.checkpoints.errors import CheckpointError
from eagle_jax.checkpoints.head_config import head_config_values
from eagle_jax.checkpoints.hf_config import hf_config
from eagle_jax.checkpoints.mapping import (
    DECODER,
    HEAD,
    Table,
    TensorProblems,
    cast,
    check_dtype,
    expected_shapes,
    flatten,
    transposed,
)
from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.types import Params

MAX_SHARD_BYTES = 5 << 30
"""Weights beyond this are written as shards with an index, as `transformers` does."""


def save_target_checkpoint(
    config: DecoderConfig,
    params: Params,
    directory: str | os.PathLike[str],
    dtype: str = "bfloat16",
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a target so that `transformers` loads it unchanged: config, generation config, safetensors.

    The directory is replaced as a whole; other files in it (tokenizer, model card) are kept.

    Args:
      params: nested dict as `load_target_checkpoint` returns it.
      dtype: float32, bfloat16 or float16.
      max_shard_bytes: size from which the weights are split.

    Raises:
      CheckpointError: the parameters do not fit `config`, or the directory holds something else.
    """
    wanted = check_dtype(dtype)
    values = hf_config(config, dtype)
    flat = flatten(params)
    _check(flat, expected_shapes(config), "the target's parameters:")
    generation = {"bos_token_id": values["bos_token_id"], "eos_token_id": values["eos_token_id"]}
    with _replacing(Path(directory)) as staging:
        _write_json(staging / "config.json", values)
        _write_json(staging / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
        _write_weights(staging, flat, DECODER, wanted, max_shard_bytes=max_shard_bytes)


def save_head_checkpoint(
    config: HeadConfig,
    params: Params,
    directory: str | os.PathLike[str],
    dtype: str = "bfloat16",
    *,
    embedding: Any | None = None,
) -> None:
    """Writes a head in the official layout of its kind (`layers.0.` for EAGLE-1/2, `midlayer.`, d2t, t2d for EAGLE-3).

    The directory is replaced as a whole; other files in it are kept.

    Args:
      params: `{"head": ..., "d2t": ...}` as `load_head_checkpoint` returns it.
      dtype: float32, bfloat16 or float16.
      embedding: [V, H], the target's embedding. Official EAGLE-1/2 files carry a copy of it; without one the file is
        smaller and readers take the target's.

    Raises:
      CheckpointError: the parameters do not fit `config`, or the directory holds something else.
    """
    wanted = check_dtype(dtype)
    flat = flatten(params)
    _check(flat, expected_shapes(config), "the head's parameters:")
    d2t = flat.pop("d2t", None)
    flat = {path.removeprefix("head/"): leaf for path, leaf in flat.items()}
    if embedding is not None and not config.own_embedding:
        shape = (config.layer.vocab_size, config.layer.hidden_size)
        if np.shape(embedding) != shape:
            raise CheckpointError(f"embedding is {list(np.shape(embedding))}, the head's would be {list(shape)}")
        flat["embed_tokens/embedding"] = embedding
    extra = {} if d2t is None else _vocabulary_tensors(np.asarray(d2t), config.layer.vocab_size)
    prefix = "midlayer." if config.kind == "eagle3" else "layers.0."
    with _replacing(Path(directory)) as staging:
        _write_json(staging / "config.json", head_config_values(config, dtype))
        _write_weights(staging, flat, HEAD, wanted, prefix=prefix, extra=extra)


def _vocabulary_tensors(d2t: np.ndarray, vocab: int) -> dict[str, np.ndarray]:
    """`d2t` and `t2d` as stored; nothing where draft ids are target ids."""
    if len(d2t) == vocab and not d2t.any():
        return {}
    difference = d2t.astype(np.int64)
    ids = difference + np.arange(len(difference))
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != len(ids):
        raise CheckpointError(f"d2t does not map draft ids to distinct target ids below {vocab}")
    reached = np.zeros((vocab,), bool)
    reached[ids] = True
    return {"d2t": difference, "t2d": reached}


def _check(flat: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], subject: str) -> None:
    problems = TensorProblems()
    problems.found["missing"] = [path for path in expected if path not in flat]
    problems.found["unexpected"] = [path for path in flat if path not in expected]
    problems.found["misshaped"] = [
        f"{path} is {list(np.shape(flat[path]))}, expected {list(shape)}"
        for path, shape in expected.items()
        if path in flat and tuple(np.shape(flat[path])) != shape
    ]
    problems.raise_if_any(subject)


def _write_weights(
    staging: Path,
    flat: Mapping[str, Any],
    table: Table,
    dtype: np.dtype,
    *,
    prefix: str = "layers.0.",
    extra: Mapping[str, np.ndarray] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the parameters shard by shard; only one shard is on the host at a time."""
    shards: list[dict[str, str]] = [{}]
    filled = 0
    for path, leaf in flat.items():
        size = int(np.prod(np.shape(leaf))) * dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][table.name_of(path)[0]] = path
        filled += size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name, path in shard.items():
            host = cast(np.asarray(flat[path]), dtype, name)
            written = name.replace("layers.0.", prefix) if table is HEAD else name
            tensors[written] = transposed(host) if table.name_of(path)[1] else np.ascontiguousarray(host)
        tensors.update(extra or {} if number == 1 else {})
        safetensors.numpy.save_file(tensors, staging / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    if len(shards) > 1:
        total = sum(int(np.prod(np.shape(leaf))) * dtype.itemsize for leaf in flat.values())
        _write_json(
            staging / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _is_checkpoint_file(name: str) -> bool:
    return name in ("config.json", "generation_config.json") or name.endswith(
        (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
    )


@contextlib.contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """A temporary sibling that takes the place of `directory` when the block ends well and vanishes when it does not.

    Files of an existing directory that are no part of a checkpoint come along; weights of an older one do not.
    """
    directory = directory.expanduser().resolve()  # a link stays, what it points to is replaced
    kept: list[Path] = []
    if directory.exists():
        inside = sorted(directory.iterdir()) if directory.is_dir() else []
        if not directory.is_dir() or any(not path.is_file() for path in inside):
            raise CheckpointError(
                f"{directory} is no checkpoint directory (a file, or it has subdirectories); save elsewhere"
            )
        kept = [path for path in inside if not _is_checkpoint_file(path.name)]
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield staging
        for path in kept:
            shutil.copy2(path, staging / path.name)
        mask = _umask()
        staging.chmod(0o777 & ~mask)
        for weights in staging.glob("*.safetensors"):
            weights.chmod(0o666 & ~mask)
        if directory.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
            os.replace(directory, old)
            try:
                os.replace(staging, directory)
            except BaseException:
                os.replace(old, directory)
                raise
            shutil.rmtree(old)
        else:
            os.replace(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _umask() -> int:
    # mkdtemp makes private directories and safetensors private files; a saved checkpoint is as readable as other files.
    mask = os.umask(0)
    os.umask(mask)
    return mask
