"""Drafts with a small language model of the target's tokenizer: standard speculative sampling.

(Leviathan, Kalman and Matias, arXiv:2211.17192; Chen et al., arXiv:2302.01318.) Its cache holds the text and the root:
its last state gives the children of the root. A cycle costs D passes of the small model: one in `update`, over the
confirmed tokens, and D - 1 in `draft`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eagle_jax.config import ConfigError, TreeConfig
from eagle_jax.core import Drafter, NewKV, Params, TargetFn, Verified, commit
from eagle_jax.drafters.tree_growth import DraftState, Expander, last_state, tree_drafter

SPARE = 32
"""Cache slots beyond the target's: this cache also holds the root, and `update` runs one token more."""


@functools.lru_cache(maxsize=64)
def small_model_drafter(fn: TargetFn, tree: TreeConfig, vocab: int, draft_vocab: int) -> Drafter:
    """Builds the drafter of a small model; equal arguments give the same object, so jit caches are shared.

    Args:
      fn: the small model; the engine's `params["drafter"]` are `{"model": its parameters}`.
      vocab: V, the target's. draft_vocab: of the small model; the ids that both have are the same tokens.

    Raises:
      ConfigError: a node has more children than the models have common tokens.
    """
    shared = min(vocab, draft_vocab)
    if tree.top_k > shared:
        raise ConfigError(f"TreeConfig.top_k must be at most {shared}, the common tokens, got {tree.top_k}. Lower it.")

    def known(tokens: Array) -> Array:
        return jnp.minimum(tokens, draft_vocab - 1)  # larger ids are vocabulary padding, which no text has

    def init(params: Params, batch: int, slots: int) -> DraftState:
        cache = fn.init_cache(batch, slots + SPARE)
        one = jnp.zeros((batch, 1), jnp.int32)
        shape = jax.eval_shape(lambda: fn.forward(params["drafter"]["model"], one, one, jnp.ones((1, 1), bool), cache))
        return DraftState(cache, jnp.zeros((batch, shape.hidden.shape[-1]), shape.hidden.dtype))

    def update(params: Params, state: DraftState, verified: Verified) -> DraftState:
        """Runs the model over the next tokens; at the beginning of a text, over its first token as well."""
        with jax.named_scope("drafter_update"):
            width = verified.tokens.shape[1]
            first = verified.start == 0
            tokens = known(jnp.concatenate([verified.tokens[:, :1], verified.next_tokens], axis=1))
            positions = verified.start[:, None] + jnp.arange(width + 1)[None]
            causal = jnp.tril(jnp.ones((width + 1, width + 1), bool))
            # Later, the first one is in the cache already: it is masked here and not written again.
            hidden_row = (jnp.arange(width + 1) > 0)[None] | first[:, None]
            mask = causal[None] & (hidden_row[:, None] | jnp.eye(width + 1, dtype=bool)[None])
            out = fn.forward(params["drafter"]["model"], tokens, positions, mask, state.cache)
            rows = jnp.minimum(jnp.arange(width + 1)[None] + jnp.where(first, 0, 1)[:, None], width)
            count = jnp.where(verified.count > 0, verified.count + first.astype(jnp.int32), 0)
            cache = commit(state.cache, out.new, count, rows, out.hidden, fn.windows)
            return DraftState(cache, last_state(state.hidden, out.hidden[:, 1:], verified.count))

    def expander(params: Params, state: DraftState, root: Array) -> Expander:
        def extend(
            tokens: Array, states: Array, level: Array | int, mask: Array, earlier: NewKV
        ) -> tuple[Array, NewKV]:
            positions = jnp.broadcast_to(state.cache.length[:, None] + level - 2, tokens.shape)
            out = fn.forward(params["drafter"]["model"], known(tokens), positions, mask, state.cache, (), earlier)
            return out.hidden, out.new

        return Expander(
            root=state.hidden,
            extend=extend,
            logits=lambda states, level: fn.logits(params["drafter"]["model"], states)[..., :shared],
            to_target=lambda ids: ids,
            vocab=vocab,
            cache=state.cache,
        )

    return tree_drafter(init, update, expander, tree, ahead=1, windows=fn.windows)  # the root is in the cache
