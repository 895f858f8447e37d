"""Defines the heads of Medusa-1 (arXiv:2401.10774), Hydra and Hydra++ (arXiv:2402.05109).

Head i reads the final-normed state at position t and predicts token t + i + 2. A Hydra head also reads the embeddings
of tokens t + 1 to t + i + 1, drafted ones included. Hydra++ adds a decoder layer between the target and the heads.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import MedusaConfig
from eagle_jax.core import Params
from eagle_jax.models.decoder import DecoderLayer
from eagle_jax.models.layers import LayerOutput, Linear, Norm
from eagle_jax.models.rope import rope_angles


class ResidualBlock(nn.Module):
    """Returns `x + silu(linear(x))`; if `x` is wider than H, the residual is projected to H."""

    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "*b I"]) -> Float[Array, "*b H"]:
        kept = x if x.shape[-1] == self.width else Linear(self.width, True, name="res_connection")(x)
        return kept + nn.silu(Linear(self.width, True, name="linear")(x))


class MedusaHeads(nn.Module):
    """All heads of a target."""

    config: MedusaConfig

    def setup(self) -> None:
        config = self.config
        self.blocks = [
            [ResidualBlock(config.hidden_size, name=f"heads_{i}_blocks_{j}") for j in range(config.num_layers)]
            for i in range(config.num_heads)
        ]
        self.lm_heads = [
            Linear(config.vocab_size, config.kind == "hydra", dtype="float32", name=f"heads_{i}_lm_head")
            for i in range(config.num_heads)
        ]
        if config.prefix is not None:
            self.prefix_layer = DecoderLayer(config.prefix)
            self.prefix_norm = Norm(config.prefix.rms_norm_eps)

    def __call__(self, inputs: Float[Array, "*b I"], head: int) -> Float[Array, "*b V"]:
        """Returns the logits of one head, float32.

        Args:
          inputs: [..., H] states; for Hydra [..., (head + 2) * H], then the embeddings of the next head + 1 tokens.
        """
        for block in self.blocks[head]:
            inputs = block(inputs)
        return self.lm_heads[head](inputs)

    def prefix(
        self,
        states: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "*b T T"],
        cached: tuple[Array, Array, Array] | None = None,
    ) -> LayerOutput:
        """Runs the target's states through the decoder layer of Hydra++."""
        layer = self.config.prefix
        assert layer is not None, "only Hydra++ has a prefix layer"
        cos, sin = rope_angles(layer.rope, layer.head_dim, positions)
        mixed, keys, values = self.prefix_layer(states, cos, sin, mask, cached)
        return LayerOutput(self.prefix_norm(mixed), keys, values)

    def init_all(self, state: Float[Array, "B T H"]) -> None:
        """Runs every part once, to initialise all parameters."""
        if self.config.prefix is not None:
            self.prefix(state, jnp.zeros(state.shape[:2], jnp.int32), jnp.ones((state.shape[1],) * 2, bool))
        for head in range(self.config.num_heads):
            wide = state if self.config.kind == "medusa" else jnp.concatenate([state] * (head + 2), axis=-1)
            self(wide, head)


def init_medusa_params(config: MedusaConfig, key: Array) -> Params:
    """Draws float32 parameters `{"heads": ...}`. Medusa's blocks start as the identity (section 2.2)."""
    state = jnp.zeros((1, 1, config.hidden_size))
    heads = MedusaHeads(config).init(key, state, method="init_all")["params"]

    def zero_linear(path: tuple, leaf: Array) -> Array:
        return jnp.zeros_like(leaf) if path[-2].key == "linear" else leaf

    return {"heads": jax.tree_util.tree_map_with_path(zero_linear, heads)}
