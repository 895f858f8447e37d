"""Reads tensors into parameters by a table of names, and writes parameters to safetensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax.traverse_util import unflatten_dict

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.checkpoints.files.mapping import Table, check_dtype
from eagle_jax.checkpoints.files.staging import write_json
from eagle_jax.checkpoints.files.tensors import FLOAT_DTYPES, QUANTISED, TensorReader, cast
from eagle_jax.config import ConfigError
from eagle_jax.core.types import Params
from eagle_jax.devices import loading_errors
from eagle_jax.models.quantised import Scheme, dequantise, quantise, scheme_of

Place = Callable[[str, np.ndarray], jax.Array]
"""`(path, host array) -> device array`. A sharded load passes a function that places each parameter on its devices."""

_MAX_SHARD_BYTES = 5 << 30  # weights beyond this are written as shards with an index, as `transformers` does
_DIVERGED = "Take weights from before training diverged, or write a dtype of a wider range."
_FETCH_AGAIN = "Fetch the checkpoint again, take one from before training diverged, or load a dtype of a wider range."
_CHUNK = 1 << 18  # elements: a chunk stays in the CPU cache
_NAMED = 10  # tensors in a message
# dtype -> (integers of its size, the bits of its exponent). All of the exponent's bits are set in NaN and infinity.
# e4m3 has no infinity; all bits but the sign are set in its NaN.
_BITS: dict[str, tuple[Any, int]] = {
    "float32": (np.uint32, 0x7F800000), "bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0x7C00),
    "float8_e4m3fn": (np.uint8, 0x7F),
}  # fmt: skip


class TensorProblems:
    """Collects everything that is wrong with the tensors of a checkpoint, for one error."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {"missing": [], "unexpected": [], "misshaped": [], "other": []}

    def raise_if_any(self, subject: str, remedy: str) -> None:
        """Raises one `CheckpointError` with all problems, between the lines `subject` and `remedy`."""
        lines = [f"  {kind} ({len(entries)}): {'; '.join(entries)}" for kind, entries in self.found.items() if entries]
        if lines:
            raise CheckpointError("\n".join([subject, *lines, remedy]))


def plan(
    reader: TensorReader, table: Table, expected: Mapping[str, tuple[int, ...]], problems: TensorProblems
) -> dict[str, tuple[str, bool]]:
    """Assigns tensors to parameters: {path: (name, transpose)}; mismatches go to `problems`."""
    chosen: dict[str, tuple[str, bool]] = {}
    own = reader.own_name
    for name, info in reader.infos.items():
        if table.ignores(name):
            continue
        path, transpose = table.path_of(name) or ("", False)
        if path not in expected:
            problems.found["unexpected"].append(own(name))
            continue
        if path in chosen:
            problems.found["other"].append(
                f"{own(name)} and {own(chosen[path][0])} are the same tensor under two names"
            )
            continue
        chosen[path] = (name, transpose)
        shape = expected[path][::-1] if transpose else expected[path]
        if info.shape != shape:
            problems.found["misshaped"].append(f"{own(name)} is {list(info.shape)}, expected {list(shape)}")
        elif info.dtype not in (*FLOAT_DTYPES, QUANTISED):
            problems.found["other"].append(f"{own(name)} is stored as {info.dtype}, which config.json does not explain")
    problems.found["missing"].extend(own(table.name_of(path)[0]) for path in expected if path not in chosen)
    return chosen


def read_planned(
    reader: TensorReader,
    chosen: Mapping[str, tuple[str, bool]],
    dtype: str,
    place: Place | None,
    weights: Scheme | None = None,
) -> Params:
    """Reads, converts and places tensors one by one.

    Args:
      weights: scheme to quantise matrices by; those that are stored as quantised stay as they are.

    Raises:
      CheckpointError: tensors hold NaN or infinity; the message names all of them. Or `weights` is int4 and the model
        has experts.
    """
    loaded = check_dtype(dtype)
    try:
        schemes = {path: scheme_of(path, weights) for path in chosen}
    except ConfigError as error:
        raise CheckpointError(f"{reader.directory}: {error}") from None
    spoiled: dict[str, int] = {}
    size = loaded.itemsize * sum(math.prod(reader.infos[name].shape) for name, _ in chosen.values())
    flat: dict[str, Any] = {}
    for path, (name, transpose) in chosen.items():
        parts, count = _convert(reader.read(name), path, transpose, loaded, schemes[path])
        if count:
            spoiled[reader.own_name(name)] = count
        if spoiled:  # only counted from here on
            continue
        with loading_errors(str(reader.directory), size):
            flat |= {key: jnp.asarray(host) if place is None else place(key, host) for key, host in parts.items()}
    raise_not_finite(spoiled, str(reader.directory), _FETCH_AGAIN)
    return unflatten_dict(flat, sep="/")


