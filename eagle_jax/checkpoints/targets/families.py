"""Lists the families of models: what is particular in the config.json and the tensors of each.

A further family is a row of `_ALL`. The files of GPT-2 and Phi-3/4 hold several projections side by side: see `fused`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from eagle_jax.checkpoints.files.fields import CheckpointError, Fields
from eagle_jax.checkpoints.files.mapping import DECODER, EMBEDDING, LM_HEAD, Rule, Table, linear_rules
from eagle_jax.checkpoints.files.tensors import TensorReader
from eagle_jax.checkpoints.targets import gemma3, smollm3
from eagle_jax.checkpoints.targets.experts import (
    QWEN3_MOE,
    StackReader,
    qwen3_expert_keys,
    qwen3_experts,
    split_experts,
)
from eagle_jax.checkpoints.targets.fused import Fused, FusedReader, join_projections
from eagle_jax.checkpoints.targets.gpt_oss import (
    GPT_OSS,
    GptOssReader,
    flat_gpt_oss,
    gpt_oss_fields,
    gpt_oss_keys,
    join_gpt_oss,
)
from eagle_jax.checkpoints.targets.windows import WindowKind
from eagle_jax.config import DecoderConfig, RopeConfig

_QKV = ("q_proj", "k_proj", "v_proj")
_PREFIX = "transformer."  # prefix of names in files that `transformers` writes; the first files of OpenAI have none
_LINEAR = {
    "h.{i}.attn.c_proj": "layers_{i}/self_attn/o_proj",
    "h.{i}.attn.c_attn": "layers_{i}/self_attn/c_attn",  # only where a file is written, see `join_projections`
    "h.{i}.attn.c_attn/{name}": "layers_{i}/self_attn/{name}",  # as `FusedReader` names the thirds
    "h.{i}.mlp.c_fc": "layers_{i}/mlp/up_proj",
    "h.{i}.mlp.c_proj": "layers_{i}/mlp/down_proj",
}
_NORMS = {
    "h.{i}.ln_1": "layers_{i}/input_layernorm",
    "h.{i}.ln_2": "layers_{i}/post_attention_layernorm",
    "ln_f": "norm",
}
GPT2 = Table(
    rules=(
        Rule(f"{_PREFIX}wte.weight", EMBEDDING),
        Rule(f"{_PREFIX}wpe.weight", "embed_positions/embedding"),
        *(rule for name, path in _LINEAR.items() for rule in linear_rules(_PREFIX + name, path, transpose=True)),
        *(Rule(f"{_PREFIX}{name}.weight", f"{path}/scale") for name, path in _NORMS.items()),
        *(Rule(f"{_PREFIX}{name}.bias", f"{path}/bias") for name, path in _NORMS.items()),
        Rule(LM_HEAD, "lm_head/weight"),  # tied in every published model
    ),
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),  # causal masks
    canonical=lambda name: name if name.startswith((_PREFIX, "lm_head.")) else _PREFIX + name,
)

_PHI3 = {"self_attn": Fused("qkv_proj", _QKV), "mlp": Fused("gate_up_proj", ("gate_proj", "up_proj"))}
PHI3 = DECODER._replace(
    rules=(
        *(
            Rule(f"model.layers.{{i}}.{block}.{fused.name}/{part}.weight", f"layers_{{i}}/{block}/{part}/weight")
            for block, fused in _PHI3.items()
            for part in fused.parts
        ),
        *DECODER.rules,  # name the joined projections where a file is written
    )
)


@dataclasses.dataclass(frozen=True)
class Family:
    """The mapping of one family's files to a `DecoderConfig` and its parameters.

    Attributes:
      model_type, architecture: as in config.json.
      defaults: what `transformers` assumes for keys that a config.json leaves out.
      fixed: fields of `DecoderConfig` that are the same in every model of the family.
      switches: key of config.json -> the fields of `DecoderConfig` that it switches.
      only: key -> the values that the decoder supports; the first is written.
      window: which layers attend within `sliding_window`.
      names: common key -> the family's own name of it.
      absent: common keys that the family does not have.
      inner: default of `intermediate_size` as a multiple of `hidden_size`; None for a size that must be given.
      theta: base of RoPE if the config names none. partial_rotary: the family reads `partial_rotary_factor`.
      flat: `(values, where) -> values` of config.json in the keys that are read. reads: keys of this family alone.
      read: returns those as fields of `DecoderConfig`. keys: writes them.
      reader: `(reader of the files, config)` shows the tensors as the table names them. table: which tensor is which
        parameter. quantised: files may hold quantised weights (`quantised.QuantisedReader`).
      joined: the parameters as the files hold them.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    switches: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=lambda: {"hidden_act": ("silu", "swish")})
    window: WindowKind = "never"
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    absent: tuple[str, ...] = ()
    inner: int | None = None
    theta: float = RopeConfig.theta
    partial_rotary: bool = False
    flat: Callable[[Mapping[str, Any], str], Mapping[str, Any]] = lambda values, where: values
    reads: tuple[str, ...] = ()
    read: Callable[[Fields], Mapping[str, Any]] = lambda fields: {}
    keys: Callable[[DecoderConfig], Mapping[str, Any]] = lambda config: {}
    reader: Callable[[TensorReader, DecoderConfig], TensorReader] = lambda reader, config: reader
    quantised: bool = True
    table: Table = DECODER
    joined: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict


