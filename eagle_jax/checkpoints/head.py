"""Loads an EAGLE draft head: the official EAGLE-1/2 and EAGLE-3 directories, their variants, the speculators layout."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.errors import CheckpointError
from eagle_jax.checkpoints.hf_config import check_supported, layer_sizes
from eagle_jax.checkpoints.hub import checkpoint_directory
from eagle_jax.checkpoints.mapping import (
    HEAD,
    Place,
    Table,
    TensorProblems,
    check_dtype,
    expected_shapes,
    plan,
    read_planned,
)
from eagle_jax.checkpoints.tensors import TensorInfo, TensorReader, read_json
from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.models.heads import init_head_params
from eagle_jax.types import Params


def load_head_checkpoint(
    path_or_id: str | os.PathLike[str],
    target: DecoderConfig,
    dtype: str = "float32",
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    rope_theta: float | None = None,
    taps: Sequence[int] | None = None,
    place: Place | None = None,
) -> tuple[HeadConfig, Params]:
    """Configuration and parameters of a draft head for `target`.

    Args:
      path_or_id: a directory with config.json and weights, or a hub id.
      target: configuration of the target the head is to draft for.
      dtype: float32, bfloat16 or float16.
      revision, token, cache_dir: for a hub id, as in `huggingface_hub`.
      rope_theta: replaces the head's own; some published heads draft better at 10000 than at their config's value.
      taps: replaces the hidden states that the config names, in `transformers` numbering.
      place: `(path, host array) -> device array` for a sharded load.

    Returns:
      config, and `{"head": ..., "d2t": [Vd] int32}` (`d2t` for EAGLE-3 only: target id minus draft id).

    Raises:
      CheckpointError: naming the file and everything in it that does not fit, or does not fit this target.
    """
    check_dtype(dtype)
    directory = checkpoint_directory(path_or_id, revision=revision, token=token, cache_dir=cache_dir)
    values = _flat_config(read_json(directory / "config.json"), directory)
    with TensorReader(directory) as reader:
        stored = {canonical_name(name): info for name, info in reader.infos.items()}
        problems = TensorProblems()
        config = head_config(values, stored, target, directory, problems, taps=taps)
        if rope_theta is not None:
            rope = dataclasses.replace(config.layer.rope, theta=float(rope_theta))
            config = dataclasses.replace(config, layer=dataclasses.replace(config.layer, rope=rope))
        shapes = expected_shapes(functools.partial(init_head_params, config))
        expected = {path.removeprefix("head/"): shape for path, shape in shapes.items() if path != "d2t"}
        # Some published EAGLE-1/2 heads ship a copy of the target's lm_head, which is what they read anyway.
        ignored = HEAD.ignored + ((r"lm_head\.weight",) if config.kind == "eagle1" else ())
        prefix = "midlayer." if any("midlayer." in name for name in reader.infos) else "layers.0."
        chosen = plan(
            reader,
            Table(HEAD.rules, ignored),
            expected,
            problems,
            canonical=canonical_name,
            spelled=lambda name: name.replace("layers.0.", prefix),
            handled=("d2t", "t2d") if config.kind == "eagle3" else (),
        )
        d2t = _read_d2t(reader, config, problems) if config.kind == "eagle3" else None
        problems.raise_if_any(f"{directory}: not a usable {config.kind} head for this target:")
        params = {"head": read_planned(reader, chosen, dtype, place)}
        if d2t is not None:
            params["d2t"] = jnp.asarray(d2t) if place is None else place("d2t", d2t)
        return config, params


def canonical_name(name: str) -> str:
    """A head tensor's name without the prefixes in which projects differ."""
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The hidden states that EAGLE-3 reads where a config does not say: low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)


