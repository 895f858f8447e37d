"""Chooses how many drafted nodes are verified, and when plain steps pay better; the text does not depend on it.

From the scores of the nodes follows how many tokens a tree of the best n would yield, and from a measured or modelled
cost what they would cost: the best ratio is chosen, for the whole batch. Scores are not acceptance probabilities: at
temperature 0 most heads are far too unsure of the likeliest token. One factor, learned from the verified nodes,
multiplies the odds of every token of a path (logistic regression with a fixed slope). If no size is worth its cost,
that with the least loss is taken. If it verifies nothing and earlier cycles did not pay either, plain steps follow.

A balance counts the tokens that cycles gain, less what they cost in plain steps, with a margin, since costs vary. If it
falls too low, a burst of plain steps follows, and four times as many after each consecutive failure; each plain step
repays 2% of a step. Before that, half of what earlier drafts have saved may be lost. A batch ends with its slowest row.
Rows therefore count by the tokens left to them, and the expected lag of the slowest row is subtracted: rows drift apart
like random walks. In lanes that refill themselves all rows count alike. The drafter reads the tokens of a burst at its
end, all at once, and only if drafts go on before the texts end, so a plain step costs as much as without a drafter.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from eagle_jax.core.costs import Payoff, Prices
from eagle_jax.core.sampling import largest
from eagle_jax.core.tree import ancestor_mask, node_depths
from eagle_jax.core.types import (
    Drafter,
    DraftTree,
    Engine,
    GenerateState,
    Params,
    RowRandomness,
    Sampling,
    StepInfo,
    Verified,
    empty_tree,
)

BURST = 32
"""Plain steps that the drafter reads at once, and that follow a first failure at least."""
SLACK = 2.5
"""Plain steps that cycles may cost beyond their yield before plain steps follow, and most that the balance keeps."""
LOSS = 0.02
"""Share of plain decoding's steps that drafts which do not pay may cost."""
DOUBTFUL, PROMISING = 0.95, 1.25
"""Tokens per plain step, expected and seen, at which cycles may lose `LOSS`, and at which `SLACK`."""
MEMORY = 32
"""Cycles in the running means, about; also the weight of a tuning's prediction, in plain steps."""
PRIOR = 8.0
"""Weights of what a cycle promises, and of what is usual, beside what was seen, in plain steps."""
USUAL = 0.7
"""Share of heads' drafts that are accepted after an accepted one, roughly: what is usual before anything was seen."""
DRIFT = 1.2
"""How far the slowest row falls behind, by that of independent random walks: some texts are harder than others."""
GREEDY_SHIFT = 0.6
"""`Payoff.shift` is counted from here at temperature 0, where a likely token is likelier to be the likeliest."""
CAUTION = 20.0
"""Evidence without which odds stay those of the scores."""
SURE = 0.95
"""Most that a token's probability counts: of a method without probabilities all are 1."""
MARGIN = 0.1
"""Share by which a cycle may cost more beyond a plain step than it should: costs vary, the most after plain steps."""
TRIAL = 3.0
"""Plain steps that all calls together may have lost where another text is still a new chance."""
CREDIT = 20.0
"""Plain steps saved, or lost, that are remembered from call to call."""
GROWTH, LONGEST = 4, 2048
"""Factor of the plain steps after another failure, and their limit."""


class Choice(NamedTuple):
    """Holds the choice for a cycle.

    Attributes:
      rung: index of the chosen size.
      cost: of the cycle, in plain steps, before a token is accepted.
      hoped: drafted tokens that a row is expected to accept.
      worth: expected tokens of the slowest row per plain step.
      lag: tokens per cycle by which the slowest row falls behind.
      spread: by how much `hoped` would grow per unit of the shift.
    """

    rung: Int[Array, ""]
    cost: Float[Array, ""]
    hoped: Float[Array, ""]
    worth: Float[Array, ""]
    lag: Float[Array, ""] | float = 0.0
    spread: Float[Array, ""] | float = 0.0


