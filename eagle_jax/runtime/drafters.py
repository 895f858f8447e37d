"""Drafters bound to a target: a method, its parameters, and the tree that it fills."""

from __future__ import annotations

import abc
import dataclasses
import warnings
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
    """A drafting method with its parameters, bound to a target: what `generate` takes.

    Attributes:
      drafter: the three pure functions. params: what they read as `params["drafter"]`.
      target_fn: of the target it was bound to. name: what messages call it.
      mesh: the target's; parameters and caches are spread over it.
      plain: the functions as they were before they were held to the mesh.
      settings: of a method without a tree, the call that binds it with others; None if it is not known.
    """

    drafter: Drafter = field(repr=False)
    params: Params = field(repr=False)
    target_fn: TargetFn = field(repr=False)
    name: str
    mesh: Mesh | None
    plain: Drafter = field(repr=False)
    settings: str | None = field(default=None, kw_only=True, repr=False)

    @classmethod
    def of(
        cls, drafter: Drafter, target: Target, params: Params | None = None, name: str = "drafter", **own: Any
    ) -> Self:
        """Binds a method to `target` and spreads its parameters over the target's mesh.

        Args:
          own: what a subclass keeps besides.

        Raises:
          ValueError: `drafter` or `target` is something else. ConfigError: a parameter that no sharding rule knows.
        """
        check_target(target)
        if not isinstance(drafter, Drafter):
            raise ValueError(f"drafter is a {type(drafter).__name__}, expected an eagle_jax.Drafter: three functions")
        mesh = target.mesh
        return cls(_held(drafter, mesh), spread(params or {}, mesh), target.fn, name, mesh, drafter, **own)

    def on(self, target: Target) -> BoundDrafter:
        """The same method and parameters for another copy of the target, on another mesh for example."""
        return BoundDrafter.of(self.plain, target, self.params, self.name, settings=self.settings)

    def with_tree(self, tree: TreeConfig) -> Self:
        """Another tree, of methods that fill the one they are asked for (`TreeDrafter`); others have none.

        Raises:
          ConfigError: there is no tree, naming what there is instead.
        """
        again = self.settings or "BoundDrafter.of and another Drafter"
        raise ConfigError(f"{self.name} has no tree that could be another: bind it anew with {again}")


@dataclasses.dataclass(frozen=True, eq=False)
class TreeDrafter(BoundDrafter, abc.ABC):
    """A method that fills the tree it is asked for.

    Attributes:
      tree: shape of its drafts, and the rule by which they are accepted.
    """

    tree: TreeConfig = field(kw_only=True)

    @property
    def deepest(self) -> int | None:
        """Most levels it can draft; None is as many as wanted."""
        return None

    def with_tree(self, tree: TreeConfig) -> Self:
        """The same weights with another tree; nothing is copied.

        Raises:
          ConfigError: `tree` is none, or cannot be filled.
        """
        _check_tree(tree)
        plain = self._filling(tree)
        return dataclasses.replace(self, tree=tree, drafter=_held(plain, self.mesh), plain=plain)

    @abc.abstractmethod
    def _filling(self, tree: TreeConfig) -> Drafter:
        """The three functions that fill `tree`, not held to a mesh."""


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
        """Binds parameters that are already in memory to `target`, and spreads them over its mesh.

        `tree` None is the papers' own for 7B and 8B models: 59 nodes, `top_k` 10, in 6 levels (EAGLE-2) or 8 (EAGLE-3).
        """
        tree = tree or TreeConfig(depth=8 if config.kind == "eagle3" else 6)
        return cls.of(_eagle(config, tree, target.fn, params), target, params, name, config=config, tree=tree)

    def _filling(self, tree: TreeConfig) -> Drafter:
        return _eagle(self.config, tree, self.target_fn, self.params)

    def on(self, target: Target) -> DraftHead:
        """The same head for another copy of the target."""
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
        """Binds parameters that are already in memory to `target`, and spreads them over its mesh.

        Raises:
          ConfigError: heads of another width or vocabulary, or a tree that they cannot fill.
        """
        check_target(target)
        _check_tree(tree)
        for field_name in ("hidden_size", "vocab_size"):
            own, wanted = getattr(config, field_name), getattr(target.config, field_name)
            if own != wanted:
                raise ConfigError(
                    f"{name}: {field_name}={own}, and the target's is {wanted}: heads of another model; take those "
                    "that were trained for this target, or load the target they were trained for"
                )
        drafter = _medusa(config, tree, target.fn, target.config.num_layers, params)
        return cls.of(drafter, target, params, name, config=config, tree=tree)

    @property
    def deepest(self) -> int:
        """As many levels as there are heads."""
        return self.config.num_heads

    def _filling(self, tree: TreeConfig) -> Drafter:
        return _medusa(self.config, tree, self.target_fn, self.plain.taps[0], self.params)

    def on(self, target: Target) -> Medusa:
        """The same heads for another copy of the target."""
        return Medusa.from_params(self.config, self.params, target, self.tree, self.name)


