"""Makes tiny random targets and heads, with weights scaled up so that the argmax varies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax.config import DecoderConfig, HeadConfig, MedusaConfig, TreeConfig
from eagle_jax.core import Acceptance, StepInfo
from eagle_jax.core.costs import Prices
from eagle_jax.models import init_head_params, init_medusa_params, init_params
from eagle_jax.runtime.drafters import BoundDrafter, DraftHead, Medusa, SmallModel
from eagle_jax.runtime.target import Target


@functools.cache
def tiny_target(
    vocab: int = 12, layers: int = 2, seed: int = 0, sharpness: float = 6.0, windows: tuple[int, ...] = ()
) -> Target:
    """A random target; with few tokens in the vocabulary a random head is right often enough to test acceptance."""
    config = DecoderConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_layers=layers, num_heads=4, num_kv_heads=2,
        head_dim=6, max_position=512, windows=windows,
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


def near_model(target: Target, tree: TreeConfig, distance: float = 0.03) -> SmallModel:
    """A draft model that often agrees with a tiny target: the target itself with noise on its weights."""
    near = Target.from_params(target.config, _noisy(target.params, distance, 4), "near")
    return SmallModel.from_model(target, near, tree)


# Chain, static, dynamic; K 1..10, nodes 1..128; the ablations of EAGLE-2.
TREES = {
    "one": TreeConfig(depth=1, top_k=1, num_nodes=1),
    "chain4": TreeConfig.chain(4),
    "static": TreeConfig.static([-1, -1, -1, 0, 0, 1, 3, 3, 6]),
    "k2n6": TreeConfig(depth=3, top_k=2, num_nodes=6),
    "k3n12": TreeConfig(depth=4, top_k=3, num_nodes=12),
    "k10n59": TreeConfig(depth=6, top_k=10, num_nodes=59),
    "k8n128": TreeConfig(depth=3, top_k=8, num_nodes=128),
    "confidence": TreeConfig(depth=4, top_k=3, num_nodes=12, rank_by="confidence"),
    "no-rerank": TreeConfig(depth=4, top_k=3, num_nodes=12, rerank=False),
    "law": TreeConfig(depth=3, top_k=4, num_nodes=16, sampled_ranking="law"),
    "untempered": TreeConfig(depth=3, top_k=4, num_nodes=16, sampled_ranking="untempered"),
    "top-p": TreeConfig(depth=3, top_k=4, num_nodes=16, top_p=0.6),
    "static-top-p": TreeConfig.static([-1, -1, -1, 0, 0, 1, 3, 3, 6], top_p=0.6),
}
SAMPLED = {
    "rejection": TreeConfig.chain(3, "rejection"),
    "block": TreeConfig.chain(3, "block"),
    "tree-rejection": TreeConfig.static([-1, -1, -1, 0, 0, 1, 3, 3, 6], "rejection"),
    "traversal": TreeConfig.static([-1, -1, -1, 0, 0, 1, 3, 3, 6], "traversal"),
}


def _head(kind: str, tree: TreeConfig) -> Callable[[Target], BoundDrafter]:
    seed = 9 if kind == "eagle3" else 1  # of the random heads, one whose longer paths the random target accepts

    def bind(target: Target) -> BoundDrafter:
        vocab = target.config.vocab_size
        return tiny_head(kind, tree, vocab, min(10, vocab), seed=seed).rebind(target)

    return bind


@functools.cache
def tiny_medusa(kind: str, tree: TreeConfig, vocab: int = 12) -> Medusa:
    """Heads for `tiny_target(vocab)` that begin with its lm_head, with noise; "hydra++" has the extra layer."""
    target = tiny_target(vocab)
    prefix = target.config.one_layer() if kind == "hydra++" else None
    form = "medusa" if kind == "medusa" else "hydra"
    config = MedusaConfig(form, 16, vocab, num_heads=4, num_layers=2, prefix=prefix)
    params = _noisy(init_medusa_params(config, jax.random.key(8)), 0.1, 9)
    for head in range(config.num_heads):
        params["heads"][f"heads_{head}_lm_head"]["weight"] += target.params["lm_head"]["weight"]
        if kind != "medusa":  # the state goes through as it is
            wide = params["heads"][f"heads_{head}_blocks_0"]["res_connection"]
            wide["weight"] = wide["weight"].at[:, :16].add(jnp.eye(16))
    return Medusa.from_params(config, params, target, tree)


def _medusa(kind: str, tree: TreeConfig) -> Callable[[Target], BoundDrafter]:
    return lambda target: tiny_medusa(kind, tree, target.config.vocab_size).rebind(target)


def _with_lookup(name: str, **settings: int) -> Callable[[Target], BoundDrafter]:
    return lambda target: DRAFTERS[name](target).with_lookup(eagle_jax.prompt_lookup(target, **settings))


DRAFTERS: dict[str, Callable[[Target], BoundDrafter]] = {
    **{f"{kind}-{name}": _head(kind, tree) for kind in ("eagle1", "eagle3") for name, tree in TREES.items()},
    **{f"eagle3-{name}": _head("eagle3", tree) for name, tree in SAMPLED.items()},
    **{f"eagle1-{name}": _head("eagle1", SAMPLED[name]) for name in ("block", "tree-rejection", "traversal")},
    "small-chain": functools.partial(near_model, tree=TreeConfig.chain(4)),
    "small-dynamic": functools.partial(near_model, tree=TREES["k3n12"]),
    "small-static": functools.partial(near_model, tree=TREES["static"]),
    **{f"small-{name}": functools.partial(near_model, tree=tree) for name, tree in SAMPLED.items()},
    **{
        f"{kind}-{name}": _medusa(kind, {**TREES, **SAMPLED}[name])
        for kind in ("medusa", "hydra", "hydra++")
        for name in ("static", "k3n12", "chain4", "traversal")
    },
    "medusa-block": _medusa("medusa", SAMPLED["block"]),
    "hydra++-rejection": _medusa("hydra++", SAMPLED["rejection"]),
    "hydra-top-p": _medusa("hydra", TREES["top-p"]),
    "small-top-p": functools.partial(near_model, tree=TREES["top-p"]),
    "lookup": functools.partial(eagle_jax.prompt_lookup, ngram=2, length=5),
    "lookup-latest": functools.partial(eagle_jax.prompt_lookup, latest=True),
    "lookup-history": lambda target: eagle_jax.prompt_lookup(
        target, length=5, history=random_prompts([90, 1, 200], target.config.vocab_size, seed=3)
    ),
    "lookahead": functools.partial(eagle_jax.lookahead, ngram=3, window=4, guesses=3),
    "lookahead-of-two": functools.partial(eagle_jax.lookahead, ngram=2, window=3, guesses=2),
    "lookahead-default": eagle_jax.lookahead,
    "combined-dynamic": _with_lookup("eagle3-k3n12", ngram=2, length=6),
    "combined-static": _with_lookup("eagle1-static", length=2),
    "combined-medusa": _with_lookup("medusa-static", length=5),
    "combined-small": _with_lookup("small-dynamic", length=5),
    "combined-lookahead": _with_lookup("lookahead", length=5),
}
"""Every method, as `name -> (target) -> drafter`, for tiny targets: add a new method here."""
DRAWN = {name for name in DRAFTERS if name.partition("-")[2] in SAMPLED}
"""Drafters whose text at temperature > 0 depends on the drafts; its law does not."""


def _noisy(params: dict, scale: float, seed: int) -> dict:
    leaves, form = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [leaf + scale * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(form, noisy)


def _sharpen(params: dict, factor: float) -> dict:
    return jax.tree.map(lambda leaf: leaf * factor if leaf.ndim == 2 else leaf, params)


def random_prompts(lengths: list[int], vocab: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def cycle_result(emitted):
    """The result of a cycle that emitted so many tokens in every row."""
    emitted = jnp.array(emitted)
    return StepInfo(None, Acceptance(None, jnp.maximum(emitted - 1, 0), None), None, emitted)


def prices(passes: dict[int, float], level: float = 0.0, token: float = 0.0, draft: float = 0.0) -> Prices:
    """Prices of trees by their rows."""
    return Prices(tuple(passes), np.array([*passes.values()], np.float32), level, token, draft)
