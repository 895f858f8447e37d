"""Loads a target language model from a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.checkpoints.files.fields import Fields
from eagle_jax.checkpoints.files.finite import FETCH_AGAIN, NotFinite
from eagle_jax.checkpoints.files.hub import checkpoint_directory
from eagle_jax.checkpoints.files.kinds import MODELS, check_kind
from eagle_jax.checkpoints.files.mapping import DECODER, LM_HEAD, Table, check_dtype, expected_shapes
from eagle_jax.checkpoints.files.tensors import TensorReader, read_json
from eagle_jax.checkpoints.files.weights import Place, TensorProblems, cast, plan, read_planned
from eagle_jax.checkpoints.targets.config import architecture_of, check_key_value_heads, decoder_config
from eagle_jax.checkpoints.targets.gpt2 import ARCHITECTURE, GPT2, Gpt2Reader, canonical, gpt2_config
from eagle_jax.checkpoints.targets.tied import settled_tie
from eagle_jax.config import DecoderConfig
from eagle_jax.core.types import Params


class Layout(NamedTuple):
    """How the files of a family hold its tensors.

    Attributes:
      reader: opens them. table: which tensor is which parameter. canonical: a tensor's name in a file as in the table.
    """

    reader: type[TensorReader]
    table: Table
    canonical: Callable[[str], str]


LAYOUTS = {"llama": Layout(TensorReader, DECODER, str), "gpt2": Layout(Gpt2Reader, GPT2, canonical)}
"""By `DecoderConfig.block`."""
_EMBEDDING = "embed_tokens/embedding"
_KEYS = "model.layers.0.self_attn.k_proj.weight"


def load_target_checkpoint(
    path_or_id: str | os.PathLike[str],
    dtype: str = "float32",
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    max_position: int | None = None,
    place: Place | None = None,
    layers: bool = True,
) -> tuple[DecoderConfig, Params]:
    """Loads configuration and parameters of a language model.

    Args:
      path_or_id: a directory with config.json and weights, or a hub id.
      dtype: float32, bfloat16 or float16; weights are converted one by one as they are read.
      revision, token, cache_dir: for a hub id, as in `huggingface_hub`.
      max_position: caps the context length, e.g. to stay inside a sliding window.
      place: `(path, host array) -> device array` for a sharded load; default is the default device.
      layers: False reads embedding, final norm and lm_head only: what training on stored features needs.

    Returns:
      config, and the parameters as a nested dict with the names of the Linen decoder.

    Raises:
      CheckpointError: naming the file and everything in it that does not fit, or tensors that hold NaN or infinity.

    Warns:
      UserWarning: two facts of the checkpoint contradict, naming the one that is used: a model that config.json calls
        tied and whose file holds an lm_head of its own, for example, is loaded untied.
    """
    loaded_dtype = check_dtype(dtype)
    directory = checkpoint_directory(path_or_id, revision=revision, token=token, cache_dir=cache_dir)
    config = read_target_config(directory, max_position=max_position)
    layout = LAYOUTS[config.block]
    with layout.reader(directory) as reader:
        values = read_json(directory / "config.json")
        check_kind(directory, MODELS, values, reader.infos)
        problems = TensorProblems()
        check_key_value_heads(values, config, reader.infos.get(_KEYS), problems)
        embedding = _embedding_name(reader, layout)
        config = settled_tie(config, reader, embedding, loaded_dtype)
        tied_to_head = config.tie_word_embeddings and embedding is None
        chosen = plan(
            reader,
            layout.table,
            expected_shapes(config),
            problems,
            canonical=functools.partial(_canonical_tied, layout) if tied_to_head else layout.canonical,
            handled=(LM_HEAD,) if config.tie_word_embeddings and not tied_to_head else (),
        )
        problems.raise_if_any(f"{directory}: the tensors do not fit the {config.architecture} of its config.json:")
        if not layers:
            chosen = {path: tensor for path, tensor in chosen.items() if not path.startswith("layers_")}
        return config, read_planned(reader, chosen, dtype, place)


def read_target_embedding(directory: Path, dtype: str = "float32") -> np.ndarray:
    """Reads the input embedding [V, H] alone, to the host.

    Raises:
      CheckpointError: there is none.
    """
    config = read_target_config(directory)
    layout = LAYOUTS[config.block]
    with layout.reader(directory) as reader:
        name = _embedding_name(reader, layout)
        if name is None and config.tie_word_embeddings and LM_HEAD in reader.infos:
            name = LM_HEAD
        if name is None:
            expected = layout.table.name_of(_EMBEDDING)[0]
            raise CheckpointError(f"{directory} has no tensor {expected}: is it a language model?")
        embedding = np.array(cast(reader.read(name), check_dtype(dtype), name))
    spoiled = NotFinite()
    spoiled.check(name, embedding)
    spoiled.raise_if_any(str(directory), FETCH_AGAIN)
    return embedding


def _embedding_name(reader: TensorReader, layout: Layout) -> str | None:
    """Returns the name of the input embedding in the files; None without one."""
    expected = layout.table.name_of(_EMBEDDING)[0]
    return next((name for name in reader.infos if layout.canonical(name) == expected), None)


def _canonical_tied(layout: Layout, name: str) -> str:
    """Maps a tied lm_head that is stored in place of the embedding to the embedding's name."""
    return layout.table.name_of(_EMBEDDING)[0] if name == LM_HEAD else layout.canonical(name)


def read_target_config(directory: Path, *, max_position: int | None = None) -> DecoderConfig:
    """Reads the configuration alone; stop tokens come from generation_config.json, or else config.json.

    Raises:
      CheckpointError: as `load_target_checkpoint`.

    Warns:
      UserWarning: the two files name other stop tokens, or one that lies outside the vocabulary.
    """
    path = directory / "config.json"
    values = read_json(path)
    check_kind(directory, MODELS, values)  # checked first: heads name no architecture
    read = gpt2_config if architecture_of(values, str(path)) == ARCHITECTURE else decoder_config
    config = read(values, str(path), max_position=max_position)
    generation = directory / "generation_config.json"
    if generation.is_file() and (stop := Fields(read_json(generation), generation).ids("eos_token_id")):
        if left := sorted(set(config.eos_ids) - set(stop)):
            warnings.warn(
                f"{generation} overrides config.json, as in transformers: {left} are no stop tokens", stacklevel=2
            )
        path, config = generation, dataclasses.replace(config, eos_ids=stop)
    return _without_unknown_stops(config, path)


def _without_unknown_stops(config: DecoderConfig, path: Path) -> DecoderConfig:
    """Leaves out stop tokens outside the vocabulary, which never occur."""
    size = config.vocab_size
    outside = [token for token in config.eos_ids if not 0 <= token < size]
    if outside:
        warnings.warn(
            f"{path}: eos_token_id {outside} lies outside the vocabulary of {size} tokens and is ignored",
            stacklevel=3,
        )
    return dataclasses.replace(config, eos_ids=tuple(token for token in config.eos_ids if token not in outside))
