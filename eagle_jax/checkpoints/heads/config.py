"""Reads config.json of EAGLE heads into `HeadConfig`: official, SpecForge/NVIDIA and speculators keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from eagle_jax.checkpoints.files.fields import LARGEST, CheckpointError, Fields, shown
from eagle_jax.checkpoints.files.kinds import kind_of
from eagle_jax.checkpoints.files.tensors import TensorInfo
from eagle_jax.checkpoints.files.weights import TensorProblems
from eagle_jax.checkpoints.heads.supported import SWITCHES, check_claim, check_head, refuse
from eagle_jax.checkpoints.targets.config import layer_sizes
from eagle_jax.checkpoints.targets.rope import rope_config
from eagle_jax.checkpoints.targets.windows import FULL, SLIDING
from eagle_jax.config import DecoderConfig, HeadConfig

_AS_TRAINED = "Set the key in config.json to what the head was trained with."
_TAP_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
"""Names of the ids of tapped layers."""


def flat_config(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flattens a config.json to official keys: speculators nests the layer's, others the switches.

    Raises:
      CheckpointError: another algorithm of speculators, or a nested value is no object.
    """
    fields = Fields(values, where)
    nested = fields.mapping("eagle_config").values
    switches = {name: nested[name] for name in SWITCHES if name in nested}
    for name, value in switches.items():
        if bool(values.get(name, value)) != bool(value):
            fields.mapping("eagle_config").fail(name, f"{shown(values[name])}, as outside of eagle_config")
    if not fields.given("speculators_model_type"):
        return {**switches, **values}
    if values["speculators_model_type"] != "eagle3":
        refuse(f"{where}: speculators_model_type", "'eagle3'", shown(values["speculators_model_type"]))
    algorithm = fields.mapping("speculators_config").text("algorithm", "eagle3", null=True)
    if algorithm != "eagle3":
        refuse(f"{where}: speculators_config.algorithm", "'eagle3'", shown(algorithm))
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

    A switch in the config decides: a tensor that it needs and the file lacks is reported as missing. The stored tensors
    decide the other switches.

    Args:
      values: as `flat_config` returns them. stored: canonical tensor name -> info. where: the config's path.
      taps: replaces those of the config.

    Raises:
      CheckpointError: a value of another type, an option or `taps` that is not supported, or quantised weights.
    """
    fields = Fields(values, where)
    check_head(fields, stored)
    windows = _window(fields, target)
    # Families are compared, not names of directories.
    verifier = fields.mapping("speculators_config").mapping("verifier")
    verified = verifier.names_of("architectures")
    if verified and target.architecture not in verified:
        verifier.contradict("architectures", "the target is a", target.architecture)
    family = fields.text("target_model_type", "", null=True).removesuffix("_text").replace("_", "")
    if family not in target.architecture.lower():
        fields.contradict("target_model_type", "the target is a", target.architecture)
    fields.contradict("num_hidden_layers", "an EAGLE head has", 1, fields.integer("num_hidden_layers", 1, null=True))

    def switch(key: str, tensor: str) -> bool:
        return fields.flag(key, tensor in stored, null=True)

    has_bias = switch("qkv_bias", "layers.0.self_attn.q_proj.bias")
    layer = layer_sizes(
        fields,
        num_layers=1,
        rope=rope_config(fields, context=target.max_position, strict=True),
        qkv_bias=has_bias or fields.flag("attention_bias", null=True),
        out_bias="layers.0.self_attn.o_proj.bias" in stored,
        mlp_bias=switch("mlp_bias", "layers.0.mlp.gate_proj.bias"),
        qk_norm="layers.0.self_attn.q_norm.weight" in stored,
        windows=windows,
    )
    kind: Literal["eagle1", "eagle3"] = "eagle3" if kind_of(values, stored, where) == "eagle3" else "eagle1"
    check_claim(fields, kind, stored)
    rows = stored["lm_head.weight"].shape[:1] if {"lm_head.weight", "d2t"} <= stored.keys() else ()
    # EAGLE-1/2 heads draft through the target's lm_head, whatever the key says.
    if fields.flag("tie_word_embeddings", null=True) and kind == "eagle3" and "lm_head.weight" in stored:
        fields.contradict("tie_word_embeddings", "the file has", "an lm_head of its own")
    reads = fields.integer("target_hidden_size", layer.hidden_size, null=True)
    own_embedding = "embed_tokens.weight" in stored
    _compare_sizes(kind, layer, reads, own_embedding, target, problems)
    if kind == "eagle1":
        _check_eagle1(fields)
        final = (target.num_layers,)
        if taps is not None and tuple(taps) != final:
            raise CheckpointError(
                f"taps must be {final}, the final state, for an EAGLE-1/2 head, got {tuple(taps)}. Leave it out."
            )
        fc_bias = fields.flag("bias", True)  # on unless the config has "bias": false
        return HeadConfig(kind, layer, layer.vocab_size, layer.hidden_size, final, own_embedding, fc_bias)
    switches = {
        "fc_norm": switch("fc_norm", "fc_norm.0.weight"),
        "norm_before_fc": switch("norm_before_fc", "input_norm.weight"),
        "norm_output": fields.flag("norm_output", null=True),
        "norm_before_residual": fields.flag("norm_before_residual", null=True),
    }
    if switches["fc_norm"] and switches["norm_before_fc"]:
        rule = "false where fc_norm is on: engines apply the two norms in different orders"
        fields.fail("norm_before_fc", rule, "Load another head.")
    return HeadConfig(
        kind,
        layer,
        draft_vocab_size=fields.integer("draft_vocab_size", rows[0] if rows else layer.vocab_size, null=True),
        target_hidden_size=reads,
        taps=_tapped_states(fields, stored, target, reads, problems, taps),
        own_embedding=own_embedding,
        fc_bias="fc.bias" in stored,
        **switches,
    )


def _compare_sizes(
    kind: str, layer: DecoderConfig, reads: int, own_embedding: bool, target: DecoderConfig, problems: TensorProblems
) -> None:
    """Compares vocabulary and hidden size with those of the target."""
    if layer.vocab_size != target.vocab_size:
        problems.found["other"].append(f"vocab_size is {layer.vocab_size}, the target's {target.vocab_size}")
    # An EAGLE-1/2 head predicts in the target's feature space.
    sizes = {reads, layer.hidden_size} if kind == "eagle1" else {reads}
    if sizes != {target.hidden_size}:
        problems.found["other"].append(
            f"hidden size is {' and '.join(map(str, sorted(sizes)))}, the target's {target.hidden_size}"
        )
    elif layer.hidden_size != target.hidden_size and not own_embedding:
        problems.found["missing"].append("embed_tokens.weight (the head's hidden_size is not the target's)")


def _window(fields: Fields, target: DecoderConfig) -> tuple[int, ...]:
    """Returns `windows` of the head's layer; () if its window hides no token of the target's context.

    Raises:
      CheckpointError: the keys contradict, or do not say whether the window is on. Engines then differ.
    """
    window = fields.integer("sliding_window", LARGEST, null=True)
    kinds = set(fields.names_of("layer_types"))
    if len(kinds) > 1 or not kinds <= {FULL, SLIDING}:
        fields.fail("layer_types", f"{FULL} or {SLIDING}, the type of the head's one layer", "Load another head.")
    slides = fields.flag("use_sliding_window", SLIDING in kinds, null=True)
    if SLIDING in kinds and not slides:
        fields.fail("use_sliding_window", f"true where layer_types is {SLIDING}", _AS_TRAINED)
    if slides and FULL in kinds and window < target.max_position:
        fields.fail("layer_types", f"{SLIDING} where use_sliding_window is true", _AS_TRAINED)
    slides = slides and FULL not in kinds
    if slides and not fields.given("sliding_window"):
        fields.fail("sliding_window", "a size where use_sliding_window or layer_types turns it on", _AS_TRAINED)
    if not kinds and not fields.given("use_sliding_window") and window < target.max_position:
        # Layers of Mistral slide in every model that has a window.
        slides = fields.text("model_type", "", null=True) == "mistral"
        if not slides:
            fields.fail("use_sliding_window", f"true or false where sliding_window is {window}", _AS_TRAINED)
    # Qwen counts layers without a window.
    if slides and fields.given("use_sliding_window") and fields.integer("max_window_layers", 0, null=True, least=0):
        fields.fail("max_window_layers", "0 or absent where use_sliding_window is true", _AS_TRAINED)
    return (window,) if slides and window < target.max_position else ()


def _tapped_states(
    fields: Fields,
    stored: Mapping[str, TensorInfo],
    target: DecoderConfig,
    reads: int,
    problems: TensorProblems,
    override: Sequence[int] | None,
) -> tuple[int, ...]:
    """Returns the tapped hidden states, in `transformers` numbering; their number must fit `fc`."""
    if override is not None:
        if not isinstance(override, Sequence) or not all(type(tap) is int for tap in override):
            raise CheckpointError(
                f"taps must be a list of hidden-state indices, such as (2, 16, 29), got {override!r}. Pass one."
            )
        taps = tuple(override)
    else:
        layers = target.num_layers
        taps = _named_taps(fields, layers) or (2, layers // 2, layers - 3)  # the default of EAGLE-3: low, middle, high
    fc = stored.get("fc.weight")
    found = problems.found["other"]
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] != len(taps) * reads:
        found.append(
            f"fc reads {fc.shape[1]} features, which is {fc.shape[1] / reads:g} taps of hidden size {reads}, not "
            f"{len(taps)} (taps {taps}); taps=... gives others"
        )
    count = fields.integer("num_aux_hidden_states", len(taps), null=True)
    if count != len(taps):
        found.append(f"num_aux_hidden_states is {count}, and there are {len(taps)} taps {taps}")
    outside = [tap for tap in taps if not 0 <= tap <= target.num_layers]
    if outside:
        found.append(
            f"taps {outside} do not exist, the target has hidden states 0 to {target.num_layers}; taps=... gives others"
        )
    # Clipped for the remaining checks: the caller raises what `problems` holds.
    return tuple(min(max(tap, 0), target.num_layers) for tap in taps)


def _check_eagle1(fields: Fields) -> None:
    """Checks that config.json has no option of EAGLE-3 alone.

    Raises:
      CheckpointError: it has one; the message names it.
    """
    remedy = "Remove it if the head was trained without it; else load another head."
    for key in SWITCHES:
        if fields.flag(key, null=True):
            fields.fail(key, "absent or false in an EAGLE-1/2 head, whose tensors the file holds", remedy)
    for part in (fields, fields.mapping("eagle_config")):
        for key in _TAP_IDS:
            if part.ids(key):
                part.fail(key, "absent in an EAGLE-1/2 head, which reads the last state alone", remedy)
    if fields.integer("num_aux_hidden_states", 1, null=True) > 1:
        fields.fail("num_aux_hidden_states", "absent in an EAGLE-1/2 head, which reads the last state alone", remedy)


def _ids_of(part: Fields) -> tuple[int, ...]:
    """Returns the ids of layers in a part of config.json, under either name; they must be equal."""
    one, other = (part.ids(key) for key in _TAP_IDS)
    if one and other and one != other:
        part.fail(_TAP_IDS[1], f"{list(one)}, as {_TAP_IDS[0]}", "Remove the wrong one.")
    return one or other


def _named_taps(fields: Fields, layers: int) -> tuple[int, ...]:
    """Returns the taps that config.json names, empty if it names none.

    Projects number layers in two ways. Inside `eagle_config` (SGLang, NVIDIA) an id is a layer whose OUTPUT is taken.
    At the top level (vLLM, speculators) it is the layer that the state ENTERS, as in `transformers`. Files of this
    library hold both. vLLM also takes the ids of `eagle_config` for entering: one below what those heads trained on.
    """
    outputs_of, entering = _ids_of(fields.mapping("eagle_config")), _ids_of(fields)
    shifted = tuple(layer + 1 for layer in outputs_of)
    if shifted and entering and shifted != entering:
        raise CheckpointError(
            f"{fields.where}: eagle_config and the other keys must name the same hidden states, got {shifted} and "
            f"{entering} (numbered as in transformers). Pass taps=... to choose."
        )
    named, last = shifted or entering, max(shifted + entering, default=0)
    if last == layers and not (shifted and entering):
        where = "eagle_config" if shifted else "config.json"
        raise CheckpointError(
            f"{fields.where}: aux hidden state layer ids must be of states that enter a layer, got the output of the "
            f"last layer ({layers - 1}) in {where}. Engines take it before the final norm, this library after it: pass "
            f"taps={named} if the head was trained on the normalised state."
        )
    return named
