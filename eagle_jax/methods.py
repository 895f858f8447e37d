"""The methods that are no EAGLE head, bound to a target: what `generate` takes as `drafter`."""

from __future__ import annotations

import os
import warnings

from eagle_jax.api import load_target
from eagle_jax.bound import DEFAULT_CHAIN, BoundDrafter, Medusa, SmallModel, Target, check_target
from eagle_jax.checkpoints import check_same_tokens, config_directory, load_medusa_checkpoint, read_target_config
from eagle_jax.config import TreeConfig
from eagle_jax.drafters import lookahead as _lookahead
from eagle_jax.drafters import prompt_lookup as _prompt_lookup
from eagle_jax.shapes import medusa_parents
from eagle_jax.sharding import placer


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


def load_medusa(
    path_or_hub_id: str | os.PathLike[str],
    target: Target,
    tree: TreeConfig | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Medusa:
    """Loads heads of Medusa-1 (arXiv:2401.10774), Hydra or Hydra++ (arXiv:2402.05109) trained for `target`.

    Args:
      tree: at most as deep as there are heads; None is Medusa's static tree of 63 nodes. Acceptance is lossless; the
        "typical acceptance" of Medusa's paper is not, and is not here.
      revision, token, cache_dir: as in `load_target`.

    Raises:
      CheckpointError: no such heads, heads of another model, or weights that are not finite.
      ConfigError: a tree that they cannot fill. ValueError: `target` is none. MemoryError: the device is too small.

    Warns:
      UserWarning: config.json names another number of heads than the file holds, which is used.
    """
    check_target(target)
    config, params = load_medusa_checkpoint(
        path_or_hub_id,
        target.config,
        target.dtype,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        place=None if target.mesh is None else placer(target.mesh),
    )
    shape = tree or TreeConfig.static(medusa_parents(config.num_heads))
    return Medusa.from_params(config, params, target, shape, str(path_or_hub_id))


def load_draft_model(
    path_or_hub_id: str | os.PathLike[str],
    target: Target,
    tree: TreeConfig = DEFAULT_CHAIN,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> SmallModel:
    """Loads a small language model with the target's tokenizer: standard speculative sampling (arXiv:2211.17192).

    Args:
      tree: what it drafts. `TreeConfig.chain(5, "rejection")` is the method of the papers; by default the chain is
        ranked and the text of a key the same as with every other drafter. A model that is in memory is bound with
        `eagle_jax.SmallModel.bind(target, model, tree)`.
      revision, token, cache_dir: as in `load_target`.

    Warns:
      UserWarning: of model or target there are no tokenizer files to compare; the sizes of the vocabularies agree. Or
        the model has fewer positions than the target, or its files contradict as in `load_target`.

    Raises:
      CheckpointError: nothing there, tensors that do not fit or are not finite, or the model of another tokenizer.
      ConfigError: a tree that cannot be filled. ValueError: `target` is none. MemoryError: the device is too small.
    """
    check_target(target)
    at = config_directory(path_or_hub_id, revision=revision, token=token, cache_dir=cache_dir)
    sizes = read_target_config(at).vocab_size, target.config.vocab_size
    untold = check_same_tokens(
        path_or_hub_id, target.source, sizes, revision=revision, token=token, cache_dir=cache_dir
    )
    model = load_target(
        path_or_hub_id, target.dtype, revision=revision, token=token, cache_dir=cache_dir, mesh=target.mesh
    )
    if untold is not None:
        warnings.warn(untold, stacklevel=2)
    return SmallModel.bind(target, model, tree)
