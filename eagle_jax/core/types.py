"""Defines the engine's records: trees, caches, states, and the functions of a target and a drafter.

Dimension letters, used in every docstring:

    B batch          N drafted nodes (a tree has N + 1 rows: the root is row 0)     D depth, drafted levels
    K top_k          T new tokens of a forward pass       S cache slots             L layers        P prompt width
    H hidden         F feature width (taps * H)           V vocabulary              Vd draft vocab  M output width
    A heads          G key-value heads                    R = A / G                 E stop tokens per row

Records of arrays are `NamedTuple`s, hence pytrees. A law is a probability distribution over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from eagle_jax.core.costs import CycleCost, Payoff
from eagle_jax.core.randomness import RowRandomness

Params = Any
"""A plain nested dict of arrays. The engine holds `{"target": ..., "drafter": ...}`."""

ROOT = -1
"""Value of `DraftTree.parents` in the row of the root."""
PADDING = -2
"""Value of `DraftTree.parents` in a padded row, which is not a node, has no descendants, and is never accepted."""


class DraftTree(NamedTuple):
    """A draft tree; row 0 is the root (the last emitted token), parents precede children.

    Attributes:
      tokens: [B, N+1] int32, target token ids.
      parents: [B, N+1] int32, row of the parent; `ROOT` in row 0, `PADDING` in rows that are not nodes.
      scores: [B, N+1] float32, cumulative log-probabilities by the draft's ranking law (the draft's own when sampled);
        0 where a method has none, -inf at padding.
      draft_log_probs: [B, N+1, V] float32, the law from which the children of a row were drawn; None if not sampled.
    """

    tokens: Int[Array, "B N1"]
    parents: Int[Array, "B N1"]
    scores: Float[Array, "B N1"]
    draft_log_probs: Float[Array, "B N1 V"] | None = None

    @property
    def valid(self) -> Bool[Array, "B N1"]:
        """Rows that are nodes (the root included)."""
        return self.parents != PADDING


class KVCache(NamedTuple):
    """Keys and values of the committed tokens, one array per layer.

    A stack of layers would have to be sliced by every layer.

    Attributes:
      keys: L arrays [B, G, head_dim, S], transposed: the scores of a query lie along S.
      values: L arrays [B, G, S, head_dim].
      length: [B] int32, committed tokens of every row; attention masks the slots from `length` on.

    A layer with a window of W tokens has a ring of min(S, W) slots. Position p is in slot p modulo their number.
    """

    keys: tuple[Float[Array, "B G hd S"], ...]
    values: tuple[Float[Array, "B G S hd"], ...]
    length: Int[Array, " B"]

    @property
    def slots(self) -> int:
        """Slots of the largest layer: S, the capacity in tokens, unless every layer has a window of fewer."""
        return max(layer.shape[2] for layer in self.values)


class NewKV(NamedTuple):
    """Keys and values of a forward pass for its T new tokens: L arrays [B, G, T, head_dim] each."""

    keys: tuple[Float[Array, "B G T hd"], ...]
    values: tuple[Float[Array, "B G T hd"], ...]


class TargetOutput(NamedTuple):
    """The target's results for T new tokens.

    Attributes:
      hidden: [B, T, H], after the final norm; `TargetFn.logits` reads it.
      features: [B, T, F], the tapped hidden states side by side, in the order of `taps`.
      new: keys and values of the T tokens, not yet committed.
    """

    hidden: Float[Array, "B T H"]
    features: Float[Array, "B T F"]
    new: NewKV


class TargetFn(NamedTuple):
    """Four pure functions of a target language model; any JAX model can be wrapped into them.

    Attributes:
      forward: `(params, tokens [B,T], positions [B,T], mask [T,T] or [B,T,T] bool, cache, taps) -> TargetOutput`. Token
        i sees every committed token and those new tokens j with mask[i, j]; in a layer with a window, the last of them.
        The cache is read, never written; None, in training, is an empty one. A draft model takes one more argument,
        `earlier`: a `NewKV` of uncommitted tokens, whose mask columns come first.
      logits: `(params, hidden [..., H]) -> [..., V] float32`.
      embed: `(params, tokens [...]) -> [..., H]`.
      init_cache: `(batch, slots) -> KVCache`, empty.
      windows: per layer, how many tokens a token sees, itself included; 0 is all. () is 0 in every layer.
      row_groups: over how many groups of devices the rows of a batch are split.
    """

    forward: Callable[..., TargetOutput]
    logits: Callable[[Params, Array], Array]
    embed: Callable[[Params, Array], Array]
    init_cache: Callable[[int, int], KVCache]
    windows: tuple[int, ...] = ()
    row_groups: int = 1

    def output_shapes(self, params: Params, cache: KVCache, taps: tuple[int, ...]) -> Any:
        """Returns shapes and dtypes of what `forward` returns for one token per row, a `TargetOutput`."""
        token = jnp.zeros((cache.length.shape[0], 1), jnp.int32)
        return jax.eval_shape(lambda: self.forward(params, token, token, jnp.ones((1, 1), bool), cache, taps))


class Verified(NamedTuple):
    """Confirmed tokens of a prompt chunk or an accepted path: row i is position p = start + i of the text.

    Attributes:
      tokens: [B, T] int32, token at position p.
      next_tokens: [B, T] int32, token at position p + 1; the last valid one is the new root.
      features: [B, T, F], the target's tapped states at position p.
      start: [B] int32, position of row 0 = number of tokens committed before.
      count: [B] int32, valid rows, 0 to T; rows beyond are padding.
      choices: [B, N+1] int32, the target's likeliest token after every row of the verified tree. None for a prompt
        chunk, or without `Drafter.reads_choices`.
    """

    tokens: Int[Array, "B T"]
    next_tokens: Int[Array, "B T"]
    features: Float[Array, "B T F"]
    start: Int[Array, " B"]
    count: Int[Array, " B"]  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    choices: Int[Array, "B N1"] | None = None


class Sampling(NamedTuple):
    """Processors that turn the target's logits into the sampled law; `None` leaves one out of the program.

    Attributes:
      temperature: scalar float32; None is greedy decoding (temperature 0).
      top_k: scalar int32. top_p: scalar float32 in (0, 1]. min_p: scalar float32 in [0, 1].
    """

    temperature: Array | None = None
    top_k: Array | None = None
    top_p: Array | None = None
    min_p: Array | None = None

    @property
    def greedy(self) -> bool:
        """Whether the law is a point mass at the largest logit."""
        return self.temperature is None


class Drafter(NamedTuple):
    """A drafting method: the pure functions init, draft and update, and their sizes.

    `params` is the engine's whole `{"target": ..., "drafter": ...}`: a head may share the target's embedding.

    Attributes:
      init: `(params, batch, slots) -> state`, before the prompt.
      draft: `(params, state, root [B], randomness, sampling) -> (DraftTree, state)`, of static shapes.
      update: `(params, state, verified) -> state`, called with every run of confirmed tokens.
      taps: the target's hidden states that `update` reads as features, in `transformers` numbering.
      depth: D, drafted levels. num_nodes: N, drafted nodes.
      verify: the acceptance rule for its drafts (`verify.VerifyFn`); None is `verify.deterministic`.
      reads_choices: whether `update` reads the target's likeliest token after every row of the tree.
      with_limit: `(pays, running [B]) -> Drafter`, which drafts a further level only while `pays(scores [B, E] of all
        candidates, their depths [E], scores [B, W] of those to extend, drafted levels)`; None is no limit. Only running
        rows count.
      level_nodes: how many of the nodes, the first ones, are drafted level by level; None is all. The others, of prompt
        lookup beside a head, cost nothing.
      rewind: `(state, length [B]) -> state`, the state when `length` tokens of the same text were confirmed. Without
        it, a session reads an edited text from its beginning.
    """

    init: Callable[[Params, int, int], Any]
    draft: Callable[[Params, Any, Array, RowRandomness, Sampling], tuple[DraftTree, Any]]
    update: Callable[[Params, Any, Verified], Any]
    taps: tuple[int, ...]
    depth: int
    num_nodes: int
    verify: Callable[..., Acceptance] | None = None
    reads_choices: bool = False
    rewind: Callable[[Any, Array], Any] | None = None
    with_limit: Callable[[Any, Any], Drafter] | None = None
    level_nodes: int | None = None


class Acceptance(NamedTuple):
    """Outcome of verifying one tree per row.

    Attributes:
      path: [B, D+1] int32, rows of the tree from the root along the accepted nodes; padded by repeating the last one.
      count: [B] int32, accepted drafted nodes, 0 to D (the root not counted).
      next_token: [B] int32, the target's own token after the last accepted node.
    """

    path: Int[Array, "B D1"]
    count: Int[Array, " B"]  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    next_token: Int[Array, " B"]


FINITE = -1
"""`GenerateState.not_finite` and `bad_drafts` of a row without fault."""


class GenerateState(NamedTuple):
    """Everything the next cycle needs.

    Attributes:
      cache: the target's committed cache; the root is not in it yet.
      drafter: state of the drafter.
      root: [B] int32, the last emitted token.
      tokens: [B, M] int32, emitted tokens; entries beyond `num_tokens` are undefined.
      num_tokens: [B] int32, tokens emitted so far, never above `budget`.
      budget: [B] int32, most tokens the row may emit. eos_ids: [B, E] int32, stop tokens, padded with -1.
      done: [B] bool. cycles: [B] int32, target passes after prefill while the row was running.
      accepted: [B, D+1] int32, histogram of accepted drafted tokens per cycle.
      keys: [B] one PRNG key per row; with the default acceptance rule, token i of a row is drawn with
        `fold_in(keys[row], i)`.
      not_finite: [B] int32, generated position without finite logits of the target, where the row ended; or `FINITE`.
      bad_drafts: [B] int32, generated position of the first cycle whose drafts had NaN scores; or `FINITE`.
      log_probs: [B, M] float32, of the emitted tokens, under the law that `Engine.log_probs` names; or None.
      features: [B, S, F], the states that `Engine.taps` names, at every position of the cache; entries beyond its
        length are undefined. Or None.
      payoff: at the end of `generate` with `Engine.cycle_cost`, what drafts have yielded; else None.
    """

    cache: KVCache
    drafter: Any
    root: Int[Array, " B"]
    tokens: Int[Array, "B M"]
    num_tokens: Int[Array, " B"]
    budget: Int[Array, " B"]
    eos_ids: Int[Array, "B E"]
    done: Bool[Array, " B"]
    cycles: Int[Array, " B"]
    accepted: Int[Array, "B D1"]
    keys: Key[Array, " B"]
    not_finite: Int[Array, " B"]
    bad_drafts: Int[Array, " B"]
    log_probs: Float[Array, "B M"] | None = None
    features: Float[Array, "B S F"] | None = None
    payoff: Payoff | None = None


class Batch(NamedTuple):
    """The rows of a call.

    Attributes:
      prompts: [B, P] int32 token ids, padded on the right. lengths: [B] int32, tokens of every prompt, at least 1.
      budget: [B] int32, most tokens every row may emit, 1 to `Sizes.max_tokens`.
      eos_ids: [B, E] int32, stop tokens of every row, padded with -1.
      keys: [B] PRNG keys of any generator of JAX, one per row; unused at temperature 0.
    """

    prompts: Int[Array, "B P"]
    lengths: Int[Array, " B"]
    budget: Int[Array, " B"]
    eos_ids: Int[Array, "B E"]
    keys: Key[Array, " B"]


class Engine(NamedTuple):
    """The functions of a cycle: hashable, a static argument under `jit`.

    Attributes:
      target, drafter: the functions of the model and of the drafting method.
      log_probs: keeps log-probabilities of emitted tokens under the "target" at temperature 1 or the sampled "law".
      verify: acceptance rule (`verify.VerifyFn`); None is the drafter's own.
      cycle_cost: what the parts of a cycle cost. `generate` and `rollout` then verify as many drafted nodes as pay, and
        run plain steps while cycles emit fewer tokens than they cost; `step` does not read it.
      taps: hidden states of the target to keep of every committed token, in `transformers` numbering; None keeps none.
    """

    target: TargetFn
    drafter: Drafter
    log_probs: Literal["target", "law"] | None = None
    verify: Callable[..., Acceptance] | None = None
    cycle_cost: CycleCost | None = None
    taps: tuple[int, ...] | None = None


class Sizes(NamedTuple):
    """The sizes of a run: static under `jit`. `step` derives them from the shapes of the state.

    Attributes:
      max_tokens: capacity of the output per row. chunk: prompt tokens per prefill pass; it divides P.
      slots: S, capacity of the caches; None is the least, `required_slots`.
    """

    max_tokens: int
    chunk: int
    slots: int | None = None


class StepInfo(NamedTuple):
    """Diagnostics of one cycle.

    Attributes:
      tree: the tree that was verified. acceptance: its accepted path.
      tokens: [B, D+1] int32, tokens of this cycle in order. emitted: [B] int32, how many of them count (0 for a
        finished row; cut at the first stop token and at the budget).
      log_probs: [B, D+1] float32, of those tokens; None without `Engine.log_probs`.
    """

    tree: DraftTree
    acceptance: Acceptance
    tokens: Int[Array, "B D1"]
    emitted: Int[Array, " B"]
    log_probs: Float[Array, "B D1"] | None = None


def empty_tree(root: Int[Array, " B"]) -> DraftTree:
    """Returns the tree of plain decoding: a root and no drafted node."""
    tokens = root[:, None]
    return DraftTree(tokens, jnp.full_like(tokens, ROOT), jnp.zeros(tokens.shape, jnp.float32))


def empty_cache(
    layers: int, batch: int, heads: int, slots: int, head_dim: int, dtype: str, windows: tuple[int, ...] = ()
) -> KVCache:
    """Returns an empty cache of `slots` tokens per row; `windows` as in `TargetFn`."""
    sizes = [min(slots, window or slots) for window in windows or (0,) * layers]
    return KVCache(
        keys=tuple(jnp.zeros((batch, heads, head_dim, size), dtype) for size in sizes),
        values=tuple(jnp.zeros((batch, heads, size, head_dim), dtype) for size in sizes),
        length=jnp.zeros((batch,), jnp.int32),
    )
