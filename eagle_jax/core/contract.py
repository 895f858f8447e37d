"""Calls a drafter's functions and validates their results while the program is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.core.randomness import RowRandomness
from eagle_jax.core.types import Drafter, DraftTree, GenerateState, Params, Sampling, Verified


def call_draft(
    drafter: Drafter, params: Params, state: GenerateState, randomness: RowRandomness, sampling: Sampling
) -> tuple[DraftTree, Any]:
    """Returns the tree of `drafter.draft` and the drafter's next state.

    Raises:
      ValueError: the result is not (tree, state), the tree has not `num_nodes` nodes, or the state has another form.
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
                f"{name} of the drafter's tree must be int32{list(shape)} (the root and num_nodes), got {_form(rows)}."
            )
    return tree, _same_form(state.drafter, after, "draft")


def call_update(drafter: Drafter, params: Params, state: Any, verified: Verified) -> Any:
    """Returns the drafter's state after `drafter.update` has read the confirmed tokens.

    Raises:
      ValueError: the state has another structure, shape or dtype than before.
    """
    return _same_form(state, drafter.update(params, state, verified), "update")


def _same_form(before: Any, after: Any, function: str) -> Any:
    old, new = jax.tree.map(_form, before), jax.tree.map(_form, after)
    structures: list[Any] = [jax.tree.structure(before), jax.tree.structure(after)]  # its stubs have no ==
    if structures[0] != structures[1] or old != new:
        raise ValueError(
            f"the drafter's {function} must return a state of the same form, got {new} for {old}. Keep it."
        )
    return after


def _form(leaf: Any) -> str:
    return f"{jnp.asarray(leaf).dtype}{list(jnp.shape(leaf))}"
