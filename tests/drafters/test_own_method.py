"""Checks that a user's own faulty `Drafter` gets one error, before anything is compiled."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

import eagle_jax
from eagle_jax import Drafter, DraftTree
from tests.models import tiny_target

LENGTH = 3


def drafts(batch: int, length: int = LENGTH) -> DraftTree:
    shape = (batch, length + 1)
    parents = jnp.broadcast_to(jnp.arange(-1, length, dtype=jnp.int32), shape)
    return DraftTree(jnp.zeros(shape, jnp.int32), parents, jnp.zeros(shape))


def method(**own: Any) -> Drafter:
    """Drafts zeros, and counts what was confirmed."""
    functions: dict[str, Any] = {
        "init": lambda params, batch, slots: jnp.zeros((batch,), jnp.int32),
        "draft": lambda params, state, root, chance, sampling: (drafts(root.shape[0]), state),
        "update": lambda params, state, verified: state + verified.count,
        "taps": (), "depth": LENGTH, "num_nodes": LENGTH,
    }  # fmt: skip
    return Drafter(**functions | own)


def drafted(tree: Any) -> dict[str, Any]:
    return {"draft": lambda params, state, root, chance, sampling: tree(root.shape[0], state)}


def updated(state: Any) -> dict[str, Any]:
    return {"update": lambda params, before, verified: state(before)}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"taps": (0, 9)}, r"the taps of drafter 'own' must be hidden states 0 to \d, got \[9\]"),
        (drafted(lambda batch, state: (state, state)), r"draft must return \(DraftTree, state\), got \w+, \w+"),
        (
            drafted(lambda batch, state: (drafts(batch, 2), state)),
            r"tokens .*must be integers of shape \[2, 4\] .*\[2, 3\]",
        ),
        (
            drafted(lambda batch, state: (drafts(batch)._replace(parents=jnp.zeros((2, 4))), state)),
            r"parents .*must be integers of shape \[2, 4\] .*, got float32\[2, 4\]",
        ),
        (
            drafted(lambda batch, state: (drafts(batch), state[:1])),
            r"draft must return a state like int32\[2\], got int32\[1\]",
        ),
        (updated(lambda state: state + 0.5), r"update must return .* like int32\[2\], got float32\[2\]"),
        (updated(lambda state: None), r"update must return .* like int32\[2\], got None"),
    ],
)
def test_a_method_that_breaks_the_interface_raises(own, message):
    target = tiny_target()
    bound = eagle_jax.BoundDrafter.bind(method(**own), target, name="own")
    with pytest.raises(ValueError, match=message):
        eagle_jax.generate(target, bound, [[1, 2, 3], [4]], max_new_tokens=4)
