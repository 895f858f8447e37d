"""Writes a head in the layouts that other engines load."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.checkpoints.files.mapping import DTYPES
from eagle_jax.checkpoints.files.tensors import FLOAT_DTYPES, TensorReader
from eagle_jax.checkpoints.heads.config import head_config_values
from eagle_jax.checkpoints.heads.layouts import (
    Layout,
    check_expressible,
    sglang_values,
    speculators_values,
    with_target_positions,
)
from eagle_jax.checkpoints.heads.save import write_head
from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.core.types import Params

_KINDS = {"eagle1": "EAGLE-1/2", "eagle3": "EAGLE-3"}


def export_head(
    config: HeadConfig,
    params: Params,
    target: DecoderConfig,
    directory: str | os.PathLike[str],
    layout: Layout,
    dtype: str = "bfloat16",
    *,
    rope: Literal["head", "target"] | None = None,
    verifier: str | None = None,
    speculative_tokens: int = 5,
    embedding: Any | None = None,
    overwrite: bool = False,
) -> HeadConfig:
    """Writes a head for other engines; `load_head_checkpoint` reads every layout back exactly.

    - official: EAGLE-1/2 (`layers.0.*`, a copy of the target's embedding) and EAGLE-3 (`midlayer.*`), as the reference
      implementation writes them; tpu-inference's native EAGLE-3 head is found under this layout's architecture.
    - sglang: EAGLE-3 for SGLang, vLLM and sglang-jax; d2t and t2d are always there.
    - speculators: EAGLE-3 for vLLM, which finds the target by itself, and for the `speculators` package (`layers.0.*`,
      a copy of the target's embedding).

    No tokenizer is written: all of them take the target's.

    Args:
      params: `{"head": ..., "d2t": ...}` as `load_head_checkpoint` returns it.
      target: its context length goes into the file.
      rope: whose rotary embedding to write, if the head's differs from the target's.
      verifier: hub id or path of the target (speculators only).
      speculative_tokens: length of the drafted chain (speculators only).
      embedding: [V, H], the target's, to write a copy of; required if `carries_embedding`.
      overwrite: replace the checkpoint in a directory that is not empty; other files in it are kept.

    Returns:
      the configuration as written: `config` with the target's context length (and RoPE).

    Raises:
      CheckpointError: the layout cannot express this head, an argument is missing, or the directory is not empty.
    """
    if not overwrite:
        check_unoccupied(directory)
    config = with_target_positions(config, target, rope)
    d2t = params.get("d2t")
    check_expressible(config, None if d2t is None else np.asarray(d2t), target, layout)
    if carries_embedding(config, layout) and embedding is None and not config.own_embedding:
        raise CheckpointError(
            f"an {_KINDS[config.kind]} head in the {layout} layout carries its target's embedding. Pass embedding=."
        )
    write = functools.partial(write_head, config, params, directory, dtype, embedding=embedding)
    if layout == "sglang":
        write(sglang_values(config, dtype), prefix="midlayer.", full_tables=True)
    elif layout == "speculators":
        if not verifier:
            raise CheckpointError(
                "verifier must be the hub id or path of the target in the speculators layout, got none."
            )
        if speculative_tokens < 1:
            raise CheckpointError(f"speculative_tokens must be at least 1, got {speculative_tokens}.")
        write(speculators_values(config, target, dtype, verifier, speculative_tokens), prefix="layers.0.")
    else:
        prefix = "midlayer." if config.kind == "eagle3" else "layers.0."
        write(head_config_values(config, dtype), prefix=prefix)
    return config


def check_unoccupied(directory: str | os.PathLike[str]) -> None:
    """Checks that a directory is missing or empty.

    Raises:
      CheckpointError: naming it.
    """
    path = Path(directory).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is not an empty directory. Choose another, or pass --overwrite.")


def carries_embedding(config: HeadConfig, layout: Layout) -> bool:
    """Returns whether files of a layout hold a copy of the target's embedding.

    The `speculators` package (0.9.0) should take a missing one from the target, but does so only if its uninitialised
    memory happens to hold a NaN.
    """
    return layout == "speculators" or config.kind == "eagle1"


def share_embedding(config: HeadConfig, params: Params, embedding: np.ndarray) -> tuple[HeadConfig, Params]:
    """Drops the head's embedding if it is a copy of the target's [V, H]."""
    own = params["head"].get("embed_tokens", {}).get("embedding")
    if own is None or not np.array_equal(np.asarray(own), embedding):
        return config, params
    head = {name: value for name, value in params["head"].items() if name != "embed_tokens"}
    return dataclasses.replace(config, own_embedding=False), params | {"head": head}


def stored_dtype(directory: Path) -> str:
    """Returns the dtype that holds every weight of a checkpoint without loss.

    Raises:
      CheckpointError: none of those that can be written does.
    """
    with TensorReader(directory) as reader:
        found = {info.dtype for info in reader.infos.values() if info.dtype in FLOAT_DTYPES}
    widest = functools.reduce(jnp.promote_types, sorted(found), jnp.dtype(sorted(found)[0])) if found else None
    if widest is None or widest.name not in DTYPES:
        held = ", ".join(sorted(found)) or "no floating-point numbers"
        raise CheckpointError(f"{directory} holds {held}: choose a dtype, one of {', '.join(DTYPES)}")
    return widest.name
