"""Reads and writes the rotary embedding of config.json, in keys of all versions of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_jax.checkpoints.files.fields import CheckpointError, Fields
from eagle_jax.config import RopeConfig

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_LENGTH = ("max_position_embeddings", 2048)  # key and default


def rope_config(fields: Fields) -> RopeConfig:
    """Reads RoPE from `rope_theta` + `rope_scaling` (up to transformers 4) or `rope_parameters` (from 5).

    Raises:
      CheckpointError: the kind is not supported, or a value breaks its rule.
    """
    given, newer = fields.mapping("rope_scaling"), fields.mapping("rope_parameters")
    if given.values and newer.values:  # as in transformers, the older key counts where a file has both
        fields.contradict("rope_parameters", "rope_scaling is", *(_normalised(part, fields) for part in (given, newer)))
    given = given if given.values else newer
    kind = given.text("rope_type") if "rope_type" in given.values else given.text("type", "default")
    given.contradict("type", "rope_type is", kind)
    if any(isinstance(value, Mapping) for value in given.values.values()) or kind not in _KINDS:
        raise CheckpointError(
            f"{fields.where}: rope_type must be one of {', '.join(_KINDS)}, got {kind!r} with {sorted(given.values)}. "
            "Load another model."
        )
    for part in (given, fields):
        if part.number("partial_rotary_factor", 1.0, null=True) != 1:
            part.fail("partial_rotary_factor", "1 or absent", "Load another model: partial rotation is not supported.")
    length = fields.integer(*_LENGTH)
    theta = (given if "rope_theta" in given.values else fields).number("rope_theta", RopeConfig.theta)
    fields.contradict(
        "rope_theta", f"{given.inside}rope_theta is", theta, fields.number("rope_theta", theta, null=True)
    )
    if kind == "yarn" and theta <= 1:
        given.fail("rope_theta", "above 1 for yarn, which divides by its logarithm")
    if kind == "default":
        return RopeConfig(theta=theta)
    # "dynamic" stretches the configured context, "linear" needs none, the others may name the one trained on.
    original = RopeConfig.original_max_position if kind == "linear" else length
    if kind in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        original = (fields if name in fields.values else given).integer(name, length)
    needed = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    stated = ("low_freq_factor", "high_freq_factor", "attention_factor")
    numbers = [key for key in stated if key in needed or given.given(key)]
    # `transformers` reads a zero of these as the default.
    numbers += [key for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim") if given.values.get(key)]
    return RopeConfig(
        theta=theta,
        kind=kind,  # type: ignore[arg-type]
        factor=given.number("factor", length / original if kind == "yarn" else None, null=True),
        original_max_position=original,
        truncate=given.values.get("truncate", True) is not None and given.flag("truncate", True),
        **{key: given.number(key) for key in numbers},
    )


def _normalised(given: Fields, fields: Fields) -> dict[str, Any]:
    """Returns RoPE parameters with those that a file may leave out or keep outside of them."""
    theta = fields.values.get("rope_theta", RopeConfig.theta)
    values = {"rope_theta": theta, "rope_type": given.values.get("type", "default"), **given.values}
    return {key: value for key, value in values.items() if key != "type"}


def context_length(fields: Fields, rope: RopeConfig) -> int:
    """Returns the context length: `max_position_embeddings`, stretched by scalings it does not include.

    "linear" and "dynamic" stretch it by their factor (Vicuna-16k has 4096 and 4). yarn does if the config has the
    original length (Qwen2.5 has 32768 and 4). A llama3 config has the stretched length.
    """
    length = fields.integer(*_LENGTH)
    if rope.kind in ("linear", "dynamic"):
        return int(length * rope.factor)
    return max(length, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else length


def unstretched_length(length: int, rope: RopeConfig) -> int:
    """Returns `max_position_embeddings` of a context length; the inverse of `context_length`."""
    if rope.kind == "dynamic":
        return rope.original_max_position
    return int(length / rope.factor) if rope.kind == "linear" else length


_SCALING = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
}


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """Returns `rope_scaling` of a config.json; None without scaling."""
    if rope.kind in ("none", "default"):
        return None
    values: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in _SCALING:
        values["original_max_position_embeddings"] = rope.original_max_position
    stated = {name: getattr(rope, name) for name in _SCALING.get(rope.kind, ())}
    return values | {name: value for name, value in stated.items() if value is not None}
