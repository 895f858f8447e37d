"""Checks while tracing what the engine is given, and what a drafter returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eagle_jax.core.costs import CycleCost
from eagle_jax.core.types import (
    Batch,
    Drafter,
    DraftTree,
    Engine,
    GenerateState,
    Params,
    RowRandomness,
    Sampling,
    Sizes,
    TargetFn,
    Verified,
)


def check_arguments(params: Params, batch: Batch, sampling: Any, engine: Engine, sizes: Sizes) -> None:
    """Checks types and shapes, so that the error is not a tracing error."""
    for name, value, kind, remedy in (
        ("batch", batch, Batch, "eagle_jax.core.Batch(prompts, lengths, budget, eos_ids, keys)"),
        ("engine", engine, Engine, "eagle_jax.core.Engine(target, drafter)"),
        ("sizes", sizes, Sizes, "eagle_jax.core.Sizes(max_tokens, chunk)"),
        ("engine.target", getattr(engine, "target", None), TargetFn, "target.fn"),
        ("engine.drafter", getattr(engine, "drafter", None), Drafter, "drafter.drafter"),
        ("sampling", sampling, Sampling, "eagle_jax.core.make_sampling(temperature)"),
    ):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got a {type(value).__name__}. Pass {remedy}.")
    if not isinstance(engine.cycle_cost, CycleCost | None):
        raise ValueError(
            f"engine.cycle_cost must be a CycleCost or None, got {engine.cycle_cost!r}. Of a float c make "
            "CycleCost((drafter.num_nodes + 1,), (c,))."
        )
    if not isinstance(params, Mapping) or not params.keys() >= {"target", "drafter"}:
        found = sorted(params) if isinstance(params, Mapping) else f"a {type(params).__name__}"
        raise ValueError(f'params must be {{"target": ..., "drafter": ...}}, got {found}. Pass the parameters of both.')
    for name, value in batch._asdict().items():
        axes = {"prompts": "B, P", "eos_ids": "B, E"}.get(name, "B")
        is_array = isinstance(value, jax.Array | np.ndarray)
        if not is_array or value.ndim != axes.count(",") + 1 or value.shape[0] != batch.prompts.shape[0]:
            found = f"shape {list(value.shape)}" if is_array else f"a {type(value).__name__}"
            raise ValueError(
                f"batch.{name} must be an array [{axes}] with a row per prompt, got {found}. Pass such a JAX array."
            )


def draft_checked(
    drafter: Drafter, params: Params, state: GenerateState, randomness: RowRandomness, sampling: Sampling
) -> tuple[DraftTree, Any]:
    """Returns the tree of `drafter.draft` and the drafter's next state; checks both while tracing.

    Raises:
      ValueError: the result is not (tree, state), the tree lacks nodes, or the state has another form.
    """
    result = drafter.draft(params, state.drafter, state.root, randomness, sampling)
    if not (type(result) is tuple and len(result) == 2 and isinstance(result[0], DraftTree)):
        kinds = [type(part).__name__ for part in result] if type(result) is tuple else [type(result).__name__]
        raise ValueError(f"the drafter's draft must return (DraftTree, state), got {', '.join(kinds)}. Return both.")
    tree, after = result
    shape = (state.root.shape[0], drafter.num_nodes + 1)
    for name in ("tokens", "parents"):
        rows = getattr(tree, name)
        if rows.shape != shape or not jnp.issubdtype(rows.dtype, jnp.integer):
            raise ValueError(
                f"{name} of the drafter's tree must be integers of shape {list(shape)} (the root and num_nodes), got "
                f"{_form(rows)}. Return such an array."
            )
    return tree, _same_form(state.drafter, after, "draft")


def update_checked(drafter: Drafter, params: Params, state: Any, verified: Verified) -> Any:
    """Returns the drafter's state after `drafter.update` has read the confirmed tokens.

    Raises:
      ValueError: the state has another structure, shape or dtype than before.
    """
    return _same_form(state, drafter.update(params, state, verified), "update")


def update_if(needed: Array | bool, drafter: Drafter, params: Params, state: Any, verified: Verified) -> Any:
    """Runs `update_checked` if the state is needed, else returns it as it is."""
    if needed is True:
        return update_checked(drafter, params, state, verified)

    def turn(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        return jnp.bool_(False), update_checked(drafter, params, carry[1], verified)

    # A loop of at most one turn: the branches of `lax.cond` would copy the state's caches.
    return jax.lax.while_loop(lambda carry: carry[0], turn, (jnp.asarray(needed), state))[1]


def update_up_to(widths: tuple[int, ...], drafter: Drafter, params: Params, state: Any, verified: Verified) -> Any:
    """Runs `update_checked` on the first tokens of every row: as many, of `widths`, as the longest row has.

    Args:
      widths: ascending, up to all tokens; one or none reads all.
    """
    if len(widths) <= 1:
        return update_checked(drafter, params, state, verified)
    longest = jnp.max(verified.count)
    for fewer, width in zip((0, *widths), widths, strict=False):
        first = verified._replace(
            tokens=verified.tokens[:, :width],
            next_tokens=verified.next_tokens[:, :width],
            features=verified.features[:, :width],
        )
        state = update_if((longest > fewer) & (longest <= width), drafter, params, state, first)
    return state


def _same_form(before: Any, after: Any, function: str) -> Any:
    """Returns `after`, checked to have the structure, shapes and dtypes of `before`."""
    old, new = jax.tree.map(_form, before), jax.tree.map(_form, after)
    structures: list[Any] = [jax.tree.structure(before), jax.tree.structure(after)]  # typed stubs have no ==
    if structures[0] != structures[1] or old != new:
        raise ValueError(
            f"the drafter's {function} must return a state like {old}, got {new}. Keep structure, shapes and dtypes."
        )
    return after


def _form(leaf: Any) -> str:
    return f"{jnp.asarray(leaf).dtype}{list(jnp.shape(leaf))}"
