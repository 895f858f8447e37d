"""Reads and writes the rotary embedding of config.json, in keys of all versions of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_jax.checkpoints.files.fields import CheckpointError, Fields, notice, shown
from eagle_jax.config import RopeConfig

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ORIGINAL = "original_max_position_embeddings"
_LISTS = ("short_factor", "long_factor")
_LENGTH = ("max_position_embeddings", 2048)  # key and default


def rope_config(
    fields: Fields,
    *,
    theta: float = RopeConfig.theta,
    partial: bool = False,
    context: int | None = None,
    strict: bool = False,
) -> RopeConfig:
    """Reads RoPE from `rope_theta` + `rope_scaling` (up to transformers 4) or `rope_parameters` (from 5).

    Args:
      theta: the base if the config names none. partial: the family reads `partial_rotary_factor`.
      context: the context length that is to be used. For longrope it decides between the two lists of factors; None
        stays within the original length, where `transformers` uses the short factors.
      strict: a key that the kind does not read is an error, not a warning.

    Raises:
      CheckpointError: the kind is not supported, or a value breaks its rule.

    Warns:
      UserWarning: the kind does not read a key.
    """
    given, newer = fields.mapping("rope_scaling"), fields.mapping("rope_parameters")
    if given.values and newer.values:  # as in transformers, the older key counts where a file has both
        fields.contradict("rope_parameters", "rope_scaling is", *(_normalised(part, fields) for part in (given, newer)))
    given = given if given.values else newer
    kind = given.text("rope_type") if "rope_type" in given.values else given.text("type", "default")
    given.contradict("type", "rope_type is", kind)
    if kind == "su" or (kind == "yarn" and given.given("short_factor")):
        kind = "longrope"  # its names in the first files of Phi-3
    if any(isinstance(value, Mapping) for value in given.values.values()) or kind not in _KINDS:
        raise CheckpointError(
            f"{fields.where}: rope_type must be one of {', '.join(_KINDS)}, got {kind!r} with {sorted(given.values)}. "
            "Load another model."
        )
    _check_read(given, kind, strict)
    share = given if given.given("partial_rotary_factor") else fields
    rotated = share.number("partial_rotary_factor", 1.0, null=True)
    if rotated != 1 and not (partial and rotated < 1):
        rule = "at most 1" if partial else "1 or absent"
        share.fail("partial_rotary_factor", rule, "Load another checkpoint: only Phi-3/4 rotate a part of each head.")
    length = fields.integer(*_LENGTH)
    theta = (given if "rope_theta" in given.values else fields).number("rope_theta", theta)
    fields.contradict(
        "rope_theta", f"{given.inside}rope_theta is", theta, fields.number("rope_theta", theta, null=True)
    )
    if kind == "yarn" and theta <= 1:
        given.fail("rope_theta", "above 1 for yarn, which divides by its logarithm")
    if kind == "default":
        return RopeConfig(theta=theta, partial=rotated)
    # "dynamic" stretches the configured context, "linear" needs none, the others may name the one trained on.
    original = RopeConfig.original_max_position if kind == "linear" else length
    if kind in ("llama3", "yarn", "longrope"):
        least = 2 if kind == "longrope" else 1  # divides by its logarithm
        original = (fields if _ORIGINAL in fields.values else given).integer(_ORIGINAL, length, least=least)
    needed = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    stated = ("low_freq_factor", "high_freq_factor", "attention_factor")
    numbers = [key for key in stated if key in needed or given.given(key)]
    # `transformers` reads a zero of these as the default.
    numbers += [key for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim") if given.values.get(key)]
    read: dict[str, Any] = {key: given.number(key) for key in numbers}
    read |= {key: given.numbers(key) for key in _LISTS} if kind == "longrope" else {}
    return RopeConfig(
        theta=theta,
        kind=kind,  # type: ignore[arg-type]
        factor=given.number("factor", length / original if kind in ("yarn", "longrope") else None, null=True),
        original_max_position=original,
        truncate=given.values.get("truncate", True) is not None and given.flag("truncate", True),
        partial=rotated,
        **read,
        is_long=kind == "longrope" and (context or 0) > original,
    )


def _check_read(given: Fields, kind: str, strict: bool) -> None:
    """Refuses, or warns of, keys that the kind does not read."""
    read = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", _ORIGINAL, *_SCALING.get(kind, ())}
    if kind != "default" or given.values.get("factor") == 1:
        read.add("factor")
    unread = {key: value for key, value in given.values.items() if value and key not in read}
    if unread and strict:
        key = next(iter(unread))
        given.fail(key, f"absent where rope_type is {kind}", "Remove it if the head was trained without it.")
    if unread:
        stated = ", ".join(f"{given.inside}{key}={shown(value)}" for key, value in unread.items())
        notice(f"{given.where}: {stated}: not read where rope_type is {kind}")


def _normalised(given: Fields, fields: Fields) -> dict[str, Any]:
    """Returns RoPE parameters with those that a file may leave out or keep outside of them."""
    theta = fields.values.get("rope_theta", RopeConfig.theta)
    values = {"rope_theta": theta, "rope_type": given.values.get("type", "default"), **given.values}
    return {key: value for key, value in values.items() if key != "type"}


def context_length(fields: Fields, rope: RopeConfig) -> int:
    """Returns the context length: `max_position_embeddings`, stretched by scalings it does not include.

    "linear" and "dynamic" stretch it by their factor (Vicuna-16k has 4096 and 4). yarn does if the config has the
    original length (Qwen2.5 has 32768 and 4). A llama3 config has the stretched length. longrope with its short factors
    ends at the original length.
    """
    length = fields.integer(*_LENGTH)
    if rope.kind in ("linear", "dynamic"):
        return int(length * rope.factor)
    if rope.kind == "longrope" and not rope.is_long:
        return min(length, rope.original_max_position)
    return max(length, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else length


def _unstretched(length: int, rope: RopeConfig) -> int:
    """Returns `max_position_embeddings` of a context length; the inverse of `context_length`."""
    if rope.kind == "dynamic":
        return rope.original_max_position
    if rope.kind == "longrope":
        return max(length, round(rope.original_max_position * rope.factor))
    return int(length / rope.factor) if rope.kind == "linear" else length


_SCALING = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": (*_LISTS, "attention_factor"),
}


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """Returns `rope_scaling` of a config.json; None without scaling."""
    if rope.kind in ("none", "default"):
        return None
    values: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "longrope":  # transformers 4 reads no other keys; `length_keys` gives the lengths
        values = {"type": rope.kind}
    elif rope.kind in _SCALING:
        values[_ORIGINAL] = rope.original_max_position
    stated = {name: getattr(rope, name) for name in _SCALING.get(rope.kind, ())}
    stated = {name: list(value) if isinstance(value, tuple) else value for name, value in stated.items()}
    return values | {name: value for name, value in stated.items() if value is not None}


def length_keys(length: int, rope: RopeConfig) -> dict[str, Any]:
    """Returns the keys of config.json beside `rope_scaling` that a context length and a RoPE need."""
    values: dict[str, Any] = {"max_position_embeddings": _unstretched(length, rope)}
    if rope.kind == "longrope":
        values[_ORIGINAL] = rope.original_max_position
    return values | ({"partial_rotary_factor": rope.partial} if rope.partial != 1 else {})
