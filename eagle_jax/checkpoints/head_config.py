"""`config.json` of EAGLE heads to `HeadConfig`, and back: official, SpecForge/NVIDIA and speculators keys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from eagle_jax.checkpoints.errors import CheckpointError
from eagle_jax.checkpoints.hf_config import check_supported, common_keys, layer_sizes
from eagle_jax.checkpoints.mapping import TensorProblems
from eagle_jax.checkpoints.tensors import TensorInfo
from eagle_jax.config import DecoderConfig, HeadConfig

SWITCHES = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
"""Fields of `HeadConfig` in which EAGLE-3 heads differ, and their keys in every layout."""


def canonical_name(name: str) -> str:
    """A head tensor's name without the prefixes in which projects differ."""
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The hidden states that EAGLE-3 reads where a config does not say: low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)


def flat_config(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config in official keys; the speculators layout nests the layer's, others nest the switches.

    Raises:
      CheckpointError: a speculator that is no EAGLE-3 head.
    """
    nested = values.get("eagle_config") or {}
    switches = {name: nested[name] for name in SWITCHES if name in nested}
    algorithm = values.get("speculators_model_type")
    if algorithm is None:
        return {**switches, **values}
    if algorithm != "eagle3":
        raise CheckpointError(f"{where}: speculators_model_type={algorithm!r} is not supported, only 'eagle3'")
    layer = values.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise CheckpointError(f"{where}: no transformer_layer_config")
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
    """The head that a config describes; a mismatch with `target` goes to `problems`.

    A switch the config does not mention is decided by the stored tensors; one it does mention is taken at its word, so
    that a tensor which should be there and is not is reported as missing.

    Args:
      values: as `flat_config` returns them. stored: canonical tensor name -> info. where: the config's path.
      taps: replaces those of the config.

    Raises:
      CheckpointError: a configuration that is not that of a head at all.
    """
    check_supported(values, where)
    _refuse_other_methods(values, where)
    _refuse_sliding_window(values, target, where)

    def switch(key: str, tensor: str) -> bool:
        return tensor in stored if values.get(key) is None else bool(values[key])

    layer = layer_sizes(
        values,
        where,
        num_layers=1,
        qkv_bias=switch("qkv_bias", "layers.0.self_attn.q_proj.bias") or bool(values.get("attention_bias", False)),
        out_bias="layers.0.self_attn.o_proj.bias" in stored,
        mlp_bias=switch("mlp_bias", "layers.0.mlp.gate_proj.bias"),
        qk_norm="layers.0.self_attn.q_norm.weight" in stored,
    )
    kind = _kind(values, stored)
    reads = int(values.get("target_hidden_size") or layer.hidden_size)
    own_embedding = "embed_tokens.weight" in stored
    _compare(kind, layer, reads, own_embedding, target, problems)
    common: dict[str, Any] = {"layer": layer, "own_embedding": own_embedding}
    if kind == "eagle1":
        if taps is not None and tuple(taps) != (target.num_layers,):
            raise CheckpointError(f"taps={tuple(taps)}: an EAGLE-1/2 head reads the final state ({target.num_layers},)")
        return HeadConfig(
            kind="eagle1",
            draft_vocab_size=layer.vocab_size,
            target_hidden_size=layer.hidden_size,
            taps=(target.num_layers,),
            fc_bias=bool(values.get("bias", True)),  # there unless the config says "bias": false
            **common,
        )
    return HeadConfig(
        kind="eagle3",
        draft_vocab_size=int(values.get("draft_vocab_size") or layer.vocab_size),
        target_hidden_size=reads,
        taps=_taps(values, stored, target, reads, where, problems, taps),
        fc_bias="fc.bias" in stored,
        fc_norm=switch("fc_norm", "fc_norm.0.weight"),
        norm_before_fc=switch("norm_before_fc", "input_norm.weight"),
        norm_output=bool(values.get("norm_output", False)),
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        **common,
    )


def _refuse_other_methods(values: Mapping[str, Any], where: str) -> None:
    """Projects name the same head in many ways (LlamaForCausalLMEagle3, Eagle3Speculator, LlamaForCausalLM, ...)."""
    names = [str(name) for name in values.get("architectures") or ()]
    known = ("eagle", "llama", "mistral", "qwen")
    if names and not any(part in name.lower() for name in names for part in known):
        raise CheckpointError(f"{where}: {', '.join(names)} is no EAGLE head with a Llama-like layer")


def _kind(values: Mapping[str, Any], stored: Mapping[str, TensorInfo]) -> Literal["eagle1", "eagle3"]:
    named = any("eagle3" in str(name).lower() for name in values.get("architectures") or ())
    says = named or values.get("speculators_model_type") == "eagle3" or values.get("draft_vocab_size") is not None
    return "eagle3" if says or "layers.0.hidden_norm.weight" in stored else "eagle1"


def _compare(
    kind: str, layer: DecoderConfig, reads: int, own_embedding: bool, target: DecoderConfig, problems: TensorProblems
) -> None:
    if layer.vocab_size != target.vocab_size:
        problems.found["other"].append(
            f"vocab_size is {layer.vocab_size}, the target's {target.vocab_size}: a head for another target"
        )
    # An EAGLE-1/2 head predicts in the target's feature space.
    sizes = {reads, layer.hidden_size} if kind == "eagle1" else {reads}
    if sizes != {target.hidden_size}:
        problems.found["other"].append(
            f"hidden size is {' and '.join(map(str, sorted(sizes)))}, the target's {target.hidden_size}: "
            f"a head for another target"
        )
    elif layer.hidden_size != target.hidden_size and not own_embedding:
        problems.found["missing"].append("embed_tokens.weight (the head's hidden_size is not the target's)")


def _refuse_sliding_window(values: Mapping[str, Any], target: DecoderConfig, where: str) -> None:
    window = values.get("sliding_window")
    slides = values.get("use_sliding_window") and "full_attention" not in (values.get("layer_types") or ())
    if slides and window is not None and int(window) < target.max_position:
        raise CheckpointError(
            f"{where}: the head's sliding_window={window} is active below the target's context length "
            f"{target.max_position} and is not supported; load the target with max_position={window}"
        )


def _taps(
    values: Mapping[str, Any],
    stored: Mapping[str, TensorInfo],
    target: DecoderConfig,
    reads: int,
    where: str,
    problems: TensorProblems,
    override: Sequence[int] | None,
) -> tuple[int, ...]:
    """The tapped hidden states, in `transformers` numbering; their number is checked against `fc`."""
    nested = values.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise CheckpointError(f"{where}: use_aux_hidden_state=false (a head without fused features) is not supported")
    keys = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    # Two numberings are in use. Inside `eagle_config` (SGLang, NVIDIA) an id is a layer whose OUTPUT is taken; at the
    # top level (vLLM, speculators) it is the layer which the state ENTERS, as in `transformers`.
    outputs_of, entering = (next((at[key] for key in keys if at.get(key)), None) for at in (nested, values))
    named = [tuple(int(i) + 1 for i in outputs_of)] if outputs_of else []
    named += [tuple(int(i) for i in entering)] if entering else []
    if override is not None:
        if not isinstance(override, Sequence) or not all(isinstance(tap, int) for tap in override):
            raise CheckpointError(f"taps={override!r} must be a list of hidden-state indices, such as (2, 16, 29)")
        chosen = tuple(override)
    elif len(set(named)) > 1:
        raise CheckpointError(
            f"{where}: its two lists of layer ids name different hidden states, {named[0]} and {named[1]} (numbered "
            f"as in transformers); pass taps=... to choose"
        )
    else:
        chosen = named[0] if named else default_taps(target.num_layers)
    fc = stored.get("fc.weight")
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] != len(chosen) * reads:
        problems.found["other"].append(
            f"fc reads {fc.shape[1]} features, which is {fc.shape[1] / reads:g} taps of hidden size {reads}, not "
            f"{len(chosen)} (taps {chosen}): a head for another target, or pass taps=..."
        )
    outside = [tap for tap in chosen if not 0 <= tap <= target.num_layers]
    if outside:
        problems.found["other"].append(
            f"taps {outside} do not exist, the target has hidden states 0 to {target.num_layers}: "
            f"a head for another target, or pass taps=..."
        )
    # The report goes on with taps that exist; no head is returned.
    return tuple(min(max(tap, 0), target.num_layers) for tap in chosen)


def head_config_values(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """config.json of a head in the official layout; switches are written where they differ from the official head's."""
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
