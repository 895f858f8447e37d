"""The heads of Medusa-1 (arXiv:2401.10774), Hydra and Hydra++ (arXiv:2402.05109).

Head i guesses the token i + 2 places after the position whose final-normed state it reads. A Medusa head reads that
state alone; a Hydra head also the embeddings of the i + 1 tokens that come before its own, so that it knows what was
drafted. Hydra++ reads the state through one decoder layer more, which has seen the text.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import MedusaConfig
from eagle_jax.core.types import Params
from eagle_jax.models.decoder import DecoderLayer
from eagle_jax.models.layers import Linear, RMSNorm
from eagle_jax.models.rope import rope_angles


class PrefixOutput(NamedTuple):
    """One pass of Hydra++'s decoder layer.

    Attributes:
      states: [B, T, H]. keys, values: [B, G, T, head_dim] of the T tokens, not committed.
    """

    states: Float[Array, "B T H"]
    keys: Float[Array, "B G T hd"]
    values: Float[Array, "B G T hd"]


class ResidualBlock(nn.Module):
    """`x + silu(linear(x))`; where the input is wider than H, its residual goes through a projection, too."""

    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "*b I"]) -> Float[Array, "*b H"]:
        kept = x if x.shape[-1] == self.width else Linear(self.width, True, name="res_connection")(x)
        return kept + nn.silu(Linear(self.width, True, name="linear")(x))


class MedusaHeads(nn.Module):
    """All heads of a model."""

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
            self.prefix_norm = RMSNorm(config.prefix.rms_norm_eps)

    def __call__(self, inputs: Float[Array, "*b I"], head: int) -> Float[Array, "*b V"]:
        """Logits of one head, float32.

        Args:
          inputs: [..., H], a state; of Hydra [..., (head + 2) * H], the state and the embeddings of the tokens before.
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
    ) -> PrefixOutput:
        """Hydra++: the target's states through a decoder layer over the text."""
        layer = self.config.prefix
        assert layer is not None, "only Hydra++ has one"
        cos, sin = rope_angles(layer.rope, layer.head_dim, positions)
        mixed, keys, values = self.prefix_layer(states, cos, sin, mask, cached)
        return PrefixOutput(self.prefix_norm(mixed), keys, values)

    def everything(self, state: Float[Array, "B T H"]) -> None:
        """Touches every parameter, for initialisation."""
        if self.config.prefix is not None:
            self.prefix(state, jnp.zeros(state.shape[:2], jnp.int32), jnp.ones((state.shape[1],) * 2, bool))
        for head in range(self.config.num_heads):
            wide = state if self.config.kind == "medusa" else jnp.concatenate([state] * (head + 2), axis=-1)
            self(wide, head)


def init_medusa_params(config: MedusaConfig, key: Array) -> Params:
    """Fresh float32 parameters `{"heads": ...}`; every block of Medusa begins as the identity (section 2.2)."""
    state = jnp.zeros((1, 1, config.hidden_size))
    heads = MedusaHeads(config).init(key, state, method="everything")["params"]

    def begin(path: tuple, leaf: Array) -> Array:
        return jnp.zeros_like(leaf) if path[-2].key == "linear" else leaf

    return {"heads": jax.tree_util.tree_map_with_path(begin, heads)}
