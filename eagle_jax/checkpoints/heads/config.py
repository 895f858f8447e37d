"""Converts config.json of EAGLE heads to `HeadConfig` and back: official, SpecForge/NVIDIA and speculators keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from eagle_jax.checkpoints.files.errors import CheckpointError, notice
from eagle_jax.checkpoints.files.fields import Fields
from eagle_jax.checkpoints.files.tensors import TensorInfo
from eagle_jax.checkpoints.files.weights import TensorProblems
from eagle_jax.checkpoints.heads.target_match import check_verifier, check_window, compare_sizes, tapped_states
from eagle_jax.checkpoints.targets.config import check_key_value_heads, check_supported, common_keys, layer_sizes
from eagle_jax.checkpoints.targets.unsupported import check_features
from eagle_jax.config import DecoderConfig, HeadConfig

SWITCHES = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
"""Fields of `HeadConfig` in which EAGLE-3 heads differ, and their keys in every layout."""
_READ = (*SWITCHES, "use_aux_hidden_state")
# Key -> (the value of the heads that are read here, what another value asks for).
_ONLY: dict[str, tuple[Any, str]] = {
    "use_aux_hidden_state": (True, "A head without fused features"),
    "use_input_layernorm_in_first_layer": (True, "A head without a norm of the token embedding"),
    "use_last_layernorm": (True, "A head without a norm before its lm_head"),
    "use_mtp_layernorm": (False, "A head with the norms of multi-token prediction"),
    "parallel_draft_step": (1, "Drafting several tokens in one pass"),
    "parallel_drafting": (False, "Drafting several tokens in one pass"),
    "ptd_token_id": (None, "Drafting several tokens in one pass"),
    "block_size": (None, "Drafting a block of tokens in one pass"),
    "num_nextn_predict_layers": (0, "Multi-token prediction"),
}


def flat_config(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flattens a config.json to official keys: speculators nest the layer's, other projects the switches.

    Raises:
      CheckpointError: the speculator is no EAGLE-3 head, or a nested value is no object.
    """
    fields = Fields(values, where)
    nested = fields.mapping("eagle_config").values
    switches = {name: nested[name] for name in SWITCHES if name in nested}
    if not fields.given("speculators_model_type"):
        return {**switches, **values}
    algorithm = values["speculators_model_type"]
    if algorithm != "eagle3":
        raise CheckpointError(f"{where}: speculators_model_type={algorithm!r} is not supported, only 'eagle3'")
    if not fields.given("transformer_layer_config"):
        raise CheckpointError(f"{where}: no transformer_layer_config")
    layer = fields.mapping("transformer_layer_config").values
    rest = {key: value for key, value in values.items() if key != "transformer_layer_config"}
    return {"norm_before_residual": True, **switches, **layer, **rest}


def head_config(
    values: Mapping[str, Any],
    stored: Mapping[str, TensorInfo],
    target: DecoderConfig,
    where: str,
    problems: TensorProblems,
    *,
    taps: Sequence[int] | None = None,
) -> HeadConfig:
    """Builds the `HeadConfig` of a config.json; mismatches with `target` go to `problems`.

    A switch the config does not mention is decided by the stored tensors; one it does mention is taken at its word, so
    that a tensor which should be there and is not is reported as missing.

    Args:
      values: as `flat_config` returns them. stored: canonical tensor name -> info. where: the config's path.
      taps: replaces those of the config.

    Raises:
      CheckpointError: a configuration that is not that of a head at all, a value of another type, or an option that
        would change the drafts and is not supported.

    Warns:
      UserWarning: options that are not known, a head that was trained for a target of another family, or a number of
        layers or a tied lm_head that the tensors contradict.
    """
    fields = Fields(values, where)
    check_supported(values, where)
    _check_method(fields)
    check_features(fields, known=_READ)
    _check_eagle_options(fields)
    check_window(fields, target)
    check_verifier(fields, target)

    def switch(key: str, tensor: str) -> bool:
        return fields.flag(key, tensor in stored, null=True)

    has_bias = switch("qkv_bias", "layers.0.self_attn.q_proj.bias")
    layer = layer_sizes(
        values,
        where,
        num_layers=1,
        qkv_bias=has_bias or fields.flag("attention_bias", null=True),
        out_bias="layers.0.self_attn.o_proj.bias" in stored,
        mlp_bias=switch("mlp_bias", "layers.0.mlp.gate_proj.bias"),
        qk_norm="layers.0.self_attn.q_norm.weight" in stored,
    )
    check_key_value_heads(values, layer, stored.get("layers.0.self_attn.k_proj.weight"), problems)
    kind = _kind(fields, stored)
    _compare_with_file(fields, kind, stored)
    reads = fields.integer("target_hidden_size", layer.hidden_size, null=True)
    own_embedding = "embed_tokens.weight" in stored
    compare_sizes(kind, layer, reads, own_embedding, target, problems)
    common: dict[str, Any] = {"layer": layer, "own_embedding": own_embedding}
    if kind == "eagle1":
        if taps is not None and tuple(taps) != (target.num_layers,):
            raise CheckpointError(f"taps={tuple(taps)}: an EAGLE-1/2 head reads the final state ({target.num_layers},)")
        return HeadConfig(
            kind="eagle1",
            draft_vocab_size=layer.vocab_size,
            target_hidden_size=layer.hidden_size,
            taps=(target.num_layers,),
            fc_bias=fields.flag("bias", True),  # there unless the config says "bias": false
            **common,
        )
    return HeadConfig(
        kind="eagle3",
        draft_vocab_size=_draft_vocab_size(fields, stored, layer.vocab_size),
        target_hidden_size=reads,
        taps=tapped_states(fields, stored, target, reads, problems, taps),
        fc_bias="fc.bias" in stored,
        fc_norm=switch("fc_norm", "fc_norm.0.weight"),
        norm_before_fc=switch("norm_before_fc", "input_norm.weight"),
        norm_output=fields.flag("norm_output", null=True),
        norm_before_residual=fields.flag("norm_before_residual", null=True),
        **common,
    )


