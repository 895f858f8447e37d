"""Runs plain steps in place of drafted cycles while these cost more than they yield; the text does not depend on it.

Cycles are tried in windows. If a window emits fewer tokens per row than a cycle costs in plain steps, bursts of plain
steps follow, four times as many after each failed window in a row. The drafter reads a burst's tokens at its end, all
at once, so a plain step costs what it costs without a drafter.
"""

from __future__ import annotations

from typing import NamedTuple

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
