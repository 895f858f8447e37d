"""Reads tensors of a checkpoint into parameters by a table of names, and writes parameters to safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.checkpoints.files.finite import DIVERGED, FETCH_AGAIN, NotFinite
from eagle_jax.checkpoints.files.mapping import Table, check_dtype, unflatten
from eagle_jax.checkpoints.files.staging import write_json
from eagle_jax.checkpoints.files.tensors import FLOAT_DTYPES, TensorReader
from eagle_jax.core.types import Params
from eagle_jax.devices import loading_errors

Place = Callable[[str, np.ndarray], jax.Array]
"""`(path, host array) -> device array`. A sharded load passes one that puts every parameter where it belongs."""

MAX_SHARD_BYTES = 5 << 30
"""Weights beyond this are written as shards with an index, as `transformers` does."""


class TensorProblems:
    """Collects everything that is wrong with the tensors of a checkpoint, for one error."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {"missing": [], "unexpected": [], "misshaped": [], "other": []}

    def raise_if_any(self, subject: str) -> None:
        lines = [f"  {kind} ({len(entries)}): {', '.join(entries)}" for kind, entries in self.found.items() if entries]
        if lines:
            raise CheckpointError("\n".join([subject, *lines]))


def plan(
    reader: TensorReader,
    table: Table,
    expected: Mapping[str, tuple[int, ...]],
    problems: TensorProblems,
    *,
    canonical: Callable[[str], str] = lambda name: name,
    spelled: Callable[[str], str] = lambda name: name,
    handled: Iterable[str] = (),
) -> dict[str, tuple[str, bool]]:
    """Assigns tensors to parameters: {path: (name, transpose)}; mismatches go to `problems`.

    Args:
      canonical: a tensor's name in the file -> its name in the table (prefixes differ between projects).
      spelled: the way back, for naming what is missing.
      handled: canonical names that the caller reads itself.
    """
    chosen: dict[str, tuple[str, bool]] = {}
    skip = set(handled)
    for name, info in reader.infos.items():
        plain = canonical(name)
        if plain in skip or any(re.fullmatch(pattern, plain) for pattern in table.ignored):
            continue
        target = table.path_of(plain)
        if target is None or target[0] not in expected:
            problems.found["unexpected"].append(name)
            continue
        path, transpose = target
        if path in chosen:
            problems.found["other"].append(f"{name} and {chosen[path][0]} are the same tensor under two names")
            continue
        chosen[path] = (name, transpose)
        shape = info.shape[::-1] if transpose else info.shape
        if shape != expected[path]:
            shape = expected[path][::-1] if transpose else expected[path]
            problems.found["misshaped"].append(f"{name} is {list(info.shape)}, expected {list(shape)}")
        elif info.dtype not in FLOAT_DTYPES:
            problems.found["other"].append(f"{name} is stored as {info.dtype}: quantised weights are not supported")
    problems.found["missing"].extend(spelled(table.name_of(path)[0]) for path in expected if path not in chosen)
    return chosen


def read_planned(
    reader: TensorReader, chosen: Mapping[str, tuple[str, bool]], dtype: str, place: Place | None
) -> Params:
    """Reads, converts and places tensors one by one, without a second copy of the model in memory.

    Raises:
      CheckpointError: values that are not finite in this dtype, naming every tensor that holds some.
    """
    loaded = check_dtype(dtype)
    spoiled = NotFinite()
    size = loaded.itemsize * sum(math.prod(reader.infos[name].shape) for name, _ in chosen.values())
    flat = {}
    for path, (name, transpose) in chosen.items():
        host = cast(reader.read(name), loaded, name)
        spoiled.check(name, host)
        if spoiled.found:  # only counted from here on
            continue
        # A copy in either case: the array may be a view of the file, which jnp.asarray would keep.
        host = transposed(host) if transpose else np.array(host)
        with loading_errors(str(reader.directory), size):
            flat[path] = jnp.asarray(host) if place is None else place(path, host)
    spoiled.raise_if_any(str(reader.directory), FETCH_AGAIN)
    return unflatten(flat)


def transposed(array: np.ndarray) -> np.ndarray:
    """Copies a matrix [out, in] to a contiguous [in, out]."""
    result = np.empty(array.shape[::-1], array.dtype)
    # In strips that stay in the cache, four times as fast as one strided copy of a large matrix.
    for start in range(0, len(array), 64):
        result[:, start : start + 64] = array[start : start + 64].T
    return result


def cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Casts an array, rounded to nearest even; an overflow of float16 raises."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if dtype == np.float16 and not np.isfinite(converted).all() and np.isfinite(array.astype(np.float32)).all():
        raise CheckpointError(f"tensor {name!r} holds values beyond the range of float16; use bfloat16 or float32")
    return converted


def check_params(flat: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], subject: str) -> None:
    """Checks names and shapes of parameters in memory.

    Raises:
      CheckpointError: naming every parameter that is missing, unexpected or misshaped.
    """
    problems = TensorProblems()
    problems.found["missing"] = [path for path in expected if path not in flat]
    problems.found["unexpected"] = [path for path in flat if path not in expected]
    problems.found["misshaped"] = [
        f"{path} is {list(np.shape(flat[path]))}, expected {list(shape)}"
        for path, shape in expected.items()
        if path in flat and tuple(np.shape(flat[path])) != shape
    ]
    problems.raise_if_any(subject)


def write_weights(
    staging: Path,
    flat: Mapping[str, Any],
    table: Table,
    dtype: np.dtype,
    *,
    stem: str = "model",
    rename: Callable[[str], str] = str,
    extra: Mapping[str, np.ndarray] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes parameters to safetensors files; only one shard is on the host at a time.

    Args:
      staging: directory to write to. flat: {path: array}. dtype: of the file.
      stem: file name without its suffix. rename: a tensor's name in `table` -> its name in the file.
      extra: further tensors, written as they are into the first file.
      max_shard_bytes: size from which the weights are split into shards with an index.

    Raises:
      CheckpointError: values that are not finite in this dtype, or a full disk.
    """
    shards: list[dict[str, str]] = [{}]
    sizes = {path: int(np.prod(np.shape(leaf))) * dtype.itemsize for path, leaf in flat.items()}
    filled = 0
    for path, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][path] = table.name_of(path)[0]
        filled += size
    weight_map: dict[str, str] = {}
    spoiled = NotFinite()
    for number, shard in enumerate(shards, start=1):
        file = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = dict(extra or {}) if number == 1 else {}
        for path, name in shard.items():
            host = cast(np.asarray(flat[path]), dtype, name)
            spoiled.check(name, host)
            tensors[rename(name)] = transposed(host) if table.name_of(path)[1] else np.ascontiguousarray(host)
        if spoiled.found:  # the remaining shards are checked for the report, and nothing more is written
            continue
        try:
            safetensors.numpy.save_file(tensors, staging / file, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # what a full disk raises
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"the weights could not be written in {staging.parent} ({reason}): make room and save again"
            ) from error
        weight_map.update(dict.fromkeys(tensors, file))
    spoiled.raise_if_any("the weights are not written", DIVERGED)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(staging / f"{stem}.safetensors.index.json", index)
