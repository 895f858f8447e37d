"""Binds drafting methods, with parameters and draft tree, to a target."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import field
from typing import Any, Self

import jax
from jax.sharding import Mesh

from eagle_jax.config import ConfigError, HeadConfig, MedusaConfig, TreeConfig
from eagle_jax.core.types import Drafter, Params, TargetFn
from eagle_jax.drafters import lookahead as _lookahead
from eagle_jax.drafters import prompt_lookup as _prompt_lookup
from eagle_jax.drafters.eagle import eagle
from eagle_jax.drafters.medusa import medusa
from eagle_jax.drafters.small_model import small_model
from eagle_jax.parallel.mesh import shard_drafter
from eagle_jax.runtime.target import Target, check_target, spread

DEFAULT_CHAIN = TreeConfig.chain(5)


@dataclasses.dataclass(frozen=True, eq=False)
class BoundDrafter:
    """A drafting method with its parameters, bound to a target; an argument of `generate`.

    Attributes:
      drafter: the method's functions. params: its parameters, `params["drafter"]` of the engine.
      target_fn: functions of the target. name: for messages.
      mesh: the target's, of parameters and caches.
      plain: `drafter` without the shardings of the mesh.
    """

    drafter: Drafter = field(repr=False)
    params: Params = field(repr=False)
    target_fn: TargetFn = field(repr=False)
    name: str
    mesh: Mesh | None
    plain: Drafter = field(repr=False)

    @classmethod
    def of(
        cls, drafter: Drafter, target: Target, params: Params | None = None, name: str = "drafter", **own: Any
    ) -> Self:
        """Binds a method to `target` and spreads its parameters over the target's mesh; `own` are a subclass's fields.

        Raises:
          ValueError: `drafter` or `target` has another type. ConfigError: no sharding rule matches a parameter.
        """
        check_target(target)
        if not isinstance(drafter, Drafter):
            raise ValueError(f"drafter must be an eagle_jax.Drafter, got a {type(drafter).__name__}.")
        mesh = target.mesh
        return cls(_on_mesh(drafter, mesh), spread(params or {}, mesh), target.fn, name, mesh, drafter, **own)

    def on(self, target: Target) -> BoundDrafter:
        """Binds the same method and parameters to another copy of the target, for example on another mesh."""
        return BoundDrafter.of(self.plain, target, self.params, self.name)

    def with_tree(self, tree: TreeConfig) -> Self:
        """Raises a ConfigError: only a `TreeDrafter` has a tree."""
        raise ConfigError(f"drafter must draft trees, got {self.name}, which has none. Bind it anew with new settings.")


@dataclasses.dataclass(frozen=True, eq=False)
class TreeDrafter(BoundDrafter):
    """A method that drafts a tree of a given shape.

    Attributes:
      tree: shape of the drafts and acceptance rule.
      method: `(tree) -> Drafter`, the functions that draft a tree.
      deepest: most levels it can draft; None is unlimited.
    """

    tree: TreeConfig = field(kw_only=True)
    method: Callable[[TreeConfig], Drafter] = field(kw_only=True, repr=False)
    deepest: int | None = field(default=None, kw_only=True, repr=False)

    @classmethod
    def fill(
        cls, method: Callable[[TreeConfig], Drafter], tree: TreeConfig, target: Target, params: Params, name: str,
        **own: Any,
    ) -> Self:  # fmt: skip
        """Binds a method with a first tree to `target`; the arguments are fields, and further ones of a subclass."""
        check_target(target)
        return cls.of(_draft_tree(method, tree), target, params, name, tree=tree, method=method, **own)

    def with_tree(self, tree: TreeConfig) -> Self:
        """Returns the drafter with another tree and the same weights, without a copy.

        Raises:
          ConfigError: the method cannot draft `tree`.
        """
        plain = _draft_tree(self.method, tree)
        return dataclasses.replace(self, tree=tree, drafter=_on_mesh(plain, self.mesh), plain=plain)


@dataclasses.dataclass(frozen=True, eq=False)
class DraftHead(TreeDrafter):
    """An EAGLE head bound to its target; `params` are `{"head": ..., "d2t": ...}`.

    Attributes:
      config: the head.
    """

    config: HeadConfig = field(kw_only=True, repr=False)

    @classmethod
    def from_params(
        cls, config: HeadConfig, params: Params, target: Target, tree: TreeConfig | None = None, name: str = "head"
    ) -> DraftHead:
        """Binds parameters in memory to `target`, and spreads them over its mesh.

        `tree` None is the papers' tree for 7B and 8B models: 59 nodes, `top_k` 10, 6 levels (EAGLE-2) or 8 (EAGLE-3).
        """
        dtype = _dtype(params["head"])
        tree = tree or TreeConfig(depth=8 if config.kind == "eagle3" else 6)
        return cls.fill(lambda tree: eagle(config, tree, target.fn, dtype), tree, target, params, name, config=config)

    def on(self, target: Target) -> DraftHead:
        """Binds the same head to another copy of the target."""
        return DraftHead.from_params(self.config, self.params, target, self.tree, self.name)


@dataclasses.dataclass(frozen=True, eq=False)
class Medusa(TreeDrafter):
    """Medusa or Hydra heads bound to their target; `params` are `{"heads": ...}`.

    Attributes:
      config: the heads.
    """

    config: MedusaConfig = field(kw_only=True, repr=False)

    @classmethod
    def from_params(
        cls, config: MedusaConfig, params: Params, target: Target, tree: TreeConfig, name: str = "heads"
    ) -> Medusa:
        """Binds parameters in memory to `target`, and spreads them over its mesh.

        Raises:
          ConfigError: the heads have another width or vocabulary, or cannot draft `tree`.
        """
        check_target(target)
        for field_name in ("hidden_size", "vocab_size"):
            value, expected = getattr(config, field_name), getattr(target.config, field_name)
            if value != expected:
                raise ConfigError(
                    f"{name}: {field_name} must be the target's, {expected}, got {value}. Load heads that were trained "
                    "for this target, or the target that they were trained for."
                )
        layers, dtype = target.config.num_layers, _dtype(params["heads"])
        return cls.fill(
            lambda tree: medusa(config, tree, target.fn, layers, dtype), tree, target, params, name,
            config=config, deepest=config.num_heads,
        )  # fmt: skip

    def on(self, target: Target) -> Medusa:
        """Binds the same heads to another copy of the target."""
        return Medusa.from_params(self.config, self.params, target, self.tree, self.name)


@dataclasses.dataclass(frozen=True, eq=False)
class SmallModel(TreeDrafter):
    """A small language model that drafts for a larger one with the same tokenizer; `params` are `{"model": ...}`.

    Attributes:
      model: the small model.
    """

    model: Target = field(kw_only=True, repr=False)

    @classmethod
    def bind(cls, target: Target, model: Target, tree: TreeConfig = DEFAULT_CHAIN) -> SmallModel:
        """Binds a model in memory to `target`, and spreads it over the target's mesh. Tokenizers are not compared.

        Warns:
          UserWarning: the model has fewer positions than the target; beyond them its drafts are poor.

        Raises:
          ValueError: `target` or `model` is not a `Target`. ConfigError: the model cannot draft `tree`.
        """
        check_target(target)
        check_target(model, "model")
        if model.mesh != target.mesh:
            model = Target.from_params(model.config, model.params, model.name, target.mesh)
        least, most = model.config.max_position, target.config.max_position
        if least < most:
            warnings.warn(
                f"draft model {model.name!r} has {least} positions and the target {most}: beyond position {least} its "
                "drafts are poor, and decoding may be slower than without it",
                stacklevel=2,
            )
        sizes = target.config.vocab_size, model.config.vocab_size
        return cls.fill(
            lambda tree: small_model(model.fn, tree, *sizes), tree, target, {"model": model.params}, model.name,
            model=model,
        )  # fmt: skip

    def on(self, target: Target) -> SmallModel:
        """Binds the same model to another copy of the target."""
        return SmallModel.bind(target, self.model, self.tree)


def shard(target: Target, drafter: BoundDrafter | None, mesh: Mesh) -> tuple[Target, BoundDrafter | None]:
    """Spreads target and drafter over a ("data", "fsdp", "tensor") mesh; `generate` then runs on all its devices.

    "tensor" splits weights and caches and must divide the key-value heads; "data" splits the rows of a batch. For a
    model that does not fit on one device use `load_target(path, mesh=mesh)` instead.

    Raises:
      ConfigError: the mesh does not divide a parameter or the heads.
    """
    resharded = Target.from_params(target.config, target.params, target.name, mesh)
    target = dataclasses.replace(resharded, source=target.source)
    return target, None if drafter is None else drafter.on(target)


def prompt_lookup(
    target: Target, *, ngram: int = 3, length: int = 10, latest: bool = False, shortest: int = 1
) -> BoundDrafter:
    """Drafts the tokens that followed an earlier occurrence of the last n-gram (prompt lookup). Needs no weights.

    Args:
      ngram: longest n-gram to look up; without a match, shorter ones down to `shortest` are tried.
      length: most tokens to draft. latest: use the last of several matches, not the first.

    Raises:
      ConfigError: a number is below 1, or `shortest` exceeds `ngram`. ValueError: `target` is not a `Target`.
    """
    drafter = _prompt_lookup.prompt_lookup(ngram, length, latest, shortest)
    return BoundDrafter.of(drafter, target, name="prompt lookup")


def lookahead(target: Target, *, ngram: int = 5, window: int = 7, guesses: int = 7, pool: int = 512) -> BoundDrafter:
    """Drafts the target's own n-grams, collected in a Jacobi window (lookahead, arXiv:2402.02057). Needs no weights.

    Args:
      ngram: N, tokens of an n-gram. window: W, positions ahead. guesses: G, n-grams verified per pass; a target pass
        reads (N - 1) * (W + G) tokens. pool: latest n-grams to keep per prompt.

    Raises:
      ConfigError: a number is too small. ValueError: `target` is not a `Target`.
    """
    drafter = _lookahead.lookahead(ngram, window, guesses, pool)
    return BoundDrafter.of(drafter, target, name="lookahead")


def _draft_tree(method: Callable[[TreeConfig], Drafter], tree: TreeConfig) -> Drafter:
    if not isinstance(tree, TreeConfig):
        raise ConfigError(f"tree must be an eagle_jax.TreeConfig, such as TreeConfig.chain(4), got {tree!r}.")
    return method(tree)


def _dtype(params: Params) -> str:
    return str(jax.tree.leaves(params)[0].dtype)


def _on_mesh(drafter: Drafter, mesh: Mesh | None) -> Drafter:
    return drafter if mesh is None else shard_drafter(drafter, mesh)
