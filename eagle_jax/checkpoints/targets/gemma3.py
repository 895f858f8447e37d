"""Lists what is particular in the config.json and the tensors of Gemma 3 (arXiv:2503.19786)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eagle_jax.checkpoints.files.fields import Fields
from eagle_jax.checkpoints.files.mapping import DECODER, Table
from eagle_jax.checkpoints.targets.rope import rope_config
from eagle_jax.checkpoints.targets.windows import FULL, SLIDING
from eagle_jax.config import DecoderConfig, RopeConfig

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "tie_word_embeddings": True, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
"""Values of `Gemma3TextConfig`: the files of 4B to 27B leave most of them out."""
WITH_IMAGES = ("Gemma3ForConditionalGeneration",)
"""Architectures of text and images, of which the text model is read."""
READS = ("query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern")
# The image tower and its projection; a text does not read them.
TABLE = Table(
    DECODER.rules,
    ignored=(r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*"),
    canonical=lambda name: re.sub(r"^language_model\.(lm_head)|^(language_model\.model|model\.language_model)\.",
                                  lambda match: match[1] or "model.", name),
)  # fmt: skip


def text_values(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns the config.json of the text model inside a model of text and images; others as they are."""
    fields = Fields(values, where)
    if fields.text("model_type", "", null=True) != "gemma3":
        return values
    names = "eos_token_id", "bos_token_id", "tie_word_embeddings", "quantization_config", "compression_config"
    shared = {key: values[key] for key in names if key in values}
    text = fields.mapping("text_config").values
    return {**shared, **text, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}


def flat_rope(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the values with RoPE in the keys of `transformers` 4: those of version 5 are nested by kind of layer.

    Raises:
      CheckpointError: `rope_parameters` is not nested, or layers with a window have a scaling.
    """
    given = Fields(values, where).mapping("rope_parameters")
    if not {FULL, SLIDING} & given.values.keys():
        if given.values:  # transformers reads nothing of it
            rule = f"nested by {FULL} and {SLIDING}"
            Fields(values, where).fail(
                "rope_parameters", rule, "Or write rope_theta, rope_local_base_freq and rope_scaling."
            )
        return dict(values)
    full, local = given.mapping(FULL), given.mapping(SLIDING)
    if local.text("rope_type", "default") != "default":
        local.fail("rope_type", "default or absent", "Load another model: a scaling in these layers is not supported.")
    flat = {key: value for key, value in values.items() if key != "rope_parameters"}
    flat["rope_scaling"] = {**full.values, **Fields(values, where).mapping("rope_scaling").values} or None
    for key, part in (("rope_theta", full), ("rope_local_base_freq", local)):
        if part.given("rope_theta"):
            flat[key] = part.number("rope_theta")
    return flat


def own_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of `DecoderConfig` that only Gemma has."""
    return {
        "rope": rope_config(fields),
        "local_rope": RopeConfig(fields.number("rope_local_base_freq")),
        "query_scalar": fields.integer("query_pre_attn_scalar"),
        "max_position": fields.integer("max_position_embeddings"),  # already stretched by the factor of RoPE
    }


def own_keys(config: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of config.json of the fields that only Gemma has."""
    return {
        "query_pre_attn_scalar": config.query_scalar or config.head_dim,
        "rope_local_base_freq": (config.local_rope or config.rope).theta,
        "max_position_embeddings": config.max_position,
    }
