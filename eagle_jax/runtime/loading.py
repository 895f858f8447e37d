"""Loads targets and drafters from a directory or the Hugging Face hub."""

from __future__ import annotations

import os
import warnings

from jax.sharding import Mesh
from jax.typing import DTypeLike

from eagle_jax.checkpoints import check_same_tokens, config_directory, load_medusa_checkpoint, read_target_config
from eagle_jax.checkpoints.files.mapping import dtype_name
from eagle_jax.checkpoints.heads.load import load_head_checkpoint
from eagle_jax.checkpoints.targets.load import load_target_checkpoint
from eagle_jax.config import TreeConfig
from eagle_jax.devices import device_errors, unused_accelerator
from eagle_jax.parallel.mesh import check_mesh, placer
from eagle_jax.runtime.drafters import DEFAULT_CHAIN, DraftHead, Medusa, SmallModel
from eagle_jax.runtime.target import Target, check_target, on_mesh
from eagle_jax.shapes import medusa_parents


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


def load_target(
    path_or_hub_id: str | os.PathLike[str],
    dtype: DTypeLike = "float32",
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    max_position: int | None = None,
    mesh: Mesh | None = None,
) -> Target:
    """Loads a Llama-like model from a local directory or the Hugging Face hub.

    Args:
      dtype: "float32", "bfloat16" or "float16" (or JAX's types); of weights, activations and cache. Scores, softmax
        and norms stay float32.
      revision, token, cache_dir: passed to `huggingface_hub` (ignored for a local path).
      max_position: caps the context length, e.g. to stay inside a sliding window, which is not supported beyond it.
      mesh: a ("data", "tensor") mesh; every tensor goes straight to its devices. The drafter follows its target.

    Raises:
      CheckpointError: nothing there, an unknown architecture, a value of config.json of another type, or tensors that
        do not fit or hold NaN or infinity, all named at once.
      ConfigError: the mesh does not divide the model.
      MemoryError: the device is too small for the weights. DeviceError: JAX is told to take a device that is not there.

    Warns:
      UserWarning: JAX runs on the CPU of a machine that seems to have an accelerator. Or two facts of the checkpoint
        contradict, such as a config.json that ties the lm_head and a file that holds one of its own, which is used.
    """
    dtype = dtype_name(dtype)
    if mesh is not None:
        check_mesh(mesh)
    with device_errors():
        config, params = load_target_checkpoint(
            path_or_hub_id,
            dtype,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            max_position=max_position,
            place=None if mesh is None else placer(mesh),
        )
        if told := unused_accelerator():
            warnings.warn(told, stacklevel=2)
    name = str(path_or_hub_id)
    return Target(config, params, on_mesh(config, dtype, mesh), name, dtype, mesh, source=name)


def load_drafter(
    path_or_hub_id: str | os.PathLike[str],
    target: Target,
    tree: TreeConfig | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    rope_theta: float | int | None = None,
    taps: tuple[int, ...] | None = None,
) -> DraftHead:
    """Loads an EAGLE-1/2 or EAGLE-3 head trained for `target` (arXiv:2401.15077, 2406.16858, 2503.01840).

    The official layout of the papers' repository is read, that of SGLang and that of `speculators`.

    Args:
      revision, token, cache_dir: as in `load_target`.
      tree: chain, static or dynamic draft tree; None is the papers' own for 7B and 8B models, `TreeConfig(6, 10, 59)`
        for EAGLE-2 and `TreeConfig(8, 10, 59)` for EAGLE-3.
      rope_theta: overrides the head's own base (some published heads work better at 10000 than at their config's
        value).
      taps: overrides which hidden states the head reads.

    Raises:
      CheckpointError: tensors missing, unexpected, misshaped or not finite, a head made for another target, or an
        option of the head that would change its drafts and is not supported, such as an active sliding window.
      ConfigError: a tree the head cannot fill.
      ValueError: `target` is not what `load_target` returns.
      MemoryError: the device is too small for the weights.

    Warns:
      UserWarning: the head was trained for a target of another family, or has options or an lm_head without effect.
    """
    check_target(target)
    config, params = load_head_checkpoint(
        path_or_hub_id,
        target.config,
        target.dtype,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        rope_theta=rope_theta,
        taps=taps,
        embedding=target.params["embed_tokens"]["embedding"],  # shared where the file only carries a copy of it
        lm_head=None if target.config.tie_word_embeddings else target.params["lm_head"]["kernel"],
        place=None if target.mesh is None else placer(target.mesh),
    )
    return DraftHead.from_params(config, params, target, tree, str(path_or_hub_id))
