"""Tiny random targets and heads for the tests of the engine. Their weights are scaled up so that the argmax varies."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import api
from eagle_jax.api import DraftHead, Target
from eagle_jax.config import DecoderConfig, HeadConfig, TreeConfig
from eagle_jax.models.decoder import init_params
from eagle_jax.models.heads import init_head_params
from eagle_jax.request import Request


@functools.cache
def tiny_target(vocab: int = 12, layers: int = 2, seed: int = 0, sharpness: float = 6.0) -> Target:
    """A random target; with few tokens in the vocabulary a random head is right often enough to test acceptance."""
    config = DecoderConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_layers=layers, num_heads=4, num_kv_heads=2,
        head_dim=6, max_position=512,
    )  # fmt: skip
    return Target.from_params(config, _sharpen(init_params(config, jax.random.key(seed)), sharpness))


@functools.cache
def tiny_head(
    kind: str, tree: TreeConfig, vocab: int = 12, draft_vocab: int | None = None, layers: int = 2, seed: int = 1
) -> DraftHead:
    """A random head of the given kind for `tiny_target(vocab, layers)`; EAGLE-3 may have a smaller draft vocabulary."""
    target = tiny_target(vocab, layers)
    layer = dataclasses.replace(target.config, num_layers=1)
    reduced = draft_vocab if kind == "eagle3" and draft_vocab else vocab
    taps = (0, 1, layers) if kind == "eagle3" else (layers,)
    config = HeadConfig(kind, layer, reduced, target.config.hidden_size, taps, fc_bias=kind == "eagle1")
    params = init_head_params(config, jax.random.key(seed))
    params["head"] = _sharpen(params["head"], 4.0)
    if kind == "eagle3":
        kept = np.sort(np.random.default_rng(seed).choice(vocab, reduced, replace=False))
        params["d2t"] = jnp.asarray(kept - np.arange(reduced), jnp.int32)
    return DraftHead.from_params(config, params, target, tree)


def _sharpen(params: dict, factor: float) -> dict:
    return jax.tree.map(lambda leaf: leaf * factor if leaf.ndim == 2 else leaf, params)


def random_prompts(lengths: list[int], vocab: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def prepared(head: DraftHead, prompts: list[list[int]], temperature: float = 0.0, max_new_tokens: int = 16) -> Request:
    """A request to `tiny_target()`, checked and padded."""
    return api._prepare(tiny_target(), head, prompts, max_new_tokens, api.make_sampling(temperature), None, 3)