def _flat_config(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The config in official keys; the speculators layout nests the layer's."""
    algorithm = values.get("speculators_model_type")
    if algorithm is None:
        return values
    if algorithm != "eagle3":
        raise CheckpointError(
            f"{directory / 'config.json'}: speculators_model_type={algorithm!r} is not supported, only 'eagle3'"
        )
    layer = values.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise CheckpointError(f"{directory / 'config.json'}: no transformer_layer_config")
    rest = {key: value for key, value in values.items() if key != "transformer_layer_config"}
    return {"norm_before_residual": True, **layer, **rest}


def head_config(
    values: Mapping[str, Any],
    stored: Mapping[str, TensorInfo],
    target: DecoderConfig,
    directory: Path,
    problems: TensorProblems,
    *,
    taps: Sequence[int] | None = None,
) -> HeadConfig:
    """The head that a config.json describes; a mismatch with `target` goes to `problems`.

    A switch the config does not mention is decided by the stored tensors; one it does mention is taken at its word, so
    that a tensor that should be there and is not is reported as missing.

    Args:
      stored: canonical tensor name -> info.

    Raises:
      CheckpointError: a configuration that is not that of a head at all.
    """
    where = str(directory / "config.json")
    check_supported(values, where)
    kind = _kind(values, stored)

    def switch(key: str, *tensors: str) -> bool:
        if values.get(key) is not None:
            return bool(values[key])
        return any(name in stored for name in tensors)

    bias = switch("qkv_bias", "layers.0.self_attn.q_proj.bias") or bool(values.get("attention_bias", False))
    layer = layer_sizes(
        values,
        where,
        num_layers=1,
        qkv_bias=bias,
        out_bias="layers.0.self_attn.o_proj.bias" in stored,
        mlp_bias=switch("mlp_bias", "layers.0.mlp.gate_proj.bias"),
        qk_norm="layers.0.self_attn.q_norm.weight" in stored,
    )
    if layer.vocab_size != target.vocab_size:
        problems.found["other"].append(
            f"vocab_size {layer.vocab_size} in its config.json, the target has {target.vocab_size}: "
            f"a head for another target"
        )
    reads = int(values.get("target_hidden_size") or layer.hidden_size)
    if reads != target.hidden_size or (kind == "eagle1" and layer.hidden_size != target.hidden_size):
        problems.found["other"].append(
            f"hidden size {reads} in its config.json, the target has {target.hidden_size}: a head for another target"
        )
    own_embedding = "embed_tokens.weight" in stored
    if not own_embedding and layer.hidden_size != target.hidden_size and reads == target.hidden_size:
        problems.found["missing"].append("embed_tokens.weight (needed where hidden_size is not the target's)")
    common: dict[str, Any] = {"layer": layer, "target_hidden_size": reads, "own_embedding": own_embedding}
    if kind == "eagle1":
        if taps is not None and tuple(taps) != (target.num_layers,):
            raise CheckpointError(f"taps={tuple(taps)}: an EAGLE-1/2 head reads the final state ({target.num_layers},)")
        # The bias is there unless the config says "bias": false.
        return HeadConfig(
            kind="eagle1",
            draft_vocab_size=layer.vocab_size,
            taps=(target.num_layers,),
            fc_bias=bool(values.get("bias", True)),
            **common,
        )
    return HeadConfig(
        kind="eagle3",
        draft_vocab_size=int(values.get("draft_vocab_size") or layer.vocab_size),
        taps=_taps(values, stored, target, reads, where, problems, taps),
        fc_bias="fc.bias" in stored,
        fc_norm=switch("fc_norm", "fc_norm.0.weight"),
        norm_before_fc=switch("norm_before_fc", "input_norm.weight"),
        norm_output=bool(values.get("norm_output", False)),
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        **common,
    )


def _kind(values: Mapping[str, Any], stored: Mapping[str, TensorInfo]) -> Literal["eagle1", "eagle3"]:
    named = any("eagle3" in str(name).lower() for name in values.get("architectures") or ())
    says = named or values.get("speculators_model_type") == "eagle3" or values.get("draft_vocab_size") is not None
    return "eagle3" if says or "layers.0.hidden_norm.weight" in stored else "eagle1"


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
    outputs_of = nested.get("eagle_aux_hidden_state_layer_ids") or nested.get("aux_hidden_state_layer_ids")
    entering = values.get("eagle_aux_hidden_state_layer_ids") or values.get("aux_hidden_state_layer_ids")
    # Two numberings are in use. Inside `eagle_config` (NVIDIA, SGLang) an id is a layer whose OUTPUT is taken; at the
    # top level (vLLM, speculators) it is the layer which the state ENTERS, as in `transformers`.
    named = [tuple(int(i) + 1 for i in outputs_of)] if outputs_of else []
    named += [tuple(int(i) for i in entering)] if entering else []
    width = stored["fc.weight"].shape[-1] if "fc.weight" in stored else 3 * reads
    if override is not None:
        chosen = tuple(int(tap) for tap in override)
    elif len(set(named)) > 1:
        raise CheckpointError(
            f"{where}: its two lists of layer ids name different hidden states, {named[0]} and {named[1]} (numbered "
            f"as in transformers); pass taps=... to choose"
        )
    else:
        chosen = named[0] if named else default_taps(target.num_layers)
    if width != len(chosen) * reads:
        problems.found["other"].append(
            f"fc reads {width} features, which is {width / reads:g} taps of hidden size {reads}, not {len(chosen)} "
            f"(taps {chosen}): a head for another target, or pass taps=..."
        )
    outside = [tap for tap in chosen if not 0 <= tap <= target.num_layers]
    if outside:
        problems.found["other"].append(
            f"taps {outside} do not exist: the target has hidden states 0 to {target.num_layers}"
        )
    return chosen


def _read_d2t(reader: TensorReader, config: HeadConfig, problems: TensorProblems) -> np.ndarray | None:
    """Draft id -> target id minus draft id, [Vd] int32; checked against the target vocabulary and `t2d`."""
    names = {canonical_name(name): name for name in reader.infos}
    vocab, draft_vocab = config.layer.vocab_size, config.draft_vocab_size
    if "d2t" not in names:
        if draft_vocab == vocab:
            return np.zeros((draft_vocab,), np.int32)
        problems.found["missing"].append("d2t")
        return None
    for name, size in (("d2t", draft_vocab), ("t2d", vocab)):
        if name in names and reader.infos[names[name]].shape != (size,):
            shape = list(reader.infos[names[name]].shape)
            problems.found["misshaped"].append(f"{names[name]} is {shape}, expected {[size]}")
            return None
    difference = reader.read(names["d2t"]).astype(np.int64)
    ids = difference + np.arange(draft_vocab)
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != draft_vocab:
        problems.found["other"].append(f"{names['d2t']} does not map draft ids to distinct target ids below {vocab}")
        return None
    if "t2d" in names:
        kept = np.flatnonzero(reader.read(names["t2d"]))
        if not np.array_equal(kept, np.sort(ids)):
            problems.found["other"].append(f"{names['t2d']} marks other target ids than {names['d2t']} reaches")
            return None
    return difference.astype(np.int32)
