"""Reads and writes GPT-2: its config.json, and tensors that hold queries, keys and values side by side."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.checkpoints.files.fields import Fields, shown
from eagle_jax.checkpoints.files.mapping import Rule, Table
from eagle_jax.checkpoints.files.tensors import TensorReader
from eagle_jax.checkpoints.targets.config import MOST_LAYERS
from eagle_jax.checkpoints.targets.unsupported import check_features
from eagle_jax.config import ConfigError, DecoderConfig, RopeConfig

ARCHITECTURE = "GPT2LMHeadModel"
PROJECTIONS = ("q", "k", "v")
PREFIX = "transformer."
"""Of the names in files that `transformers` writes; the first files of OpenAI have none."""

_LAYER = (
    Rule("h.{i}.attn.c_proj.{leaf}", "layers_{i}/self_attn/o_proj/{leaf}"),
    Rule("h.{i}.attn.c_attn.{leaf}/{proj}", "layers_{i}/self_attn/{proj}_proj/{leaf}"),
    Rule("h.{i}.attn.c_attn.{leaf}", "layers_{i}/self_attn/qkv/{leaf}"),  # only where a file is written, see `fused`
    Rule("h.{i}.mlp.c_fc.{leaf}", "layers_{i}/mlp/up_proj/{leaf}"),
    Rule("h.{i}.mlp.c_proj.{leaf}", "layers_{i}/mlp/down_proj/{leaf}"),
    Rule("h.{i}.ln_1.{leaf}", "layers_{i}/input_layernorm/{leaf}"),
    Rule("h.{i}.ln_2.{leaf}", "layers_{i}/post_attention_layernorm/{leaf}"),
    Rule("ln_f.{leaf}", "norm/{leaf}"),
)


def _leaves(rule: Rule) -> tuple[Rule, Rule]:
    """Returns the rules of weight and bias; GPT-2 stores linear weights [in, out], as we do."""
    weight = "scale" if "norm" in rule.path else "kernel"
    return (
        Rule(PREFIX + rule.name.replace("{leaf}", "weight"), rule.path.replace("{leaf}", weight)),
        Rule(PREFIX + rule.name.replace("{leaf}", "bias"), rule.path.replace("{leaf}", "bias")),
    )


GPT2 = Table(
    rules=(
        Rule(f"{PREFIX}wte.weight", "embed_tokens/embedding"),
        Rule(f"{PREFIX}wpe.weight", "embed_positions/embedding"),
        *(leaf for rule in _LAYER for leaf in _leaves(rule)),
        Rule("lm_head.weight", "lm_head/kernel", True),  # tied in every published model
    ),
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),  # causal masks
)

_SUPPORTED: dict[str, Any] = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_COMMON_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


class Gpt2Reader(TensorReader):
    """Reads `c_attn` as three tensors, named `.../q`, `.../k` and `.../v`."""

    def _open_all(self) -> None:
        super()._open_all()
        self._fused = {name: info for name, info in self.infos.items() if re.search(r"attn\.c_attn\.\w+$", name)}
        for name, info in self._fused.items():
            del self.infos[name]
            part = info._replace(shape=(*info.shape[:-1], info.shape[-1] // len(PROJECTIONS)))
            self.infos |= {f"{name}/{projection}": part for projection in PROJECTIONS}

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor as stored, or a third of `c_attn`."""
        whole, slash, projection = name.partition("/")
        if not slash:
            return super().read(name)
        self.infos[whole] = self._fused[whole]
        try:
            return np.split(super().read(whole), len(PROJECTIONS), axis=-1)[PROJECTIONS.index(projection)]
        finally:
            del self.infos[whole]


def canonical(name: str) -> str:
    """Adds the prefix that some files leave out to a tensor's name."""
    return name if name.startswith((PREFIX, "lm_head.")) else PREFIX + name


def fused(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the projections of queries, keys and values to one tensor, as files hold them."""
    out: dict[str, Any] = {}
    for path, leaf in flat.items():
        match = re.fullmatch(r"(layers_\d+/self_attn)/([qkv])_proj/(kernel|bias)", path)
        if match is None:
            out[path] = leaf
        elif match[2] == "q":
            parts = [np.asarray(flat[f"{match[1]}/{projection}_proj/{match[3]}"]) for projection in PROJECTIONS]
            out[f"{match[1]}/qkv/{match[3]}"] = np.concatenate(parts, axis=-1)
    return out


def gpt2_config(values: Mapping[str, Any], where: str, *, max_position: int | None = None) -> DecoderConfig:
    """Builds the `DecoderConfig` of a GPT-2's config.json.

    Raises:
      CheckpointError: a size that is missing or wrong, or a switch that the decoder does not have.
    """
    fields = Fields(_own_names(values, where), where)
    check_features(fields, known=_SUPPORTED)
    for key, supported in _SUPPORTED.items():
        value = fields.text(key, supported) if isinstance(supported, str) else fields.flag(key, supported)
        if value != supported:
            raise CheckpointError(f"{where}: {key}={value!r} is not supported, only {supported!r}")
    hidden, heads = fields.integer("n_embd"), fields.integer("n_head")
    if hidden % heads:
        raise CheckpointError(f"{where}: n_embd={hidden} is not a multiple of n_head={heads}")
    length = fields.integer("n_positions" if "n_positions" in fields.values else "n_ctx", 1024)
    try:
        config = DecoderConfig(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("n_inner", 4 * hidden, null=True),
            num_layers=fields.integer("n_layer", most=MOST_LAYERS),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            rms_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
            rope=RopeConfig(kind="none"),
            max_position=length,
            block="gpt2",
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            tie_word_embeddings=fields.flag("tie_word_embeddings", True),
            eos_ids=fields.ids("eos_token_id"),
            bos_id=next(iter(fields.ids("bos_token_id")), None),
            architecture=ARCHITECTURE,
        )
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if max_position is not None and max_position != length:
        raise CheckpointError(f"max_position={max_position}: the {length} learned positions of {where} cannot be cut")
    return config


def _own_names(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Renames the keys of other families to GPT-2's, as `transformers` does."""
    out = dict(values)
    for common, own in _COMMON_NAMES.items():
        if common in out and out.setdefault(own, out[common]) != out[common]:
            Fields(out, where).fail(common, f"{own}={shown(out[own])}, which is the same size", "Remove one of them.")
    return out


def gpt2_values(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Returns config.json of a GPT-2.

    Raises:
      CheckpointError: GPT-2 has no such biases, heads or head.
    """
    like = dataclasses.replace(
        config, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=False,
        num_kv_heads=config.num_heads, head_dim=config.hidden_size // config.num_heads, block="gpt2",
    )  # fmt: skip
    if like != config:
        raise CheckpointError(
            f"{ARCHITECTURE} must have biases in every projection and a key-value head for every head"
        )
    eos = list(config.eos_ids)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_position,
        "layer_norm_epsilon": config.rms_norm_eps,
        **_SUPPORTED,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": dtype,
    }
