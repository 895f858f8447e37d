"""Runs a draft head on its own outputs over whole texts, as drafting does.

The scheme covers training-time test of EAGLE-3 (arXiv:2503.01840, section 3.2), aligned steps of HASS
(arXiv:2408.15766, section 3.2; here a row is named by its last true feature) and, with one step, EAGLE-1
(arXiv:2401.15077, section 4.2). Row p, step k:

    input    embedding of token p+1+k, with the target's features at p (k = 0) or the head's state of step k-1 at p
    sees     keys of step 0 at rows <= p of the same document, keys of steps 1..k at row p; RoPE position + k;
             the last ones of these in a head with a window
    output   a state for token p+1+k, which predicts token p+2+k

Attention has a hand-written gradient. It computes the scores again from the log of the softmax's divisor
(FlashAttention, arXiv:2205.14135), so nothing of size [A, T, S] is kept. It computes them transposed: the gradients of
keys and values are then plain matrix products. XLA for CPU would write a transpose element by element, which is slower.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import HeadConfig
from eagle_jax.core.types import Params
from eagle_jax.models import EagleHead, LayerOutput, by_query_blocks, split_embeddings, within_window
from eagle_jax.packed import PackedTokens
from eagle_jax.training.losses import ahead

Own = tuple[Array, ...]
"""Keys or values [B, G, T, hd] of steps 1..k; a row sees only its own."""
WIDE = jnp.float32
Bias = tuple[Array, Array]
"""Summands of scores, 0 where a row sees a key, else `UNSEEN`: [B, T, S], and transposed for the gradient."""
UNSEEN = -1e30

# Every `optimization_barrier` below has one reason: XLA fuses a rotation, a transpose or a weight into each of its
# uses, and computes it again there, once per number of a product. Behind a barrier it is computed once. XLA for CPU
# keeps barriers only with `eagle_jax.training.compiler_options`.


def causal_mask(segments: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Returns the mask by which a token sees itself and earlier tokens of its document."""
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    return same & jnp.tril(jnp.ones((length, length), bool))[None]


def _mixer(bias: Bias, earlier: list[tuple[Array, Array]], window: int) -> Callable[..., Array]:
    """Returns a function with the signature of `attend`; `earlier` holds keys and values of steps 0..k-1.

    A row sees the keys of step 0 causally, and its own k keys of later steps; in a window, the last ones of these.
    """

    def mix(query: Array, keys: Array, values: Array, mask: Array, *cache: None) -> Array:
        first, *own = *earlier, (keys, values)
        own = own[-window:]  # all, for 0
        heads, groups = query.shape[2], keys.shape[1]

        def block(rows: tuple[Array, ...]) -> Array:
            query, seen, transposed, *own = rows
            batch, length, _, head_dim = query.shape
            grouped = query.reshape(batch, length, groups, heads // groups, head_dim).transpose(0, 2, 3, 1, 4)
            mixed = _attend(grouped, *first, (seen, transposed), tuple(own[::2]), tuple(own[1::2]))
            return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * head_dim)

        flat = [part for pair in own for part in pair]
        return by_query_blocks(block, (query, *bias, *flat), (1, 1, 2, *[2] * len(flat)))

    return mix


def unroll(
    config: HeadConfig,
    head: Params,
    features: Float[Array, "B T F"],
    embeds: Float[Array, "B T E"],
    texts: PackedTokens,
    steps: int,
    *,
    detach: bool = False,
    remat: bool = False,
) -> list[Float[Array, "B T H"]]:
    """Returns the head's states of every step; `detach` and `remat` are those of `Objective`."""
    module = EagleHead(config)
    mask, window = causal_mask(texts.segments), max(config.layer.windows, default=0)

    def bias_of(mask: Array) -> Bias:
        summands = jnp.where(mask, 0.0, UNSEEN)
        return jax.lax.optimization_barrier((summands, summands.transpose(0, 2, 1)))

    if window:  # the k keys of later steps come after those of step 0
        biases = [bias_of(within_window(mask, max(window - k, 0))) for k in range(steps)]
    else:
        biases = [bias_of(mask)] * steps

    def fuse(head: Params, features: Array) -> Array:
        return module.apply({"params": head}, features, method="fuse")

    # An EAGLE-3 head reads the same embeddings in every step, shifted by one row.
    shares, layer = split_embeddings(config, head, embeds) if config.kind == "eagle3" else (None, head)

    def step(layer: Params, states: Array, positions: Array, kept: list[tuple[Array, Array]]) -> LayerOutput:
        by = 1 + len(kept)
        shifted = None if shares else ahead(embeds, by)
        added = {name: ahead(share, by) for name, share in shares.items()} if shares else None
        mixer = _mixer(biases[len(kept)], kept, window)
        return module.apply({"params": layer}, shifted, states, positions, mask, mixer=mixer, added=added)

    if remat:
        fuse, step = jax.checkpoint(fuse), jax.checkpoint(step)
    states = fuse(head, features)
    found: list[Array] = []
    kept: list[tuple[Array, Array]] = []
    for k in range(steps):
        out = step(layer, states, texts.positions + k, kept)
        found.append(out.states)
        # Keys are not detached: their gradient reaches the weights.
        states = jax.lax.stop_gradient(out.states) if detach else out.states
        kept.append((out.keys, out.values))
    return found


@jax.custom_vjp
def _attend(query: Array, keys: Array, values: Array, bias: Bias, own_keys: Own, own_values: Own) -> Array:
    """Attends from queries [B, G, R, T, hd] to keys [B, G, S, hd], and from each row to its own keys.

    The result has the shape of the queries. The own keys are n dot products per row, without a [T, n T] score matrix.
    Scores and softmax are float32.
    """
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
