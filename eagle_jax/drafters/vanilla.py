"""Drafts nothing: plain decoding, through the same cycle as every method."""

from __future__ import annotations

import functools
from typing import Any

from jaxtyping import Array

from eagle_jax.core import Drafter, DraftTree, Params, RowRandomness, Sampling, Verified, empty_tree


@functools.cache
def vanilla_drafter() -> Drafter:
    """Builds the drafter of empty trees: a cycle is one target pass over one token."""

    def init(params: Params, batch: int, slots: int) -> tuple[()]:
        return ()

    def draft(
        params: Params, state: Any, root: Array, randomness: RowRandomness, sampling: Sampling
    ) -> tuple[DraftTree, Any]:
        return empty_tree(root), state

    def update(params: Params, state: Any, verified: Verified) -> Any:
        return state

    return Drafter(init, draft, update, taps=(), depth=0, num_nodes=0, rewind=lambda state, length: state)
