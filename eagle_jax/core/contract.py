"""What a drafter's functions give back, held to `types.Drafter` while the program is traced.

A method of a user's own is three functions; what is wrong with one is said here in a sentence, before anything is
compiled, and not by a scan or a gather far from it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.core.types import Chance, Drafter, DraftTree, GenerateState, Params, Sampling, Verified


def drafted(
    drafter: Drafter, params: Params, state: GenerateState, chance: Chance, sampling: Sampling
) -> tuple[DraftTree, Any]:
    """The tree of `drafter.draft` and the drafter's state behind it.

    Raises:
      ValueError: no tree and state, a tree of another size than `num_nodes` says, a state of another form.
    """
    found = drafter.draft(params, state.drafter, state.root, chance, sampling)
    if not (type(found) is tuple and len(found) == 2 and isinstance(found[0], DraftTree)):
        what = type(found).__name__
        if type(found) is tuple:
            what += f" of {', '.join(type(part).__name__ for part in found)}"
        raise ValueError(f"the drafter's draft returned a {what}: return (DraftTree, state)")
    tree, after = found
    shape = (state.root.shape[0], drafter.num_nodes + 1)
    for name in ("tokens", "parents"):
        rows = getattr(tree, name)
        if rows.shape != shape or not jnp.issubdtype(rows.dtype, jnp.integer):
            raise ValueError(
                f"the drafter's draft returned {name} {_form(rows)}: of batch {shape[0]} and "
                f"num_nodes={drafter.num_nodes} it is int32{list(shape)}, the root in front"
            )
    return tree, _as_before(state.drafter, after, "draft")


def told(drafter: Drafter, params: Params, state: Any, verified: Verified) -> Any:
    """The drafter's state when `drafter.update` has heard what was confirmed.

    Raises:
      ValueError: a state of another form than the one before.
    """
    return _as_before(state, drafter.update(params, state, verified), "update")


def _as_before(before: Any, after: Any, function: str) -> Any:
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    structures: list[Any] = [jax.tree.structure(before), jax.tree.structure(after)]  # PyTreeDef has no == in its stubs
    if structures[0] != structures[1] or list(map(_form, old)) != list(map(_form, new)):
        was, now = jax.tree.map(_form, before), jax.tree.map(_form, after)
        raise ValueError(
            f"the drafter's {function} made a state of another form than it was given: {now} of {was}; a state keeps "
            "its structure, shapes and dtypes"
        )
    return after


def _form(leaf: Any) -> str:
    return f"{jnp.asarray(leaf).dtype}{list(jnp.shape(leaf))}"
