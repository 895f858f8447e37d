"""Draws or copies initial weights for training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle_jax.config import DecoderConfig, HeadConfig, MedusaConfig
from eagle_jax.core.types import Params
from eagle_jax.models import init_head_params, init_medusa_params, init_params
from eagle_jax.models.projections import split_projections
from eagle_jax.models.quantised import dequantise, dequantise_params


def fresh_target(config: DecoderConfig, key: Array) -> Params:
    """Draws a target: weights N(0, 1/fan_in), over sqrt(2 L) if they write to the residual stream (GPT-2)."""
    return _scaled(init_params(config, key), 2 * config.num_layers, skipped=("lm_head",))


def fresh_head(
    config: HeadConfig,
    key: Array,
    target: Params,
    d2t: Int[Array, " Vd"] | None,
    feature_scale: Float[Array, " F"] | None = None,
    copied_layer: int | None = None,
) -> Params:
    """Draws an EAGLE head (without `d2t`).

    An EAGLE-3 head as wide as its target starts with the target's norm, and with its lm_head cut to the draft
    vocabulary: a short training need not learn word frequencies.

    Args:
      feature_scale: by which training divides the features, as `Frozen.feature_scale`.
      copied_layer: layer of the target to copy, by `copy_layer`; None draws all.
    """
    head = _scaled(init_head_params(config, key)["head"], 2, skipped=())
    if config.kind == "eagle3" and d2t is not None and config.layer.hidden_size == config.target_hidden_size:
        kept = d2t + jnp.arange(d2t.shape[0], dtype=d2t.dtype)
        norm = {"scale": jnp.array(target["norm"]["scale"])}
        head = {**head, "lm_head": {"weight": lm_head_of(target)[kept]}, "norm": norm}
    if copied_layer is None:
        return head
    return copy_layer(head, split_projections(target[f"layers_{copied_layer}"], config.layer), feature_scale)


def copy_layer(head: Params, layer: Params, feature_scale: Float[Array, " F"] | None = None) -> Params:
    """Starts an EAGLE-3 head with a layer of its target, applied to the highest tap.

    Attention reads the state with the layer's weights, and the embedding with the drawn weights times 0.5. `fc` is 0.5
    times its drawn weights plus the identity on the highest tap.

    Args:
      head: a drawn head with the sizes of the target.
      layer: parameters of a "llama" layer with separate projections, which may be quantised.
    """
    layer = dequantise_params(layer)
    fc = 0.5 * head["fc"]["weight"]
    width = len(fc)
    scale = jnp.ones((width,)) if feature_scale is None else feature_scale[-width:]
    attention = dict(layer["self_attn"])
    for name in ("q_proj", "k_proj", "v_proj"):
        drawn, weight = head["self_attn"][name]["weight"][:, :-width], attention[name]["weight"]
        attention[name] = {**attention[name], "weight": jnp.concatenate([0.5 * drawn, weight], axis=1)}
    return {
        **head,
        "fc": {**head["fc"], "weight": fc.at[:, -width:].add(jnp.diag(scale))},
        "hidden_norm": layer["input_layernorm"],
        "post_attention_layernorm": layer["post_attention_layernorm"],
        "self_attn": attention,
        "mlp": layer["mlp"],
    }


def fresh_medusa(config: MedusaConfig, key: Array, target: Params) -> Params:
    """Draws heads of Medusa or Hydra, with the target's lm_head.

    Medusa's blocks start as the identity, so every head starts with the target's prediction (section 2.2.1). Hydra's
    first block and the layer of Hydra++ start random, as their authors' do.
    """
    heads = init_medusa_params(config, key)["heads"]
    lm_head = lm_head_of(target)
    found = {name: {**leaf, "weight": lm_head} if name.endswith("lm_head") else leaf for name, leaf in heads.items()}
    if config.prefix is not None:
        found["prefix_layer"] = _scaled(found["prefix_layer"], 2, skipped=())
        found["prefix_norm"] = {"scale": jnp.array(target["norm"]["scale"])}
    return found


def fresh_draft_model(config: DecoderConfig, key: Array, target: Params, layers: tuple[int, ...]) -> Params:
    """Draws a small model for distillation.

    Args:
      layers: layers of the target to copy, in this order, with its embedding and lm_head (arXiv:1910.01108, section 3).
        The model then has the target's width. Empty: everything is drawn.
    """
    if not layers:
        return fresh_target(config, key)
    ends = {name: leaf for name, leaf in target.items() if not name.startswith("layers_")}
    chosen = {f"layers_{place}": target[f"layers_{layer}"] for place, layer in enumerate(layers)}
    return dequantise_params(ends | split_projections(chosen, config))


def lm_head_of(target: Params) -> Float[Array, "V H"]:
    """Returns the target's lm_head, or its embedding; dequantised."""
    return dequantise(target["lm_head"]["weight"] if "lm_head" in target else target["embed_tokens"]["embedding"])


def _scaled(params: Params, residual_writes: int, skipped: tuple[str, ...]) -> Params:
    def rescale(path: tuple, leaf: Array) -> Array:
        names = [part.key for part in path]
        if names[-1] != "weight" or names[0] in skipped:
            return leaf
        writes = residual_writes if names[-2] in ("o_proj", "down_proj") else 1
        return leaf / jnp.std(leaf) * (leaf.shape[1] * writes) ** -0.5

    return jax.tree_util.tree_map_with_path(rescale, params)
