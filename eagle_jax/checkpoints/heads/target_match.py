"""Compares a head's config.json with the target that the head is loaded for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagle_jax.checkpoints.files.errors import CheckpointError, notice
from eagle_jax.checkpoints.files.fields import LARGEST, Fields
from eagle_jax.checkpoints.files.tensors import TensorInfo
from eagle_jax.checkpoints.files.weights import TensorProblems
from eagle_jax.config import DecoderConfig


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Returns the hidden states that EAGLE-3 reads by default: low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)


def compare_sizes(
    kind: str, layer: DecoderConfig, reads: int, own_embedding: bool, target: DecoderConfig, problems: TensorProblems
) -> None:
    """Compares vocabulary and hidden size with those of the target."""
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


def check_window(fields: Fields, target: DecoderConfig) -> None:
    """Checks that no sliding window of the head hides tokens of the target's context.

    `use_sliding_window` decides, or else the kind of the first layer. Without either, a window causes a warning:
    engines differ in what they do with it.
    """
    window = fields.integer("sliding_window", LARGEST, null=True, least=0)
    kinds = fields.names("layer_types")[:1]
    if kinds and kinds[0] not in ("full_attention", "sliding_attention"):
        fields.fail("layer_types", "full_attention or sliding_attention", "Other kinds of layers are not supported.")
    if window >= target.max_position or (not fields.given("sliding_window") and "sliding_attention" not in kinds):
        return
    slides = fields.flag("use_sliding_window", "sliding_attention" in kinds, null=True)
    if slides and kinds != ("full_attention",):
        raise CheckpointError(
            f"{fields.where}: the head's sliding_window={window} is active below the target's context length "
            f"{target.max_position} and is not supported; load the target with max_position={window}"
        )
    if not (fields.given("use_sliding_window") or kinds):
        notice(
            f"{fields.where}: sliding_window={window} has no effect here: the head attends to all tokens, and drafts "
            "differ from those of an engine that applies it. Set use_sliding_window in config.json."
        )


def check_verifier(fields: Fields, target: DecoderConfig) -> None:
    """Warns if the head names a target of another family; names of directories are not compared.

    Warns:
      UserWarning: naming both.
    """
    verifier = fields.mapping("speculators_config").mapping("verifier")
    named = verifier.names("architectures")
    if named and target.architecture not in named:
        name = verifier.text("name_or_path", "", null=True)
        notice(
            f"{fields.where}: the head was trained for {', '.join(named)} {name}".rstrip()
            + f", and this target is a {target.architecture}: acceptance may be low"
        )
    kind = fields.text("target_model_type", "", null=True)
    if kind and kind not in target.architecture.lower():
        notice(f"{fields.where}: the head was trained for a target of type {kind}, and this is a {target.architecture}")


def tapped_states(
    fields: Fields,
    stored: Mapping[str, TensorInfo],
    target: DecoderConfig,
    reads: int,
    problems: TensorProblems,
    override: Sequence[int] | None,
) -> tuple[int, ...]:
    """Returns the tapped hidden states, in `transformers` numbering; their number must fit `fc`."""
    keys = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    # Two numberings are in use. Inside `eagle_config` (SGLang, NVIDIA) an id is a layer whose OUTPUT is taken; at the
    # top level (vLLM, speculators) it is the layer which the state ENTERS, as in `transformers`.
    parts = (fields.mapping("eagle_config"), fields)
    outputs_of, entering = (next((ids for key in keys if (ids := part.ids(key))), ()) for part in parts)
    named = [tuple(layer + 1 for layer in outputs_of)] if outputs_of else []
    named += [entering] if entering else []
    if override is not None:
        if not isinstance(override, Sequence) or not all(type(tap) is int for tap in override):
            raise CheckpointError(f"taps={override!r} must be a list of hidden-state indices, such as (2, 16, 29)")
        chosen = tuple(override)
    elif len(set(named)) > 1:
        raise CheckpointError(
            f"{fields.where}: its two lists of layer ids name different hidden states, {named[0]} and {named[1]} "
            f"(numbered as in transformers); pass taps=... to choose"
        )
    else:
        chosen = named[0] if named else default_taps(target.num_layers)
    _check_taps(fields, stored, target, reads, problems, chosen)
    # The report goes on with taps that exist; no head is returned.
    return tuple(min(max(tap, 0), target.num_layers) for tap in chosen)


def _check_taps(
    fields: Fields,
    stored: Mapping[str, TensorInfo],
    target: DecoderConfig,
    reads: int,
    problems: TensorProblems,
    chosen: tuple[int, ...],
) -> None:
    fc = stored.get("fc.weight")
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] != len(chosen) * reads:
        problems.found["other"].append(
            f"fc reads {fc.shape[1]} features, which is {fc.shape[1] / reads:g} taps of hidden size {reads}, not "
            f"{len(chosen)} (taps {chosen}): a head for another target, or pass taps=..."
        )
    count = fields.integer("num_aux_hidden_states", len(chosen), null=True)
    if count != len(chosen):
        problems.found["other"].append(f"num_aux_hidden_states is {count}, and there are {len(chosen)} taps {chosen}")
    outside = [tap for tap in chosen if not 0 <= tap <= target.num_layers]
    if outside:
        problems.found["other"].append(
            f"taps {outside} do not exist, the target has hidden states 0 to {target.num_layers}: "
            f"a head for another target, or pass taps=..."
        )
