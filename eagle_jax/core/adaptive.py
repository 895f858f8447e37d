"""Runs plain steps in place of drafted cycles while these cost more than they yield; the text does not depend on it.

Cycles are tried in windows. If a window emits fewer tokens per row than a cycle costs in plain steps, bursts of plain
steps follow, four times as many after each failed window in a row. The drafter reads a burst's tokens at its end, all
at once, so a plain step costs what it costs without a drafter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle_jax.core.types import (
    Drafter,
    DraftTree,
    Engine,
    GenerateState,
    Params,
    RowRandomness,
    Sampling,
    Verified,
    empty_tree,
)

BURST = 32
"""Plain steps between two looks at the rows."""
WINDOW, MEMORY = 4, 16
"""Cycles before the first judgement, and about how many are remembered."""
GROWTH, LONGEST = 4, 64
"""Factor of the number of bursts after another failed window, and its limit."""


class Recorded(NamedTuple):
    """Holds what plain steps confirmed, for the drafter: the fields of `Verified` but `start`."""

    tokens: Int[Array, "B K"]
    next_tokens: Int[Array, "B K"]
    features: Float[Array, "B K F"]
    count: Int[Array, " B"]  # type: ignore[assignment]  # hides tuple.count, which nobody calls


class Progress(NamedTuple):
    """Holds the state of a run and what its drafts have yielded.

    Attributes:
      emitted, cycles: tokens per running row in the remembered cycles, and their number.
      wait: bursts before the next drafted cycle. pause: bursts after the next failed window.
    """

    state: GenerateState
    emitted: Float[Array, ""]
    cycles: Float[Array, ""]
    wait: Int[Array, ""]
    pause: Int[Array, ""]


def longest_update(engine: Engine) -> int:
    """Returns how many drafted or recorded tokens the drafter may have to read at once."""
    return engine.drafter.depth if engine.cycle_cost is None else max(engine.drafter.depth, BURST)


def start(state: GenerateState) -> Progress:
    """Returns the progress of a run after its prefill."""
    return Progress(state, jnp.float32(0), jnp.float32(0), jnp.int32(0), jnp.int32(1))


def judge(progress: Progress, state: GenerateState, emitted: Int[Array, " B"], cost: float) -> Progress:
    """Returns the progress after a drafted cycle that led to `state`; `cost` is that of a cycle in plain steps."""
    rows = jnp.maximum(jnp.sum(~progress.state.done), 1)
    total, cycles = progress.emitted + jnp.sum(emitted) / rows, progress.cycles + 1
    fails = (cycles >= WINDOW) & (total < cost * cycles)
    trusted = cycles >= MEMORY
    keep = jnp.where(fails, 0.0, jnp.where(trusted, 0.5, 1.0))
    longer = jnp.minimum(progress.pause * GROWTH, LONGEST)
    pause = jnp.where(fails, longer, jnp.where(trusted, 1, progress.pause))
    return Progress(state, total * keep, cycles * keep, jnp.where(fails, progress.pause, 0), pause)


def recorder(engine: Engine) -> Drafter:
    """Returns a drafter of empty trees that keeps what the engine's drafter will read."""

    def draft(
        params: Params, state: Recorded, root: Array, randomness: RowRandomness, sampling: Sampling
    ) -> tuple[DraftTree, Recorded]:
        return empty_tree(root), state

    def update(params: Params, state: Recorded, verified: Verified) -> Recorded:
        def append(rows: Array, new: Array) -> Array:
            write = lambda row, part, place: jax.lax.dynamic_update_slice_in_dim(row, part, place, 0)  # noqa: E731
            return jax.vmap(write)(rows, new.astype(rows.dtype), state.count)

        return Recorded(
            append(state.tokens, verified.tokens),
            append(state.next_tokens, verified.next_tokens),
            append(state.features, verified.features),
            state.count + verified.count,
        )

    def init(params: Params, batch: int, slots: int) -> Any:
        raise NotImplementedError("a burst begins with its own empty record")

    return Drafter(init, draft, update, taps=engine.drafter.taps, depth=0, num_nodes=0)


def empty_record(params: Params, state: GenerateState, engine: Engine) -> Recorded:
    """Returns a record without tokens."""
    root, position, one = state.root[:, None], state.cache.length[:, None], jnp.ones((1, 1), bool)
    out = jax.eval_shape(
        lambda: engine.target.forward(params["target"], root, position, one, state.cache, engine.drafter.taps)
    )
    rows, _, width = out.features.shape
    tokens = jnp.zeros((rows, BURST), jnp.int32)
    return Recorded(tokens, tokens, jnp.zeros((rows, BURST, width), out.features.dtype), jnp.zeros((rows,), jnp.int32))