def start(expected: float | None = None) -> Payoff:
    """Returns the payoff of a run before its first cycle.

    Args:
      expected: tokens per plain step that a tuning predicts, which counts as much as `MEMORY` plain steps of this run;
        None knows nothing.
    """
    # An array of its own for every field: a caller may donate them.
    balance, shift, evidence, saved = (jnp.float32(0) for _ in range(4))
    gained, spent = jnp.float32(MEMORY * (expected or 0)), jnp.float32(MEMORY if expected else 0)
    return Payoff(balance, gained, spent, shift, evidence, saved, jnp.int32(0), jnp.int32(BURST))


def resume(payoff: Payoff) -> Payoff:
    """Returns the payoff at the beginning of a call from that at the end of an earlier one.

    Another text is a new chance: where drafts have saved steps on the whole, or lost few, plain steps do not go on, and
    the loss that led to them is forgiven.
    """
    pays = payoff.saved > -TRIAL
    return payoff._replace(
        balance=jnp.where(pays, jnp.maximum(payoff.balance, 0), payoff.balance),
        wait=jnp.where(pays, 0, payoff.wait),
        pause=jnp.where(pays, BURST, payoff.pause),
    )


def choose(
    payoff: Payoff, state: GenerateState, tree: DraftTree, prices: Prices, depth: int,
    levels: Int[Array, ""] | int = 0, refilled: bool = False,
) -> Choice:  # fmt: skip
    """Chooses the number of rows with the most expected tokens per cost of the cycle.

    Args:
      state: before the cycle. tree: the best nodes first, if there are several sizes.
      depth: most levels. levels: that were drafted. refilled: as in `judge`.
    """
    costs = prices.draft + prices.level * levels + jnp.asarray(prices.passes)
    depths = node_depths(ancestor_mask(tree.parents, depth))
    values = chances(payoff, tree.scores, depths).at[:, 0].set(0)  # the root is no drafted node
    up_to = lambda nodes: _sums(nodes, np.array(prices.rows))  # noqa: E731
    promised = up_to(values)
    growth = depths * values * (1 - values ** (1 / jnp.maximum(depths, 1)))
    hoped, spread = _mean(promised, state), _mean(up_to(growth), state)
    weights = _weights(state, refilled)
    drafted = jnp.sum(weights[:, None] * promised, axis=0)
    # E[X^2] is the sum of (2 d - 1) P(X >= d): of the drafts X that a row accepts.
    squares = _mean(up_to(values * (2 * depths - 1)), state)
    variance = jnp.maximum(squares - hoped**2, 0)
    left = jnp.max(jnp.where(state.done, 0, state.budget - state.num_tokens))
    cycles = jnp.maximum(left / (1 + drafted), 1)
    # A row far behind decides alone: it does not fall behind itself.
    rows = 1.0 if refilled else 1 / jnp.sum(weights**2)
    lag = DRIFT * _largest_of(rows) * jnp.sqrt(variance / cycles)
    gain = 1 + drafted - lag
    whole = costs + prices.token * drafted
    worth = gain / whole
    rung = jnp.argmax(jnp.where(jnp.max(worth) < 1, gain - whole, worth)).astype(jnp.int32)
    return Choice(rung, costs[rung], hoped[rung], worth[rung], lag[rung], spread[rung])


def usual_worth(prices: Prices, depth: int) -> Float[Array, ""]:
    """Returns the tokens per plain step of the best size, if of each path as many drafts are accepted as is usual.

    Args:
      depth: most levels.
    """
    levels = np.minimum(np.array(prices.rows) - 1, depth)
    drafted = np.array([sum(USUAL**level for level in range(1, most + 1)) for most in levels], np.float32)
    costs = prices.passes + prices.draft + prices.level * levels + prices.token * drafted
    return jnp.max((1 + drafted) / costs).astype(jnp.float32)


