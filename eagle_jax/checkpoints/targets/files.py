"""Loads and saves a target language model: a Hugging Face directory, or a GGUF file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from eagle_jax.checkpoints.files.fields import Fields, notice
from eagle_jax.checkpoints.files.gguf import is_gguf
from eagle_jax.checkpoints.files.hub import Hub, checkpoint_directory
from eagle_jax.checkpoints.files.kinds import MODELS, check_kind
from eagle_jax.checkpoints.files.mapping import (
    EMBEDDING,
    LM_HEAD,
    Rule,
    Table,
    check_dtype,
    check_scheme,
    expected_shapes,
    flatten,
)
from eagle_jax.checkpoints.files.staging import replacing, write_json
from eagle_jax.checkpoints.files.tensors import FLOAT_DTYPES, TensorReader, cast, read_json
from eagle_jax.checkpoints.files.weights import Place, TensorProblems, check_params, plan, read_planned, write_weights
from eagle_jax.checkpoints.targets.config import config_values, decoder_config
from eagle_jax.checkpoints.targets.families import FAMILIES
from eagle_jax.checkpoints.targets.gemma3 import text_values
from eagle_jax.checkpoints.targets.gguf import GgufReader
from eagle_jax.checkpoints.targets.quantisation import quantisation_of
from eagle_jax.checkpoints.targets.quantised import QuantisedReader, zero_biases
from eagle_jax.config import DecoderConfig
from eagle_jax.core.types import Params
from eagle_jax.models.projections import split_projections


def load_target_checkpoint(
    path_or_hub_id: str | os.PathLike[str],
    dtype: str = "float32",
    *,
    max_position: int | None = None,
    place: Place | None = None,
    layers: bool = True,
    weights: str | None = None,
    **hub: Unpack[Hub],
) -> tuple[DecoderConfig, Params]:
    """Loads configuration and parameters of a language model.

    Args:
      path_or_hub_id: a directory with config.json and weights, a GGUF file or a directory with one, or a hub id.
      dtype: float32, bfloat16 or float16; weights are converted one by one as they are read.
      max_position: caps the context length. For longrope it also decides between the two lists of factors.
      place: `(path, host array) -> device array` for a sharded load; default is the default device.
      layers: False reads only embedding, final norm and lm_head, for training on stored features.
      weights: scheme to quantise matrices by. Quantised matrices of a file keep their small values, and
        their scales are converted to `dtype`.
      hub: revision, token and cache_dir of a hub id, as in `huggingface_hub`.

    Returns:
      config, and the parameters as a nested dict with the names of the Linen decoder.

    Raises:
      CheckpointError: a file or its tensors do not fit, or hold NaN or infinity; the message names all of them.

    Warns:
      UserWarning: the files contradict each other. For example, config.json ties embedding and lm_head, and the two
        differ: the model is loaded untied.
    """
    loaded_dtype = check_dtype(dtype)
    scheme = check_scheme(weights)
    directory = checkpoint_directory(path_or_hub_id, **hub)
    config = read_target_config(directory, max_position=max_position)
    family = FAMILIES[config.architecture]
    with _files_of(directory, config) as files:
        reader = family.reader(files, config)
        if not isinstance(files, GgufReader):  # these hold models alone
            check_kind(directory, MODELS, read_json(directory / "config.json"), reader.infos)
        problems = TensorProblems()
        config, table = _settle_tie(config, reader, family.table, loaded_dtype)
        if isinstance(files, QuantisedReader):
            needed = expected_shapes(config)
            extra = [name for name in zero_biases(reader) if (table.path_of(name) or ("",))[0] not in needed]
            table = table.ignoring(*extra)
        chosen = plan(reader, table, expected_shapes(config), problems)
        problems.raise_if_any(
            f"{directory}: the tensors do not fit the {config.architecture} of its configuration:",
            "Download the file again."
            if isinstance(files, GgufReader)
            else "Correct config.json, or download the files again.",
        )
        if not layers:
            chosen = {path: tensor for path, tensor in chosen.items() if not path.startswith("layers_")}
        params = read_planned(reader, chosen, dtype, place, scheme)
        if isinstance(files, QuantisedReader) and files.dequantised:
            others = len(files.dequantised) - 1
            notice(
                f"{directory}: the groups of {files.dequantised[0]} and {others} more are not equal runs of "
                "neighbouring inputs (desc_act, actorder, or a shorter last group): their weights were dequantised"
            )
        if isinstance(files, QuantisedReader) and not files.layers:
            notice(f"{directory}: config.json describes quantised weights, and the tensors are floats")
        return config, params


def _files_of(directory: Path, config: DecoderConfig) -> TensorReader:
    """Opens the files of a model."""
    if is_gguf(directory):
        return GgufReader(directory)
    where, family = directory / "config.json", FAMILIES[config.architecture]
    values = text_values(read_json(where), str(where))
    quantisation = quantisation_of(Fields(family.flat(values, str(where)), where))
    if quantisation is None:
        return TensorReader(directory)
    for note in quantisation.notes:
        notice(note)
    return QuantisedReader(directory, quantisation)


def read_target_config(directory: Path, *, max_position: int | None = None) -> DecoderConfig:
    """Reads the configuration alone; stop tokens come from generation_config.json, or else config.json.

    Args:
      directory: a GGUF file instead is both.

    Raises:
      CheckpointError: as `load_target_checkpoint`.

    Warns:
      UserWarning: generation_config.json lacks a stop token of config.json, or one is outside the vocabulary.
    """
    values, path = _config_of(directory)
    check_kind(directory, MODELS, values)  # checked first: heads name no architecture
    config = decoder_config(values, str(path), max_position=max_position)
    generation = directory / "generation_config.json"
    stops = config.eos_ids
    if generation.is_file() and (stop := Fields(read_json(generation), generation).ids("eos_token_id")):
        if left := sorted(set(stops) - set(stop)):
            notice(f"{generation} overrides config.json, as in transformers: {left} are no stop tokens")
        path, stops = generation, stop
    known = tuple(token for token in stops if 0 <= token < config.vocab_size)  # no others occur
    Fields({}, path).contradict("eos_token_id", f"the vocabulary of {config.vocab_size} tokens has", known, stops)
    return dataclasses.replace(config, eos_ids=known)


def _config_of(directory: Path) -> tuple[dict[str, Any], Path]:
    """Returns the values of config.json and its path; those of a GGUF file and the path of the latter."""
    if is_gguf(directory):
        return GgufReader(directory).values, directory
    return read_json(directory / "config.json"), directory / "config.json"


def _settle_tie(
    config: DecoderConfig, reader: TensorReader, table: Table, dtype: np.dtype
) -> tuple[DecoderConfig, Table]:
    """Returns the configuration with the `tie_word_embeddings` of the tensors, and the table of these.

    As in `transformers` 5, a tied model is untied, with a warning, if its lm_head and embedding differ in the dtype of
    the loaded model. A tied model with an lm_head and no embedding uses the lm_head as both.
    """
    head = reader.infos.get(LM_HEAD)
    if not config.tie_word_embeddings or head is None:
        return config, table
    embedding = next((name for name in reader.infos if table.path_of(name) == (EMBEDDING, False)), None)
    if embedding is None:
        return config, table._replace(rules=(Rule(LM_HEAD, EMBEDDING), *table.rules))
    # The loader reports quantised tensors.
    if head.dtype in FLOAT_DTYPES and reader.infos[embedding].dtype in FLOAT_DTYPES:
        ours, theirs = (cast(reader.read(name), dtype) for name in (LM_HEAD, embedding))
        if np.array_equal(ours, theirs):
            return config, table.ignoring(LM_HEAD)
    notice(
        f"{reader.directory / 'config.json'}: tie_word_embeddings is true and {head.file} holds an {LM_HEAD} that "
        f"differs from {embedding}: the two are not tied, as in transformers. Set tie_word_embeddings to false."
    )
    return dataclasses.replace(config, tie_word_embeddings=False), table


def save_target_checkpoint(
    config: DecoderConfig,
    params: Params,
    directory: str | os.PathLike[str],
    dtype: str = "bfloat16",
    *,
    max_shard_bytes: int | None = None,
) -> None:
    """Writes a target so that `transformers` loads it unchanged: config, generation config, safetensors.

    The directory is replaced as a whole; other files in it (tokenizer, model card) are kept.

    Args:
      params: nested dict as `load_target_checkpoint` returns it, or `Target.params`.
      dtype: float32, bfloat16 or float16.
      max_shard_bytes: size from which the weights are split; None is 5 GiB.

    Raises:
      CheckpointError: the parameters do not fit `config` or hold values that are not finite, or the directory holds
        something else.
    """
    file_dtype = check_dtype(dtype)
    values = config_values(config, dtype)
    family = FAMILIES[config.architecture]
    flat = flatten(split_projections(params, config))
    check_params(flat, expected_shapes(config), "the target's parameters:")
    generation = {"bos_token_id": values["bos_token_id"], "eos_token_id": values["eos_token_id"]}
    with replacing(Path(directory)) as staging:
        write_json(staging / "config.json", values)
        write_json(staging / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
        write_weights(staging, family.joined(flat), family.table, file_dtype, max_shard_bytes=max_shard_bytes)
