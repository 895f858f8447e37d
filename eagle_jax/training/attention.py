"""Computes attention of the unrolled steps, with a hand-written gradient.

The gradient computes the scores again from the log of the softmax's divisor (FlashAttention, arXiv:2205.14135), so
nothing of size [A, T, S] is kept. It computes them transposed: the gradients of keys and values are then plain matrix
products. Otherwise XLA for CPU writes the transpose element by element, which is slower than the products.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Own = tuple[Array, ...]
"""Keys or values [B, G, T, hd] of steps 1..k; a row sees only its own."""

WIDE = jnp.float32

# Every `optimization_barrier` below has one reason: XLA fuses a rotation, a transpose or a weight into each of its
# uses, and computes it again there, once per number of a product. Behind a barrier it is computed once. XLA for CPU
# keeps barriers only with `eagle_jax.training.host.compiler_options`.

Bias = tuple[Array, Array]
"""Summands of scores, 0 where a row sees a key, else `UNSEEN`: [B, T, S], and transposed for the gradient."""
UNSEEN = -1e30


def bias_of(mask: Bool[Array, "B T T"]) -> Bias:
    """Returns the bias of a mask; computed once for all steps."""
    bias = jnp.where(mask, 0.0, UNSEEN)
    return jax.lax.optimization_barrier((bias, bias.transpose(0, 2, 1)))


def diagonal_attend(
    query: Float[Array, "B T A hd"],
    keys: Float[Array, "B G S hd"],
    values: Float[Array, "B G S hd"],
    bias: Bias,
    own_keys: Sequence[Float[Array, "B G T hd"]] = (),
    own_values: Sequence[Float[Array, "B G T hd"]] = (),
) -> Float[Array, "B T A*hd"]:
    """Attends from each row to the keys of step 0, causally, and to its own n keys of later steps.

    The own keys are n dot products per row, without a [T, n T] score matrix. Scores and softmax are float32.
    """
    batch, length, heads, head_dim = query.shape
    groups = keys.shape[1]
    grouped = query.reshape(batch, length, groups, heads // groups, head_dim).transpose(0, 2, 3, 1, 4)
    mixed = _attend(grouped, keys, values, bias, tuple(own_keys), tuple(own_values))
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * head_dim)


@jax.custom_vjp
def _attend(query: Array, keys: Array, values: Array, bias: Bias, own_keys: Own, own_values: Own) -> Array:
    """Computes `diagonal_attend` for queries [B, G, R, T, hd]; the result has their shape."""
    return _forward(query, keys, values, bias, own_keys, own_values)[0]


def _forward(
    query: Array, keys: Array, values: Array, bias: Bias, own_keys: Own, own_values: Own
) -> tuple[Array, tuple]:
    batch, groups, repeats, length, head_dim = query.shape
    scale = head_dim**-0.5
    given = (query, keys, values, own_keys, own_values)
    query, keys, values, own_keys, own_values = jax.lax.optimization_barrier(given)
    rows = query.reshape(batch, groups, repeats * length, head_dim)
    scores = jnp.einsum("bgmd,bgsd->bgms", rows, keys, preferred_element_type=WIDE) * scale
    scores = scores.reshape(batch, groups, repeats, length, -1) + bias[0][:, None, None]
    own = [_dots(query, key) * scale for key in own_keys]
    top = jnp.max(scores, axis=-1)
    for score in own:
        top = jnp.maximum(top, score)
    weights, own = jnp.exp(scores - top[..., None]), [jnp.exp(score - top) for score in own]
    total = sum(own, jnp.sum(weights, axis=-1))
    weights = weights.reshape(batch, groups, repeats * length, -1).astype(values.dtype)
    mixed = jnp.einsum("bgms,bgsd->bgmd", weights, values, preferred_element_type=WIDE).reshape(query.shape)
    for weight, value in zip(own, own_values, strict=True):
        mixed += weight[..., None] * value[:, :, None].astype(WIDE)
    mixed = (mixed / total[..., None]).astype(query.dtype)
    return mixed, (query, keys, values, bias, own_keys, own_values, mixed, top + jnp.log(total))


def _dots(query: Array, key: Array) -> Array:
    """Multiplies every query with the key of its own row: [B, G, R, T]."""
    return jnp.sum(query.astype(WIDE) * key[:, :, None].astype(WIDE), axis=-1)


def _over_repeats(x: Array) -> Array:
    """Sums over R, written out: XLA for CPU is slow at a sum along a short inner axis."""
    return sum((x[:, :, r] for r in range(1, x.shape[2])), x[:, :, 0])


def _backward(saved: tuple, grad: Array) -> tuple:
    query, keys, values, bias, own_keys, own_values, mixed, divisor = saved
    batch, groups, repeats, length, head_dim = query.shape
    scale = head_dim**-0.5
    rows = lambda x: x.reshape(batch, groups, repeats * length, *x.shape[4:])  # noqa: E731
    grad = jax.lax.optimization_barrier(grad)
    wide = grad.astype(WIDE)
    along = jnp.sum(wide * mixed.astype(WIDE), axis=-1)

    scores = jnp.einsum("bgsd,bgmd->bgsm", keys, rows(query), preferred_element_type=WIDE) * scale
    scores = scores.reshape(batch, groups, -1, repeats, length) + bias[1][:, None, :, None]
    weights = jnp.exp(scores - divisor[:, :, None])
    to_weights = jnp.einsum("bgsd,bgmd->bgsm", values, rows(grad), preferred_element_type=WIDE)
    to_scores = weights * (to_weights.reshape(scores.shape) - along[:, :, None]) * scale
    flat = lambda x: x.reshape(batch, groups, -1, repeats * length).astype(query.dtype)  # noqa: E731
    weights, to_scores = jax.lax.optimization_barrier((flat(weights), flat(to_scores)))
    to_values = jnp.einsum("bgsm,bgmd->bgsd", weights, rows(grad), preferred_element_type=WIDE)
    to_keys = jnp.einsum("bgsm,bgmd->bgsd", to_scores, rows(query), preferred_element_type=WIDE)
    transposed = jax.lax.optimization_barrier(keys.transpose(0, 1, 3, 2))
    to_query = jnp.einsum("bgds,bgsm->bgdm", transposed, to_scores, preferred_element_type=WIDE)
    to_query = to_query.reshape(batch, groups, head_dim, repeats, length).transpose(0, 1, 3, 4, 2)
    to_query = jax.lax.optimization_barrier(to_query)

    to_own_keys, to_own_values = [], []
    for key, value in zip(own_keys, own_values, strict=True):
        weight = jnp.exp(_dots(query, key) * scale - divisor)
        weight, to_score = jax.lax.optimization_barrier((weight, weight * (_dots(wide, value) - along) * scale))
        to_score = to_score[..., None]
        to_query += to_score * key[:, :, None].astype(WIDE)
        to_own_keys.append(_over_repeats(to_score * query.astype(WIDE)).astype(key.dtype))
        to_own_values.append(_over_repeats(weight[..., None] * wide).astype(value.dtype))
    to_keys, to_values = to_keys.astype(keys.dtype), to_values.astype(values.dtype)
    found = (to_query.astype(query.dtype), to_keys, to_values, tuple(to_own_keys), tuple(to_own_values))
    found = jax.lax.optimization_barrier(found)
    return *found[:3], None, *found[3:]


_attend.defvjp(_forward, _backward)
