"""Binds drafting methods, with parameters and draft tree, to a target."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Self

from jax.sharding import Mesh

from eagle_jax.config import ConfigError, HeadConfig, MedusaConfig, TreeConfig
from eagle_jax.core import Drafter, Params
from eagle_jax.drafters import (
    combined_drafter,
    eagle_drafter,
    lookahead_drafter,
    medusa_drafter,
    prompt_lookup_drafter,
    small_model_drafter,
)
from eagle_jax.models.projections import split_projections
from eagle_jax.models.quantised import activation_dtype
from eagle_jax.parallel import shard_drafter
from eagle_jax.runtime.history import packed_history
from eagle_jax.runtime.target import Target, check_target, on_mesh, spread

DEFAULT_CHAIN = TreeConfig.chain(5)


@dataclasses.dataclass(frozen=True, eq=False)
class BoundDrafter:
    """A drafting method with its parameters, bound to a target; an argument of `generate`.

    Attributes:
      drafter: the method's functions, with shardings for the target's mesh.
      plain: the same functions without shardings.
      params: parameters of the method, `params["drafter"]` of the engine.
      target: as given.
      name: for messages.
    """

    drafter: Drafter = field(repr=False)
    plain: Drafter = field(repr=False)
    params: Params = field(repr=False)
    target: Target
    name: str

    @classmethod
    def bind(
        cls, drafter: Drafter, target: Target, params: Params | None = None, name: str = "drafter", **own: Any
    ) -> Self:
        """Binds a method to `target`, on the target's mesh; `own` are a subclass's fields.

        Raises:
          ValueError: `drafter` or `target` has another type. ConfigError: no sharding rule matches a parameter.
        """
        check_target(target)
        if not isinstance(drafter, Drafter):
            raise ValueError(
                f"drafter must be an eagle_jax.Drafter, got a {type(drafter).__name__}. Pass the functions of a method."
            )
        sharded = drafter if target.mesh is None else shard_drafter(drafter, target.mesh)
        return cls(sharded, drafter, spread(params or {}, target.mesh), target, name, **own)

    def rebind(self, target: Target) -> BoundDrafter:
        """Binds the same method and parameters to another copy of the target, for example on another mesh."""
        return BoundDrafter.bind(self.plain, target, self.params, self.name)

    def with_tree(self, tree: TreeConfig) -> Self:
        """Rejects the tree: only a `TreeDrafter` has one.

        Raises:
          ConfigError: always.
        """
        raise ConfigError(f"drafter must have a tree, got {self.name}. Pass the settings to the method itself.")

    def with_lookup(self, lookup: PromptLookup) -> WithLookup:
        """Returns the drafter that adds the chain of `lookup` to each of its trees, without a copy of the weights.

        The target verifies `num_nodes` of both together: a chain costs its length in rows of the pass.

        Raises:
          ConfigError: the drafter samples its drafts (another `TreeConfig.verification` than "deterministic").
          ValueError: `lookup` is not a `PromptLookup` of the same target.
        """
        return WithLookup.combine(self, lookup)


@dataclasses.dataclass(frozen=True, eq=False)
class TreeDrafter(BoundDrafter):
    """A method that drafts a tree of a given shape.

    Attributes:
      tree: shape of the drafts and acceptance rule.
      method: `(target, tree) -> Drafter`, the functions that draft a tree.
      config: of the draft model.
      max_depth: most levels it can draft; None is unlimited.
    """

    tree: TreeConfig = field(kw_only=True)
    method: Callable[[Target, TreeConfig], Drafter] = field(kw_only=True, repr=False)
    config: Any = field(kw_only=True, repr=False)
    max_depth: int | None = field(default=None, kw_only=True, repr=False)

    @classmethod
    def bind_tree(
        cls, method: Callable[[Target, TreeConfig], Drafter], tree: TreeConfig, target: Target, params: Params,
        name: str, config: Any, max_depth: int | None = None,
    ) -> Self:  # fmt: skip
        """Binds a method with a first tree to `target`; the arguments are fields.

        Raises:
          ValueError: `target` is not a `Target`. ConfigError: the method cannot draft `tree`.
        """
        check_target(target)
        if not isinstance(tree, TreeConfig):
            raise ConfigError(f"tree must be an eagle_jax.TreeConfig, got {tree!r}. Example: TreeConfig.chain(4).")
        own: dict[str, Any] = {"tree": tree, "method": method, "config": config, "max_depth": max_depth}
        return cls.bind(method(target, tree), target, params, name, **own)

    def rebind(self, target: Target) -> Self:
        """Binds the same method, tree and parameters to another copy of the target."""
        return self.bind_tree(self.method, self.tree, target, self.params, self.name, self.config, self.max_depth)

    def with_tree(self, tree: TreeConfig) -> Self:
        """Returns the drafter with another tree and the same weights, without a copy.

        Raises:
          ConfigError: the method cannot draft `tree`.
        """
        return self.bind_tree(self.method, tree, self.target, self.params, self.name, self.config, self.max_depth)


class DraftHead(TreeDrafter):
    """An EAGLE head bound to its target: `params` `{"head": ..., "d2t": ...}`, `config` a `HeadConfig`."""

    @classmethod
    def from_params(
        cls, config: HeadConfig, params: Params, target: Target, tree: TreeConfig | None = None, name: str = "head"
    ) -> Self:
        """Binds parameters in memory to `target`, and spreads them over its mesh.

        `tree` None is the papers' tree for 7B and 8B models: 59 nodes, `top_k` 10, 6 levels (EAGLE-2) or 8 (EAGLE-3).

        Raises:
          ConfigError: `params` have no head, or `top_k` of the tree exceeds the draft vocabulary. ValueError: `target`
            is not a `Target`.
        """
        if not isinstance(params, Mapping) or not isinstance(params.get("head"), Mapping):
            got = sorted(params) if isinstance(params, Mapping) else type(params).__name__
            raise ConfigError(f'params must be {{"head": ..., "d2t": ...}}, got {got}. Pass params of a DraftHead.')
        dtype = activation_dtype(params["head"])
        tree = tree or TreeConfig(depth=8 if config.kind == "eagle3" else 6)
        return cls.bind_tree(
            lambda target, tree: eagle_drafter(config, tree, target.fn, dtype), tree, target, params, name, config
        )


class Medusa(TreeDrafter):
    """Medusa or Hydra heads bound to their target: `params` `{"heads": ...}`, `config` a `MedusaConfig`."""

    @classmethod
    def from_params(
        cls, config: MedusaConfig, params: Params, target: Target, tree: TreeConfig, name: str = "heads"
    ) -> Self:
        """Binds parameters in memory to `target`, and spreads them over its mesh.

        Raises:
          ConfigError: the heads have another width or vocabulary, or cannot draft `tree`.
        """
        dtype = activation_dtype(params["heads"])

        def method(target: Target, tree: TreeConfig) -> Drafter:
            for key in ("hidden_size", "vocab_size"):
                value, expected = getattr(config, key), getattr(target.config, key)
                if value != expected:
                    raise ConfigError(
                        f"{name}: {key} must be the target's, {expected}, got {value}. Load heads that were trained "
                        "for this target, or the target that they were trained for."
                    )
            return medusa_drafter(config, tree, target.fn, target.config.num_layers, dtype)

        return cls.bind_tree(method, tree, target, params, name, config, config.num_heads)


class SmallModel(TreeDrafter):
    """A small language model that drafts for a larger one with the same tokenizer.

    `params` are `{"model": ...}`, `config` is a `DecoderConfig`.
    """

    @classmethod
    def from_model(cls, target: Target, model: Target, tree: TreeConfig = DEFAULT_CHAIN) -> Self:
        """Binds a model in memory to `target`, on the target's mesh; tokenizers are not compared.

        Warns:
          UserWarning: the model has fewer positions than the target; beyond them its drafts are poor.

        Raises:
          ValueError: `target` or `model` is not a `Target`. ConfigError: the model cannot draft `tree`.
        """
        check_target(target)
        check_target(model, "model")
        least, most = model.config.max_position, target.config.max_position
        if least < most:
            warnings.warn(
                f"draft model {model.name!r} has {least} positions and the target {most}: beyond position {least} its "
                "drafts are poor, and decoding may be slower than without it",
                stacklevel=2,
            )

        def method(target: Target, tree: TreeConfig) -> Drafter:
            fn = model.fn if target.mesh == model.mesh else on_mesh(model.config, model.dtype, target.mesh)
            return small_model_drafter(fn, tree, target.config.vocab_size, model.config.vocab_size)

        return cls.bind_tree(method, tree, target, {"model": model.params}, model.name, model.config)


@dataclasses.dataclass(frozen=True, eq=False)
class PromptLookup(BoundDrafter):
    """Prompt lookup, with or without earlier samples: `params` `{}` or `{"history": History}`.

    Attributes:
      settings: ngram, length, latest, shortest.
    """

    settings: tuple[int, int, bool, int] = field(kw_only=True)

    @classmethod
    def from_settings(
        cls, target: Target, settings: tuple[int, int, bool, int], history: Sequence[Sequence[int]] | None = None
    ) -> Self:
        """Binds the method; arguments are those of `prompt_lookup`.

        Raises:
          ConfigError, ValueError: as `prompt_lookup`.
        """
        method = prompt_lookup_drafter(*settings, history=history is not None)
        check_target(target)
        params = {} if history is None else {"history": packed_history(history, target.config.vocab_size)}
        return cls.bind(method, target, params, "prompt lookup", settings=settings)

    def rebind(self, target: Target) -> Self:
        """Binds the same method and samples to another copy of the target."""
        return self.bind(self.plain, target, self.params, self.name, settings=self.settings)

    def with_history(self, samples: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]] | None = None) -> Self:
        """Returns the drafter with other earlier samples, which replace those it has.

        The tokens of all samples, and one more per sample, are padded to a power of two, at least 1024; so are the
        number of different prompts and the length of the longest. A drafter with a history of the same sizes runs the
        same compiled programs.

        Args:
          samples: token ids per sample, the latest last. Empty samples are left out.
          prompts: of every sample, complete: of equally long n-grams a row takes one in a sample of its own prompt, and
            finds the beginning of a reply, too. None treats all samples alike; begin each with the last `ngram` tokens
            of its prompt then.

        Raises:
          ValueError: a sample or prompt is not a list of token ids of the target, or their numbers differ.
        """
        history = packed_history(samples, self.target.config.vocab_size, prompts, self.settings[0], "samples")
        method = prompt_lookup_drafter(*self.settings, history=True)
        return self.bind(method, self.target, {"history": history}, self.name, settings=self.settings)


@dataclasses.dataclass(frozen=True, eq=False)
class WithLookup(BoundDrafter):
    """A drafter whose trees also hold prompt lookup's chain: `params` `{"tree": ..., "chain": ...}`.

    Attributes:
      base: the drafter of the trees.
      lookup: the drafter of the chain.
    """

    base: BoundDrafter = field(kw_only=True)
    lookup: PromptLookup = field(kw_only=True)

    @classmethod
    def combine(cls, base: BoundDrafter, lookup: PromptLookup) -> Self:
        """Binds both to their target; see `BoundDrafter.with_lookup`.

        Raises:
          ConfigError, ValueError: as `BoundDrafter.with_lookup`.
        """
        if not isinstance(lookup, PromptLookup) or lookup.target.fn is not base.target.fn:
            found = f"one for {lookup.target.name!r}" if isinstance(lookup, PromptLookup) else f"{lookup!r:.40}"
            raise ValueError(
                f"lookup must be prompt_lookup(target, ...) for the target {base.target.name!r}, got {found}. Pass one."
            )
        method = combined_drafter(base.plain, lookup.plain)
        params = {"tree": base.params, "chain": lookup.params}
        return cls.bind(method, base.target, params, f"{base.name} + {lookup.name}", base=base, lookup=lookup)

    def rebind(self, target: Target) -> Self:
        """Binds both methods to another copy of the target."""
        return self.combine(self.base.rebind(target), self.lookup.rebind(target))

    def with_tree(self, tree: TreeConfig) -> Self:
        """Returns the drafter with another tree of `base`.

        Raises:
          ConfigError: `base` has no tree, or cannot draft this one.
        """
        return self.combine(self.base.with_tree(tree), self.lookup)

    def with_history(self, samples: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]] | None = None) -> Self:
        """Returns the drafter with other earlier samples, as `PromptLookup.with_history`.

        Raises:
          ValueError: as `PromptLookup.with_history`.
        """
        return self.combine(self.base, self.lookup.with_history(samples, prompts))


def shard(target: Target, drafter: BoundDrafter | None, mesh: Mesh) -> tuple[Target, BoundDrafter | None]:
    """Spreads target and drafter over a ("data", "fsdp", "tensor") mesh, whose devices `generate` uses.

    "tensor" splits weights and caches and must divide the key-value heads; "data" and "fsdp" split the rows of a batch.
    For a model that does not fit on one device use `load_target(path, mesh=mesh)` instead.

    Raises:
      ConfigError: the mesh does not divide a parameter or the heads.
    """
    separate = split_projections(target.params, target.config)  # the mesh splits the rows of each
    resharded = Target.from_params(target.config, separate, target.name, mesh)
    target = dataclasses.replace(resharded, source=target.source)
    return target, None if drafter is None else drafter.rebind(target)


def prompt_lookup(
    target: Target, *, ngram: int = 3, length: int = 10, latest: bool = False, shortest: int = 1,
    history: Sequence[Sequence[int]] | None = None,
) -> PromptLookup:  # fmt: skip
    """Returns a drafter without weights: it proposes what followed an earlier copy of the last n-gram.

    Args:
      ngram: longest n-gram to look up; without a match, shorter ones down to `shortest` are tried.
      length: most tokens to draft.
      latest: use the last of several matches in the text, not the first.
      history: earlier samples, such as replies to the same prompt, that are searched, too: the longest n-gram wins,
        the text itself before a sample, and a later sample before an earlier one. `with_history` replaces them, and []
        reserves the place for them. None searches the text alone.

    Raises:
      ConfigError: a number is below 1, or `shortest` exceeds `ngram`.
      ValueError: `target` is not a `Target`, or a sample of `history` is not a list of its token ids.
    """
    return PromptLookup.from_settings(target, (ngram, length, latest, shortest), history)


def lookahead(target: Target, *, ngram: int = 5, window: int = 7, guesses: int = 7, pool: int = 512) -> BoundDrafter:
    """Returns a drafter without weights: it proposes n-grams of a Jacobi window (arXiv:2402.02057).

    Args:
      ngram: N, tokens of an n-gram.
      window: W, positions ahead.
      guesses: G, n-grams verified per pass; a target pass reads (N - 1) * (W + G) tokens.
      pool: latest n-grams to keep per prompt.

    Raises:
      ConfigError: a number is too small. ValueError: `target` is not a `Target`.
    """
    return BoundDrafter.bind(lookahead_drafter(ngram, window, guesses, pool), target, name="lookahead")
