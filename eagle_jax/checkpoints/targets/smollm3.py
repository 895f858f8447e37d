"""Lists what is particular in the config.json of SmolLM3: layers without rotary embedding (arXiv:2501.18795)."""

from __future__ import annotations

from typing import Any

from eagle_jax.checkpoints.files.fields import Fields
from eagle_jax.config import DecoderConfig

READS = ("no_rope_layers", "no_rope_layer_interval")


def own_fields(fields: Fields) -> dict[str, Any]:
    """Returns `nope_layers` of `DecoderConfig`: from a list with 0 for each, or else every fourth layer.

    Raises:
      CheckpointError: the list has other values, or is shorter than the layers.
    """
    layers, every = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval", 4)
    rotates = fields.ids("no_rope_layers") or tuple(int((layer + 1) % every != 0) for layer in range(layers))
    if len(rotates) < layers or not set(rotates) <= {0, 1}:
        fields.fail("no_rope_layers", f"a list of 0 (no RoPE) or 1 for each of the {layers} layers")
    return {"nope_layers": tuple(layer for layer, on in enumerate(rotates[:layers]) if not on)}


def own_keys(config: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of config.json of the fields that only SmolLM3 has."""
    rotates = [int(layer not in config.nope_layers) for layer in range(config.num_layers)]
    return {"no_rope_layers": rotates, "pad_token_id": None}  # its default is a token that a small vocabulary lacks
