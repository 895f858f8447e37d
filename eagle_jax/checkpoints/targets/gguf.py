"""Converts GGUF files to the layout of Hugging Face: a config.json, and tensors by their names there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.checkpoints.files.fields import CheckpointError, Fields, shown
from eagle_jax.checkpoints.files.gguf import GgufFile
from eagle_jax.checkpoints.files.tensors import TensorInfo, TensorReader
from eagle_jax.checkpoints.targets.rope import rope_scaling
from eagle_jax.config import RopeConfig
from eagle_jax.models.rope import inverse_frequencies

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma3": "Gemma3ForCausalLM"
}  # fmt: skip
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attention.sliding_window_pattern": "sliding_window_pattern",
}
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_STOPS = ("eos", "eot", "eom")  # ends of text, of a turn, and of a message before a tool's result
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = _TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_27B = 62
"""Layers of the only Gemma 3 whose scores are not divided by sqrt(head_dim); a file does not say it."""
_FACTORS = "rope_freqs.weight"  # what the frequencies of llama3's RoPE are divided by
_LLAMA3: dict[str, Any] = {"original_max_position": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""The numbers of Llama 3.1 to 3.3, which differ in the factor alone; a file holds only their result."""


class GgufReader(TensorReader):
    """Reads the tensors of a GGUF file in float32, by the names and in the layout of Hugging Face.

    Args:
      path: of the file.

    Attributes:
      values: the config.json of the model.

    Raises:
      CheckpointError: as `GgufFile`; or the package gguf is missing, or the architecture or a quantisation is unknown.
    """

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        name = self._file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in _ARCHITECTURES:
            raise CheckpointError(
                f"{path}: general.architecture must be one of {', '.join(_ARCHITECTURES)}, got {shown(name)}. Load "
                "the original checkpoint, in safetensors."
            )
        self._file.check_tensors()
        super().__init__(path)
        self.values = _config_values(self._file, name)

    def read(self, name: str) -> np.ndarray:
        """Dequantises a tensor to float32."""
        array = self._file.read(self._sources[name])
        if self.values["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
            return array - np.float32(1)  # llama.cpp's files hold 1 + weight
        heads = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
        key = next((key for part, key in heads.items() if part in name), None)
        if key is None or self._file.metadata["general.architecture"] != "llama":
            return array
        # In llama.cpp's files of Llama, RoPE rotates neighbouring rows; here row i and row i + head_dim / 2.
        return array.reshape(self.values[key], -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    def own_name(self, name: str) -> str:
        """Returns the name in the file of a tensor with this name in a checkpoint of Hugging Face."""
        match = re.fullmatch(r"(?:model\.layers\.(?P<i>[0-9]+)\.)?(?P<stem>[\w.]+)\.(?P<leaf>weight|bias)", name)
        stems = {theirs: own for own, theirs in self._tensors.items()}
        if match is None or match["stem"] not in stems:
            return name
        layer = "" if match["i"] is None else f"blk.{match['i']}."
        return f"{layer}{stems[match['stem']]}.{match['leaf']}"

    @property
    def _tensors(self) -> Mapping[str, str]:
        return _GEMMA if self._file.metadata["general.architecture"] == "gemma3" else _TENSORS

    def _open_all(self, stem: str | None) -> None:
        for name, tensor in self._file.tensors.items():
            if name != _FACTORS:
                renamed = _renamed(name, self._tensors)
                self.infos[renamed] = TensorInfo(tensor.shape, "float32", self.directory.name)
                self._sources[renamed] = name


def _renamed(name: str, tensors: Mapping[str, str]) -> str:
    """Returns the Hugging Face name of a tensor; an unknown name as it is."""
    match = re.fullmatch(r"(?:blk\.(?P<i>[0-9]+)\.)?(?P<stem>\w+)\.(?P<leaf>weight|bias)", name)
    if match is None or match["stem"] not in tensors:
        return name
    layer = "" if match["i"] is None else f"model.layers.{match['i']}."
    return f"{layer}{tensors[match['stem']]}.{match['leaf']}"


def _config_values(file: GgufFile, name: str) -> dict[str, Any]:
    """Returns the config.json of a file; keys of its architecture without a name there keep their own.

    Raises:
      CheckpointError: a size is missing or no integer, or a key of the rotary embedding is not supported.
    """
    own = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count"):
        Fields(file.metadata, file.path).integer(f"{name}.{key}")  # an error has the name in the file
    values = {_KEYS.get(key, key): value for key, value in own.items() if key in _KEYS or not key.startswith("rope.")}
    stops = [file.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in _STOPS]
    embedding = file.tensors.get("token_embd.weight")
    values |= {
        "architectures": [_ARCHITECTURES[name]],
        "model_type": name,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(token for token in stops if isinstance(token, int))),
    }
    if embedding is not None and embedding.shape:
        values["vocab_size"] = embedding.shape[0]
    if name == "llama" and values.get("sliding_window"):  # 0 is none
        values |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    fields = Fields(values, file.path)
    heads = fields.integer("num_attention_heads")
    values.setdefault("num_key_value_heads", heads)
    values.setdefault("head_dim", fields.integer("hidden_size") // heads)
    if name == "gemma3":
        whole = fields.integer("num_hidden_layers") == _GEMMA_27B
        scalar = fields.integer("hidden_size") // heads if whole else fields.integer("head_dim")
        values |= {"model_type": "gemma3_text", "query_pre_attn_scalar": scalar}
        values.setdefault("rope_theta", 1e6)  # as llama.cpp
    values["rope_scaling"] = _rope_scaling(file, own, fields)
    return values


def _rope_scaling(file: GgufFile, own: Mapping[str, Any], fields: Fields) -> dict[str, Any] | None:
    """Returns rope_scaling as in config.json, from the architecture's keys and the tensor of factors."""
    theta, head_dim = fields.number("rope_theta", RopeConfig.theta), fields.integer("head_dim")
    given = {_SCALING[key]: value for key, value in own.items() if key in _SCALING}
    for key, value in own.items():
        known = key in _SCALING or key in _KEYS or key == "rope.scaling.finetuned"
        if key.startswith("rope.") and not known and (key, value) != ("rope.dimension_count", head_dim):
            Fields(own, file.path).fail(key, "absent", "Load another model: other rotary embeddings are not supported.")
    if given and given.setdefault("rope_type", "linear") == "none":  # linear is the default of llama.cpp
        given = {}
    if given.get("rope_type") == "longrope":  # its factors are tensors
        Fields(own, file.path).fail("rope.scaling.type", "none, linear or yarn", "Load the original checkpoint.")
    if _FACTORS not in file.tensors:
        return given or None
    factors = file.read(_FACTORS)
    found = RopeConfig(theta, "llama3", round(float(np.max(factors, initial=1.0)), 3), **_LLAMA3)
    expected = inverse_frequencies(RopeConfig(theta), head_dim) / inverse_frequencies(found, head_dim)
    if given or factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise CheckpointError(
            f"{file.path}: {_FACTORS} must hold the factors of Llama 3.1 to 3.3, got others. Load another model."
        )
    return rope_scaling(found)