def _compare_with_file(fields: Fields, kind: str, stored: Mapping[str, TensorInfo]) -> None:
    """Compares the number of layers and the tied lm_head with the tensors, which decide.

    Warns:
      UserWarning: config.json contradicts them.
    """
    layers = fields.integer("num_hidden_layers", 1, null=True)
    # `plan` reports the tensors of further layers.
    if layers > 1 and not any(name.startswith("layers.1.") for name in stored):
        notice(f"{fields.where}: num_hidden_layers is {layers} and the file holds one layer: uses the one")
    # EAGLE-1/2 heads draft through the target's lm_head, whatever the key says.
    if fields.flag("tie_word_embeddings", null=True) and kind == "eagle3" and "lm_head.weight" in stored:
        notice(f"{fields.where}: tie_word_embeddings is true and the file holds an lm_head of its own: uses the file's")


def _draft_vocab_size(fields: Fields, stored: Mapping[str, TensorInfo], vocab_size: int) -> int:
    """Returns the draft vocabulary size of the config, or else the rows of the lm_head."""
    if fields.given("draft_vocab_size"):
        return fields.integer("draft_vocab_size")
    rows = stored["lm_head.weight"].shape[:1] if "lm_head.weight" in stored and "d2t" in stored else ()
    return rows[0] if rows else vocab_size


def _check_eagle_options(fields: Fields) -> None:
    """Checks that no option of other EAGLE heads is set, in `eagle_config` or at the top level."""
    for part in (fields, fields.mapping("eagle_config")):
        for key, (supported, meaning) in _ONLY.items():
            value = part.values.get(key, supported)
            if value is not None and value != supported:
                part.fail(key, f"{json.dumps(supported)} or absent", f"{meaning} is not supported.")
        if part.inside:
            check_features(part, known=(*_ONLY, *_READ))


def _check_method(fields: Fields) -> None:
    """Checks that `architectures` names an EAGLE head; projects name the same head in many ways."""
    names = fields.names("architectures")
    known = ("eagle", "llama", "mistral", "qwen")
    if names and not any(part in name.lower() for name in names for part in known):
        raise CheckpointError(
            f"{fields.where}: architectures must name an EAGLE head with a Llama-like layer, got {', '.join(names)}."
        )
    if any(name.lower().startswith("peagle") for name in names):
        raise CheckpointError(f"{fields.where}: {', '.join(names)} drafts all tokens in one pass: not supported")


def _kind(fields: Fields, stored: Mapping[str, TensorInfo]) -> Literal["eagle1", "eagle3"]:
    named = any("eagle3" in name.lower() for name in fields.names("architectures"))
    says = named or fields.given("speculators_model_type") or fields.given("draft_vocab_size")
    return "eagle3" if says or "layers.0.hidden_norm.weight" in stored else "eagle1"


def head_config_values(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """Returns config.json of a head in the official layout; switches only where they are on."""
    layer = config.layer
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **common_keys(layer, dtype),
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    if layer.qkv_bias:
        values |= {"qkv_bias": True, "attention_bias": True}
    if layer.mlp_bias:
        values["mlp_bias"] = True
    if config.kind == "eagle1":
        values["bias"] = config.fc_bias
        return values
    values["draft_vocab_size"] = config.draft_vocab_size
    if config.target_hidden_size != layer.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    values |= {name: True for name in SWITCHES if getattr(config, name)}
    # In both numberings, each for its readers; see `_taps`.
    values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps]}
    values["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
    return values