def deepens(
    payoff: Payoff, state: GenerateState, prices: Prices, depth: int,
    scores: Float[Array, "B E"], levels: np.ndarray, frontier: Float[Array, "B W"], drafted: Int[Array, ""] | int,
    refilled: bool = False,
) -> Bool[Array, ""]:  # fmt: skip
    """Returns whether further levels promise more tokens per cost of the cycle than those that are drafted.

    Each further level is expected to be a copy of the frontier whose chances fall by the factor by which those of the
    likeliest path fell per level so far: chances of one path fall about geometrically.

    Args:
      refilled: as in `judge`. depth: most levels.
      scores: of all candidates. levels: [E], their depths. frontier: scores of those that the next level would extend.
      drafted: levels, from 1.
    """
    sizes = np.array(prices.rows) - 1
    more = jnp.arange(depth)
    count = min(int(sizes.max()), scores.shape[1])
    best, _ = largest(chances(payoff, scores, levels[None]), count)
    front = chances(payoff, frontier, drafted)
    fall = jnp.max(front, axis=1, keepdims=True) ** (more[None, 1:] / drafted)
    later = (fall[:, :, None] * front[:, None])[:, None]
    copies = jnp.where((more[None, 1:] <= more[:, None])[None, :, :, None], later, 0)
    parts = jnp.broadcast_to(best[:, None], (len(best), depth, count)), copies.reshape(len(best), depth, -1)
    top, _ = largest(jnp.concatenate(parts, axis=-1), count)
    tokens = jnp.sum(_weights(state, refilled)[:, None, None] * _sums(top, sizes), axis=0)
    ends = drafted + more
    whole = prices.draft + prices.passes[None] + prices.level * ends[:, None] + prices.token * tokens
    worth = jnp.max((1 + tokens) / whole, axis=1)
    return jnp.max(jnp.where((more > 0) & (ends <= depth), worth, 0)) > worth[0]


def trusted(payoff: Payoff, sampling: Sampling) -> Payoff:
    """Returns the payoff for `choose` and `deepens`, whose shift counts from 0."""
    return payoff._replace(shift=payoff.shift + GREEDY_SHIFT) if sampling.greedy else payoff


def chances(
    payoff: Payoff, scores: Float[Array, "B *n"], depths: Int[Array | np.ndarray, "..."] | int
) -> Float[Array, "B *n"]:
    """Returns the chances of nodes to be accepted: those of their scores, with the odds that earlier tokens had.

    The tokens of a path count as equally likely: a score is the sum over its path, whose parts are not kept.
    """
    levels = jnp.maximum(depths, 1)
    likely = jnp.minimum(jnp.exp(scores / levels), SURE)
    odds = jnp.exp(payoff.shift) * likely
    return (odds / (1 - likely + odds)) ** levels


def judge(
    payoff: Payoff, state: GenerateState, info: StepInfo, choice: Choice, refilled: bool = False,
    token: Array | float = 0.0, usual: Array | float = 1.0,
) -> Payoff:  # fmt: skip
    """Returns the payoff after a drafted cycle; `state` is that before the cycle.

    Args:
      refilled: whether a row that is done makes room for another one.
      token: cost of an accepted token per row.
      usual: as `usual_worth` returns.
    """
    gain = jnp.sum(_weights(state, refilled) * info.emitted) - choice.lag
    kept = _mean(info.acceptance.count, state)
    cost = choice.cost + token * kept
    saved = gain - cost - MARGIN * jnp.maximum(cost - 1, 0)
    fade = 1 - 1 / MEMORY
    gained, spent = fade * payoff.gained + gain, fade * payoff.spent + cost
    balance = jnp.minimum(payoff.balance + saved, SLACK)
    worth = (PRIOR * (choice.worth + usual) + gained) / (2 * PRIOR + spent)
    promise = (worth - DOUBTFUL) / (PROMISING - DOUBTFUL)
    least = jnp.minimum(LOSS * _mean(state.budget, state), SLACK)
    slack = least + jnp.clip(promise, 0, 1) * (SLACK - least)
    # No drafted node was worth its cost, nor have others been of late, or usually.
    nothing = (choice.hoped == 0) & (choice.cost > 1) & (promise < 0)
    # Of what drafts have saved, half may be lost again: a bad stretch proves little.
    spare = jnp.maximum(payoff.saved, 0) / 2
    fails = nothing | (balance < -slack - spare)
    balance = jnp.where(fails, jnp.minimum(balance + spare, jnp.maximum(balance, 0)), balance)
    running = jnp.sum(~state.done)
    evidence = fade * payoff.evidence + running * choice.spread
    # A step of Newton's method on what all rows have shown; at most 1, so that no cycle decides alone.
    shift = payoff.shift + jnp.clip(running * (kept - choice.hoped) / (evidence + CAUTION), -1, 1)
    longer = jnp.minimum(payoff.pause * GROWTH, LONGEST)
    pause = jnp.where(fails, longer, jnp.where(balance == SLACK, BURST, payoff.pause))
    return Payoff(
        balance, gained, spent, shift, evidence, jnp.clip(payoff.saved + saved, -CREDIT, CREDIT),
        jnp.where(fails, payoff.pause, 0), pause,
    )  # fmt: skip