def _convert(
    stored: Any, path: str, transpose: bool, loaded: np.dtype, scheme: Scheme | None
) -> tuple[dict[str, np.ndarray], int]:
    """Returns the arrays of a parameter by path, and how many of its values are not finite.

    An embedding that is stored in groups is dequantised: the model looks up whole rows.
    """
    if path.endswith("embedding") and not isinstance(stored, np.ndarray) and stored["q"].ndim == 3:
        stored = to_floats(stored)
    if isinstance(stored, np.ndarray) and scheme is None:
        host = cast(stored, loaded)
        # A copy in either case: the array may be a view of the file, which jnp.asarray would keep.
        return {path: transposed(host) if transpose else np.array(host)}, count_not_finite(host)
    count = 0
    if scheme is not None and isinstance(stored, np.ndarray):
        wide = cast(stored, np.dtype(np.float32))
        count = count_not_finite(wide)
        stored = {} if count else quantise(wide.T if transpose else wide, scheme, loaded)
    parts = {f"{path}/{name}": cast(part, loaded) if name == "scale" else part for name, part in stored.items()}
    return parts, count + sum(map(count_not_finite, parts.values()))


def to_floats(stored: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns a quantised weight of a file as float32, whatever the dtype of its scales."""
    return np.asarray(dequantise({**stored, "scale": stored["scale"].astype(np.float32)}))


def transposed(array: np.ndarray) -> np.ndarray:
    """Copies a matrix [out, in] to a contiguous [in, out]."""
    result = np.empty(array.shape[::-1], array.dtype)
    # In strips that stay in the cache, four times as fast as one strided copy of a large matrix.
    for start in range(0, len(array), 64):
        result[:, start : start + 64] = array[start : start + 64].T
    return result


def count_not_finite(array: np.ndarray) -> int:
    """Counts NaN and infinite values of an array; 0 for integers.

    By the bits: `np.isfinite` takes six times as long on bfloat16.
    """
    if array.dtype.name not in _BITS:
        return 0
    integer, exponent = _BITS[array.dtype.name]
    flat = np.ascontiguousarray(array).reshape(-1).view(integer)
    return sum(
        int(np.count_nonzero((flat[start : start + _CHUNK] & integer(exponent)) == exponent))
        for start in range(0, flat.size, _CHUNK)
    )


def raise_not_finite(counts: Mapping[str, int], subject: str, remedy: str) -> None:
    """Raises one error that names the tensors with values that are not finite, of {name: count}."""
    named = [
        f"{name} holds {count} {'value that is' if count == 1 else 'values that are'} not finite"
        for name, count in counts.items()
        if count
    ]
    if named:
        rest = len(named) - _NAMED
        more = f", and {rest} more tensors hold such values" if rest > 0 else ""
        raise CheckpointError(f"{subject}: {', '.join(named[:_NAMED])}{more} (NaN or infinity). {remedy}")


def check_params(flat: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], subject: str) -> None:
    """Checks names and shapes of parameters in memory; raises one error that names all that do not fit."""
    if quantised := [path.removesuffix("/q") for path in flat if path.endswith(("weight/q", "embedding/q"))]:
        raise CheckpointError(
            f"{subject} weights must be floats to be written, got quantised ones in {quantised[0]} and "
            f"{len(quantised) - 1} more. Load the model without weights=, or keep the checkpoint that it came from."
        )
    problems = TensorProblems()
    problems.found["missing"] = [path for path in expected if path not in flat]
    for path, leaf in flat.items():
        if path not in expected:
            problems.found["unexpected"].append(path)
        elif np.shape(leaf) != expected[path]:
            problems.found["misshaped"].append(f"{path} is {list(np.shape(leaf))}, expected {list(expected[path])}")
    problems.raise_if_any(subject, "Pass the parameters with the configuration that they were made for.")


@dataclasses.dataclass(frozen=True)
class Deferred:
    """An array that `make` returns, and that exists on the host only while it is written."""

    shape: tuple[int, ...]
    make: Callable[[], Any]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.make(), dtype)


def write_weights(
    staging: Path,
    flat: Mapping[str, Any],
    table: Table,
    dtype: np.dtype,
    *,
    stem: str = "model",
    extra: Mapping[str, np.ndarray] | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Writes parameters to safetensors files; only one shard is on the host at a time.

    Args:
      staging: directory to write to. flat: {path: array}. dtype: of the file. stem: file name without its suffix.
      extra: further tensors, written as they are into the first file.
      max_shard_bytes: size from which the weights are split into shards with an index; None is 5 GiB.

    Raises:
      CheckpointError: values are not finite in `dtype`, or the disk is full.
    """
    names = {table.name_of(path)[0]: path for path in flat}
    split = huggingface_hub.split_state_dict_into_shards_factory(
        {name: flat[path] for name, path in names.items()},
        get_storage_size=lambda leaf: math.prod(np.shape(leaf)) * dtype.itemsize,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=max_shard_bytes or _MAX_SHARD_BYTES,
    )
    weight_map: dict[str, str] = {}
    spoiled: dict[str, int] = {}
    for number, (file, shard) in enumerate(split.filename_to_tensors.items()):
        tensors = dict(extra or {}) if number == 0 else {}
        for name in shard:
            host = cast(np.asarray(flat[names[name]]), dtype)
            spoiled[name] = count_not_finite(host)
            tensors[name] = transposed(host) if table.name_of(names[name])[1] else np.ascontiguousarray(host)
        if any(spoiled.values()):  # the remaining shards are checked for the report, and nothing more is written
            continue
        try:
            safetensors.numpy.save_file(tensors, staging / file, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # raised for a full disk
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{staging / file} could not be written ({reason}). Make room and save again."
            ) from error
        weight_map.update(dict.fromkeys(tensors, file))
    raise_not_finite(spoiled, "the weights are not written", _DIVERGED)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": weight_map}
        write_json(staging / f"{stem}.safetensors.index.json", index)