@dataclasses.dataclass(frozen=True, eq=False)
class SmallModel(TreeDrafter):
    """A small language model that drafts for a larger one with the same tokenizer; `params` are `{"model": ...}`.

    Attributes:
      model: the small model. vocab_size: the target's, which may be another by padding.
    """

    model: Target = field(kw_only=True, repr=False)
    vocab_size: int = field(kw_only=True, repr=False)

    @classmethod
    def bind(cls, target: Target, model: Target, tree: TreeConfig = DEFAULT_CHAIN) -> SmallModel:
        """Binds a model that is in memory to `target`, and spreads it over the target's mesh.

        Their tokenizers are the caller's affair: `eagle_jax.load_draft_model` compares them.

        Warns:
          UserWarning: the model has fewer positions than the target; the text is right there, the drafts are not.

        Raises:
          ValueError: `target` or `model` is no target. ConfigError: `tree` is none, or cannot be filled.
        """
        check_target(target)
        check_target(model, "model")
        _check_tree(tree)
        if model.mesh != target.mesh:
            model = Target.from_params(model.config, model.params, model.name, target.mesh)
        least, most = model.config.max_position, target.config.max_position
        if least < most:
            told = f"draft model {model.name!r} has {least} positions and the target {most}: behind {least} its "
            warnings.warn(told + "drafts are poor, and decoding may be slower than without it", stacklevel=2)
        vocab = target.config.vocab_size
        drafter = small_model(model.fn, tree, vocab, model.config.vocab_size)
        params = {"model": model.params}
        return cls.of(drafter, target, params, model.name, model=model, tree=tree, vocab_size=vocab)

    def _filling(self, tree: TreeConfig) -> Drafter:
        return small_model(self.model.fn, tree, self.vocab_size, self.model.config.vocab_size)

    def on(self, target: Target) -> SmallModel:
        """The same model for another copy of the target."""
        return SmallModel.bind(target, self.model, self.tree)


def shard(target: Target, drafter: BoundDrafter | None, mesh: Mesh) -> tuple[Target, BoundDrafter | None]:
    """Spreads a loaded pair over a ("data", "fsdp", "tensor") mesh; `generate` then runs on all its devices.

    "tensor" splits weights and caches (it must divide the key-value heads), "data" the rows of a batch. What does not
    fit on one device is loaded in place instead: `load_target(path, mesh=mesh)`.

    Raises:
      ConfigError: the mesh does not divide the model, naming the parameter or the heads.
    """
    spread_out = Target.from_params(target.config, target.params, target.name, mesh)
    target = dataclasses.replace(spread_out, source=target.source)
    return target, None if drafter is None else drafter.on(target)


def _check_tree(tree: TreeConfig) -> None:
    if not isinstance(tree, TreeConfig):
        raise ConfigError(f"tree={tree!r} must be an eagle_jax.TreeConfig, such as TreeConfig.chain(4)")


def _eagle(config: HeadConfig, tree: TreeConfig, fn: TargetFn, params: Params) -> Drafter:
    _check_tree(tree)
    return eagle(config, tree, fn, str(jax.tree.leaves(params["head"])[0].dtype))


def _medusa(config: MedusaConfig, tree: TreeConfig, fn: TargetFn, tap: int, params: Params) -> Drafter:
    return medusa(config, tree, fn, tap, str(jax.tree.leaves(params["heads"])[0].dtype))


def _held(drafter: Drafter, mesh: Mesh | None) -> Drafter:
    return drafter if mesh is None else shard_drafter(drafter, mesh)


def prompt_lookup(
    target: Target, *, ngram: int = 3, length: int = 10, latest: bool = False, shortest: int = 1
) -> BoundDrafter:
    """Prompt lookup decoding: drafts what followed the last tokens where they stood before. Needs no weights.

    Args:
      ngram: most tokens that are looked up, one fewer where they stood nowhere before, down to `shortest`.
      length: most tokens drafted. latest: of several places take the latest.

    Raises:
      ConfigError: a number below 1, or `shortest` above `ngram`. ValueError: `target` is none.
    """
    drafter = _prompt_lookup.prompt_lookup(ngram, length, latest, shortest)
    settings = "eagle_jax.prompt_lookup(target, length=, ngram=, latest=, shortest=)"
    return BoundDrafter.of(drafter, target, name="prompt lookup", settings=settings)


def lookahead(target: Target, *, ngram: int = 5, window: int = 7, guesses: int = 7, pool: int = 512) -> BoundDrafter:
    """Lookahead decoding (arXiv:2402.02057): the target's own n-grams from a Jacobi window. Needs no weights.

    Args:
      ngram: N, tokens of an n-gram. window: W, positions ahead. guesses: G, n-grams verified per pass. A target pass
        has (N - 1) * (W + G) rows. pool: n-grams that are kept per prompt, the latest ones.

    Raises:
      ConfigError: a number that is too small. ValueError: `target` is none.
    """
    drafter = _lookahead.lookahead(ngram, window, guesses, pool)
    settings = "eagle_jax.lookahead(target, ngram=, window=, guesses=, pool=)"
    return BoundDrafter.of(drafter, target, name="lookahead", settings=settings)
