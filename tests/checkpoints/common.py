"""Provides random models in memory, edits of checkpoint files, and comparisons."""

from __future__ import annotations

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from eagle_jax.config import DecoderConfig, RopeConfig
from eagle_jax.models import init_head_params, init_params

CONFIG = DecoderConfig(
    vocab_size=31, hidden_size=12, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
    max_position=64, eos_ids=(2, 7), bos_id=1,
)  # fmt: skip
GPT2 = DecoderConfig(
    vocab_size=12, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=4,
    rope=RopeConfig(kind="none"), max_position=48, block="gpt2", qkv_bias=True, out_bias=True, mlp_bias=True,
    tie_word_embeddings=True, eos_ids=(3,), bos_id=3, architecture="GPT2LMHeadModel",
)  # fmt: skip
FAMILY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], **FAMILY}
MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": None, **FAMILY}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], **FAMILY}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], **FAMILY}


def random_params(config=CONFIG, seed=0, dtype=None):
    """Returns random weights of a decoder or a head; a head's d2t names distinct target ids in order."""
    rng = np.random.default_rng(seed)
    init = init_params if isinstance(config, DecoderConfig) else init_head_params
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), dtype or leaf.dtype), shapes)
    if "d2t" in params:
        kept = np.sort(rng.choice(config.layer.vocab_size, config.draft_vocab_size, replace=False))
        params["d2t"] = jnp.asarray(kept - np.arange(config.draft_vocab_size), jnp.int32)
    return params


def edit_json(path, **changes):
    """Sets keys; None as a value stays null, `...` removes the key."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def edit_tensors(path, edit):
    """Reads the tensors of a file, calls `edit` with them, and writes them."""
    tensors = safetensors.numpy.load_file(path)
    edit(tensors)
    safetensors.numpy.save_file(tensors, path)


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def quiet():
    """Returns a context in which every warning is an error."""
    return warnings.catch_warnings(action="error")
