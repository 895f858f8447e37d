"""Accepts sampled drafts: rejection sampling down the tree, block and traversal verification.

A draft is a sample from the draft model's law q. A rule accepts it with a probability that depends on q and the
target's law p, so that the text has the target's law. Unlike with `deterministic`, the text of a key depends on the
drafter. Siblings must be drawn without replacement, in the order of their rows, from `tree.draft_log_probs` of their
parent. The shape of a tree must not depend on the drawn tokens.

Every rule is a `verify.VerifyFn`. At temperature 0 it is `deterministic`. At other temperatures it raises a ValueError
if the drafts were not sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from eagle_jax import core
from eagle_jax.core import Acceptance, DraftTree, Sampling, VerifyFn, ancestor_mask, deterministic, process_logits, walk
from eagle_jax.core.sampling import first_largest

Rows = Float[Array, "B N1 V"]
"""A law, or logits, after every row of the trees."""
Keys = Key[Array, " B"]


def _sampled_drafts(rule: Callable[..., Acceptance]) -> VerifyFn:
    """Wraps `(tree, laws of its drafts, logits, keys, sampling, depth) -> Acceptance` as a `VerifyFn`."""

    def verify(
        tree: DraftTree, logits: Rows, keys: Keys, index: Int[Array, " B"], sampling: Sampling, depth: int
    ) -> Acceptance:
        if sampling.greedy:
            return deterministic(tree, logits, keys, index, sampling, depth)
        if tree.draft_log_probs is None:
            raise ValueError(
                "draft_log_probs of the tree must be the law of sampled drafts, got None. Choose the rule by "
                "TreeConfig(verification=...), or take verify.deterministic."
            )
        own = jax.vmap(core.verify_key)(keys, index)
        return rule(tree, tree.draft_log_probs, logits, own, sampling, depth)

    verify.__doc__ = rule.__doc__
    return verify


@_sampled_drafts
def rejection(tree: DraftTree, laws: Rows, logits: Rows, keys: Keys, sampling: Sampling, depth: int) -> Acceptance:
    """Samples speculatively (arXiv:2211.17192, 2302.01318), on trees by recursive rejection (2401.15077).

    The children of a node are tried in the order of their draws: x is accepted with probability min(1, p(x) / q(x)).
    After a rejection p becomes norm(max(p - q, 0)), and q is renormalised without x. If no child is accepted, the next
    token is drawn from this last p.

    Raises:
      ValueError: the drafts were not sampled.
    """

    def row(tree: DraftTree, laws: Array, logits: Array, key: Key[Array, ""]) -> Acceptance:
        def choose(node: Array, step: Array) -> Array:
            """Returns the token of the first accepted child, or a draw from the last residual."""
            own = jax.random.fold_in(key, step)

            def attempt(trial: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
                untried, _, target, draft = trial
                child = jnp.argmax(untried).astype(jnp.int32)
                token = tree.tokens[child]
                accepted = core.uniform(jax.random.fold_in(own, child), jnp.int32(0)) * draft[token] < target[token]
                left = jnp.where(accepted, jax.nn.one_hot(token, target.size), _residual(target, draft))
                return untried.at[child].set(False), accepted, left, _without(draft, token)

            start = (tree.parents == node, jnp.bool_(False), _law(logits[node], sampling), jnp.exp(laws[node]))
            trial = jax.lax.while_loop(lambda trial: jnp.any(trial[0]) & ~trial[1], attempt, start)
            return _draw(trial[2], own)

        return walk(tree, choose, depth)

    return jax.vmap(row)(tree, laws, logits, keys)


@_sampled_drafts
def block(tree: DraftTree, laws: Rows, logits: Rows, keys: Keys, sampling: Sampling, depth: int) -> Acceptance:
    """Verifies a chain as one block (Sun et al., arXiv:2403.10444, algorithm 2).

    One decision for the whole chain accepts, on average, at least as many tokens as a decision per token.

    Raises:
      ValueError: the tree is not a chain, or its drafts were not sampled.
    """
    if tree.tokens.shape[1] != depth + 1:
        raise ValueError(f"tree must be a chain of {depth} nodes, got {tree.tokens.shape[1] - 1}. Take 'traversal'.")

    def row(tree: DraftTree, laws: Array, logits: Array, key: Key[Array, ""]) -> Acceptance:
        target = _law(logits, sampling)
        draft = jnp.exp(laws)  # [D+1, V] both; a leaf's draft is 0 everywhere
        drawn = tree.tokens[1:, None]
        ratios = jnp.take_along_axis(target[:-1], drawn, 1)[:, 0] / jnp.take_along_axis(draft[:-1], drawn, 1)[:, 0]

        def extend(reach: Array, ratio: Array) -> tuple[Array, Array]:
            reach = jnp.minimum(reach * ratio, 1.0)
            return reach, reach

        _, reach = jax.lax.scan(extend, jnp.float32(1), ratios)
        reach = jnp.concatenate([jnp.ones((1,)), reach])
        left = jnp.maximum(reach[:, None] * target - draft, 0.0)
        mass = jnp.sum(left, axis=-1)
        kept = core.uniform(jax.random.fold_in(key, depth), jnp.arange(depth + 1)) < mass / (mass + 1 - reach)
        steps = jnp.arange(depth + 1)
        count = jnp.max(jnp.where(kept | (steps == 0), steps, 0)).astype(jnp.int32)
        spare = jnp.where(mass[count] > 0, left[count], target[count])
        return Acceptance(jnp.minimum(steps, count).astype(jnp.int32), count, _draw(spare, key))

    return jax.vmap(row)(tree, laws, logits, keys)


@_sampled_drafts
def traversal(tree: DraftTree, laws: Rows, logits: Rows, keys: Keys, sampling: Sampling, depth: int) -> Acceptance:
    """Verifies a tree from the leaves upwards: traversal verification (Weng et al., arXiv:2505.12398).

    The first path to a leaf is accepted whole with the probability that block verification gives it. After a rejection
    the leaf is removed, its parent's p and q become residuals, and the next path is tried. On a chain this is block
    verification.

    Raises:
      ValueError: the drafts were not sampled.
    """
    size = tree.tokens.shape[1]

    def visit(tree: DraftTree, key: Key[Array, ""], carry: Any) -> Any:
        """Moves to the first remaining child of a node, or accepts or rejects a node without children."""
        node, done, left, reach, target, draft = carry
        children = (tree.parents == node) & left
        child, parent = jnp.argmax(children).astype(jnp.int32), jnp.maximum(tree.parents[node], 0)
        inner = jnp.any(children)
        token = tree.tokens[child]
        below = jnp.minimum(reach[node] * target[node, token] / draft[node, token], 1.0)
        accepted = core.uniform(jax.random.fold_in(key, node), jnp.int32(0)) < reach[node]
        # The root's reach is 1: the root is accepted when no other node is.
        ended = done | (~inner & (accepted | (node == 0)))
        rejected = ~inner & ~ended
        spare = jnp.maximum(reach[parent] * target[parent] - draft[parent], 0.0)
        mass = jnp.sum(spare)
        rest = jnp.where(parent == 0, 1.0, mass / jnp.maximum(mass + 1 - reach[parent], _LEAST))
        reach = jnp.where(rejected & (jnp.arange(size) == parent), rest, reach)
        reach = jnp.where(inner & ~done & (jnp.arange(size) == child), below, reach)
        # Computed for one row, so that the compiler writes a row and not both whole arrays.
        after = jnp.where(rejected & (mass > 0), spare / jnp.maximum(mass, _LEAST), target[parent])
        drafts = jnp.where(rejected, _without(draft[parent], tree.tokens[node]), draft[parent])
        left = left & ~(rejected & (jnp.arange(size) == node))
        node = jnp.where(ended, node, jnp.where(inner, child, parent))
        return node, ended, left, reach, target.at[parent].set(after), draft.at[parent].set(drafts)

    batch = tree.tokens.shape[0]
    carry = (
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch,), bool),
        tree.valid,
        jnp.ones((batch, size), jnp.float32),
        _law(logits, sampling),
        jnp.exp(laws),
    )
    carry = jax.lax.while_loop(
        lambda carry: ~jnp.all(carry[1]), lambda carry: jax.vmap(visit)(tree, keys, carry), carry
    )
    last, spare = carry[0][:, None], jnp.take_along_axis(carry[4], carry[0][:, None, None], axis=1)[:, 0]
    on_path = jnp.take_along_axis(ancestor_mask(tree.parents, depth), last[:, :, None], axis=1)[:, 0]
    # Parents precede children: the rows of the path in ascending order, then the last one again and again.
    path = jnp.sort(jnp.where(on_path, jnp.arange(size), last), axis=1)[:, : depth + 1]
    token = jax.vmap(lambda law, key: _draw(law, jax.random.fold_in(key, size)))(spare, keys)
    return Acceptance(path.astype(jnp.int32), jnp.sum(on_path, axis=1, dtype=jnp.int32) - 1, token)


RULES: dict[str, VerifyFn | None] = {
    "deterministic": None,
    "rejection": rejection,
    "block": block,
    "traversal": traversal,
}
"""Acceptance rules by their names in `TreeConfig.verification`; None is `verify.deterministic`."""

_LEAST = 1e-30


def _law(logits: Float[Array, "*b V"], sampling: Sampling) -> Float[Array, "*b V"]:
    return jnp.exp(process_logits(logits, sampling))


def _residual(target: Float[Array, " V"], draft: Float[Array, " V"]) -> Float[Array, " V"]:
    """Returns norm(max(p - q, 0)), or p if the residual is zero (p equals q up to rounding)."""
    left = jnp.maximum(target - draft, 0.0)
    mass = jnp.sum(left)
    return jnp.where(mass > 0, left / jnp.maximum(mass, _LEAST), target)


def _without(draft: Float[Array, " V"], token: Int[Array, ""]) -> Float[Array, " V"]:
    """Returns q without a token, renormalised; zeros if no other token is left."""
    rest = draft.at[token].set(0.0)
    return rest / jnp.maximum(jnp.sum(rest), _LEAST)


def _draw(law: Float[Array, " V"], key: Key[Array, ""]) -> Int[Array, ""]:
    return first_largest(jnp.log(law) + core.gumbel(key, jnp.arange(law.size)))
