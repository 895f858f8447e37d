"""Computes rotary position embeddings and their long-context scalings, in float32."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eagle_jax.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns frequencies in radians per token, one per rotated pair, with scaling equal at all positions."""
    head_dim = config.rotated(head_dim)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (1.0 / np.float32(config.theta) ** exponents).astype(np.float32)
    if config.kind in ("default", "dynamic"):
        return plain
    if config.kind == "linear":
        return plain / np.float32(config.factor)
    if config.kind == "llama3":
        return _llama3(plain, config)
    if config.kind == "longrope":
        return plain / np.asarray(config.long_factor if config.is_long else config.short_factor, np.float32)
    return _yarn(plain, config, head_dim)


def _llama3(plain: np.ndarray, config: RopeConfig) -> np.ndarray:
    # Frequencies of long wavelengths are divided by `factor`, of short ones kept, between them interpolated.
    turns = config.original_max_position * plain / (2 * math.pi)
    smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1 - smooth) * plain / config.factor + smooth * plain).astype(np.float32)


def _yarn(plain: np.ndarray, config: RopeConfig, head_dim: int) -> np.ndarray:
    def dimension_of(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)
    return (plain / config.factor * (1 - keep) + plain * keep).astype(np.float32)


def attention_factor(config: RopeConfig) -> float:
    """Returns the factor of cos and sin; 1 except for yarn (arXiv:2309.00071, section 3.4) and longrope."""
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "longrope":
        return math.sqrt(1 + math.log(max(config.factor, 1.0)) / math.log(config.original_max_position))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


def rope_angles(
    config: RopeConfig, head_dim: int, positions: Int[Array, "*b"]
) -> tuple[Float[Array, "*b 2 hd2"], Float[Array, "*b 2 hd2"]]:
    """Returns cosine and signed sine of every position for `rotate`, float32 [..., 2, pairs].

    `pairs` is half of the rotated dimensions, head_dim / 2 without `partial`.

    "dynamic" scaling uses at position p the base of a context of p + 1 tokens, as token-by-token decoding does. The
    angle depends on the position only: a tree pass and a single-token pass rotate a token alike.
    """
    if config.kind == "none":
        still = jnp.zeros((*positions.shape, 2, head_dim // 2), jnp.float32)
        return still + 1.0, still
    at = positions[..., None].astype(jnp.float32)
    frequencies = inverse_frequencies(config, head_dim)
    lead = (1,) * positions.ndim + frequencies.shape
    if config.kind == "dynamic":
        head_dim = config.rotated(head_dim)
        context = jnp.maximum(at + 1, config.original_max_position)
        growth = config.factor * context / config.original_max_position - (config.factor - 1)
        exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
        base = config.theta * growth ** (head_dim / (head_dim - 2))
        angles = at / base ** exponents.reshape(lead)
    else:
        angles = at * jnp.asarray(frequencies).reshape(lead)
    scale = attention_factor(config)
    cos, sin = jnp.cos(angles) * scale, jnp.sin(angles) * scale
    # Both halves are stored, so that XLA for CPU does not repeat the cosines in every layer.
    return jnp.stack([cos, cos], axis=-2), jnp.stack([-sin, sin], axis=-2)


def rotate(
    x: Float[Array, "B T A hd"], cos: Float[Array, "B T 2 hd2"], sin: Float[Array, "B T 2 hd2"]
) -> Float[Array, "B T A hd"]:
    """Rotates dimension i against i + pairs, the pairing of the Hugging Face checkpoints.

    Dimensions beyond 2 * pairs stay as they are.
    """
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :rotated], cos, sin), x[..., rotated:]], axis=-1)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    # A reversal of the halves, not a concatenation: the rotation stays one elementwise loop.
    return (halves * cos[:, :, None] + halves[..., ::-1, :] * sin[:, :, None]).reshape(x.shape).astype(x.dtype)