def repay(payoff: Payoff, steps: Int[Array, ""]) -> Payoff:
    """Returns the payoff after so many plain steps: they pay a loss back, and leave a gain as it is."""
    balance = jnp.minimum(payoff.balance + LOSS * steps, jnp.maximum(payoff.balance, 0))
    return payoff._replace(wait=jnp.maximum(payoff.wait - steps, 0), balance=balance)


def drafts_later(payoff: Payoff, left: Int[Array, " B"]) -> Bool[Array, ""]:
    """Returns whether drafts go on before all rows have emitted as many tokens as are `left` to them."""
    return payoff.wait < jnp.max(left)


def _largest_of(count: Float[Array, ""] | float) -> Float[Array, ""]:
    """Returns about the expected largest of so many standard normal numbers (Blom, 1958); 0 of one."""
    return jax.scipy.special.ndtri((count - 0.375) / (count + 0.25))


def _weights(state: GenerateState, refilled: bool) -> Float[Array, " B"]:
    """Returns how much the tokens of each running row count: the more, the more are left to it; in lanes all alike.

    Rows that lag by more than a random walk spreads them decide when the batch ends.
    """
    left = (state.budget - state.num_tokens) * (0 if refilled else 1)
    most = jnp.sqrt(jnp.maximum(jnp.max(jnp.where(state.done, 0, left)), 1).astype(jnp.float32))
    return jax.nn.softmax(jnp.where(state.done, -1e9, 2 * left / most))


def _sums(nodes: Float[Array, "*b N"], counts: np.ndarray) -> Float[Array, "*b R"]:
    """Returns the sums of the first nodes, of so many each: one operation, where a running sum takes several."""
    first = np.arange(nodes.shape[-1])[None] < counts[:, None]
    return jnp.sum(jnp.where(jnp.expand_dims(first, range(nodes.ndim - 1)), nodes[..., None, :], 0), axis=-1)


def _mean(rows: Shaped[Array, "B *n"], state: GenerateState) -> Float[Array, "*n"]:
    """Returns the mean over the running rows."""
    running = jnp.expand_dims(~state.done, range(1, rows.ndim))
    return jnp.sum(jnp.where(running, rows, 0), axis=0) / jnp.maximum(jnp.sum(~state.done), 1)


def recorder(engine: Engine) -> Drafter:
    """Returns a drafter of empty trees whose state, a `Verified`, is what the engine's drafter will read."""
    target, taps = engine.target, engine.drafter.taps

    def init(params: Params, batch: int, slots: int) -> Verified:
        out = target.output_shapes(params["target"], target.init_cache(batch, slots), taps)
        none, tokens = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, BURST), jnp.int32)
        features = jnp.zeros((batch, BURST, out.features.shape[2]), out.features.dtype)
        return Verified(tokens, tokens, features, none, none)

    def draft(
        params: Params, state: Verified, root: Array, randomness: RowRandomness, sampling: Sampling
    ) -> tuple[DraftTree, Verified]:
        return empty_tree(root), state

    def update(params: Params, state: Verified, verified: Verified) -> Verified:
        def append(rows: Array, new: Array) -> Array:
            write = lambda row, part, place: jax.lax.dynamic_update_slice_in_dim(row, part, place, 0)  # noqa: E731
            return jax.vmap(write)(rows, new, state.count)

        return state._replace(
            tokens=append(state.tokens, verified.tokens),
            next_tokens=append(state.next_tokens, verified.next_tokens),
            features=append(state.features, verified.features),
            count=state.count + verified.count,
        )

    return Drafter(init, draft, update, taps, depth=0, num_nodes=0)