def _with_fused(*fused: Fused) -> dict[str, Any]:
    """Returns how files are read and written whose tensors hold several projections."""
    reader, joined = (functools.partial(one, fused=fused) for one in (FusedReader, join_projections))
    return {"reader": reader, "joined": joined}


_ATTENTION = {"attention_bias": ("qkv_bias", "out_bias")}

# Llama 2/3.x, Vicuna and DeepSeek-R1-Distill-Llama are all LlamaForCausalLM.
_ALL = (
    Family(
        "llama", "LlamaForCausalLM", {"max_position_embeddings": 2048},
        switches={**_ATTENTION, "mlp_bias": ("mlp_bias",)},
    ),
    Family(
        "mistral", "MistralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        window="always",
    ),
    Family(
        "qwen2", "Qwen2ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
        fixed={"qkv_bias": True}, window="switched",
    ),
    Family(
        "qwen3", "Qwen3ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
        fixed={"qk_norm": True}, switches=_ATTENTION, window="switched",
    ),
    Family(
        "gemma3_text", "Gemma3ForCausalLM", gemma3.DEFAULTS, fixed={"block": "gemma3", "qk_norm": True},
        switches=_ATTENTION, window="pattern",
        only={"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)},
        reads=gemma3.READS, flat=gemma3.flat_rope, read=gemma3.own_fields, keys=gemma3.own_keys,
        table=gemma3.TABLE, absent=("hidden_act",),
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM",
        {
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "num_local_experts": 128,
            "num_experts_per_tok": 8, "use_sliding_window": False,
        },
        fixed={"qk_norm": True}, switches=_ATTENTION,
        only={"hidden_act": ("silu", "swish"), "use_sliding_window": (False,)},
        names={"num_experts": "num_local_experts"}, read=qwen3_experts, keys=qwen3_expert_keys,
        reader=lambda reader, config: StackReader(reader), table=QWEN3_MOE, joined=split_experts,
    ),
    Family(
        "gpt_oss", "GptOssForCausalLM",
        {
            "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True,
        },
        fixed={"sinks": True, "wide_norms": True}, switches=_ATTENTION, window="alternating", theta=150000.0,
        names={"num_experts": "num_local_experts"},
        flat=flat_gpt_oss, read=gpt_oss_fields, keys=gpt_oss_keys, table=GPT_OSS, joined=join_gpt_oss,
        reader=lambda reader, config: GptOssReader(reader), quantised=False,
    ),
    Family(
        "gpt2", "GPT2LMHeadModel",
        {"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        fixed={
            "block": "gpt2", "rope": RopeConfig(kind="none"), "qkv_bias": True, "out_bias": True, "mlp_bias": True
        },
        only={
            "activation_function": ("gelu_new",),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        names={
            "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer", "intermediate_size": "n_inner", "rms_norm_eps": "layer_norm_epsilon",
        },
        absent=(
            "intermediate_size", "rms_norm_eps", "num_key_value_heads", "head_dim", "hidden_act", "rope_theta",
            "rope_scaling",
        ),
        inner=4, **_with_fused(Fused("c_attn", _QKV, axis=-1)), table=GPT2, quantised=False,
    ),
    Family(  # Phi-3, 3.5 and 4, dense
        "phi3", "Phi3ForCausalLM",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        window="always", partial_rotary=True, **_with_fused(*_PHI3.values()), table=PHI3,
        keys=lambda config: {"pad_token_id": None},  # the default is a token, which a small vocabulary does not have
    ),
    Family(
        "smollm3", "SmolLM3ForCausalLM",
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True},
        switches={**_ATTENTION, "mlp_bias": ("mlp_bias",)}, window="nope", theta=2e6,
        reads=smollm3.READS, read=smollm3.own_fields, keys=smollm3.own_keys,
    ),
)  # fmt: skip

FAMILIES = {family.architecture: family for family in _ALL}
"""Families by architecture."""


def family_of(values: Mapping[str, Any], where: object) -> Family:
    """Returns the family that a config.json names: by `model_type`, or else by `architectures`.

    Raises:
      CheckpointError: it names no supported family.
    """
    fields = Fields(values, where)
    model_type = fields.text("model_type", "", null=True)
    by_type = next((family for family in _ALL if family.model_type == model_type), None)
    listed = fields.names_of("architectures")
    named = next((FAMILIES[name] for name in listed if name in FAMILIES), None if listed else by_type)
    if named is None:
        raise CheckpointError(
            f"{where}: architectures must name one of {', '.join(sorted({*FAMILIES, *gemma3.WITH_IMAGES}))}, "
            f"got {', '.join(listed) or model_type or 'none'}. Load a model of a supported family."
        )
    if by_type is not None:  # counts where the two differ, as in transformers
        fields.contradict("architectures", f"model_type={model_type} means", by_type.architecture, named.architecture)
    return by_type or named
