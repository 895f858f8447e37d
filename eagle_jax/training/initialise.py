"""Fresh weights for training from scratch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.models.decoder import init_params
from eagle_jax.models.heads import init_head_params
from eagle_jax.types import Params


def fresh_target(config: DecoderConfig, key: Array) -> Params:
    """Kernels N(0, 1/fan_in), those that write to the residual stream smaller by sqrt(2 L) (GPT-2); lm_head small."""
    return _scaled(init_params(config, key), 2 * config.num_layers, skipped=("lm_head",))


def fresh_head(config: HeadConfig, key: Array, target: Params, d2t: Int[Array, " Vd"] | None) -> Params:
    """Parameters of a head before training (without `d2t`).

    The lm_head and norm of an EAGLE-3 head as wide as its target start as the target's own, cut to the draft
    vocabulary: the head begins with the right word frequencies, which a short training need not spend its steps on.
    """
    head = _scaled(init_head_params(config, key)["head"], 2, skipped=())
    if config.kind == "eagle3" and d2t is not None and config.layer.hidden_size == config.target_hidden_size:
        kept = d2t + jnp.arange(d2t.shape[0], dtype=d2t.dtype)
        lm_head = target["lm_head"]["kernel"] if "lm_head" in target else target["embed_tokens"]["embedding"].T
        head = {**head, "lm_head": {"kernel": lm_head[:, kept]}, "norm": {"scale": jnp.array(target["norm"]["scale"])}}
    return head


def _scaled(params: Params, residual_writes: int, skipped: tuple[str, ...]) -> Params:
    def rescale(path: tuple, leaf: Array) -> Array:
        names = [part.key for part in path]
        if names[-1] != "kernel" or names[0] in skipped:
            return leaf
        writes = residual_writes if names[-2] in ("o_proj", "down_proj") else 1
        return leaf / jnp.std(leaf) * (leaf.shape[0] * writes) ** -0.5

    return jax.tree_util.tree_map_with_path(rescale, params)
