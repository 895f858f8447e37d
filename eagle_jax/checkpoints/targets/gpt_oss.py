"""Reads and writes gpt-oss: keys of its config.json, interleaved projections, and MXFP4 tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.files.fields import Fields
from eagle_jax.checkpoints.files.mapping import DECODER, Rule, linear_rules
from eagle_jax.checkpoints.files.tensors import TensorInfo, TensorReader, TensorView
from eagle_jax.checkpoints.files.weights import Deferred
from eagle_jax.checkpoints.targets.experts import read_experts
from eagle_jax.config import DecoderConfig

_LAYER, _PATH = "model.layers.{i}.mlp.", "layers_{i}/mlp/"
GPT_OSS = DECODER._replace(
    rules=(
        *linear_rules(f"{_LAYER}router", f"{_PATH}router"),
        *linear_rules(
            f"{_LAYER}experts.{{proj}}_proj", f"{_PATH}experts/{{proj}}_proj"
        ),  # as `GptOssReader` names them
        Rule(f"{_LAYER}experts.{{name}}", f"{_PATH}experts/stored/{{name}}"),  # by `join_gpt_oss`
        Rule("model.layers.{i}.self_attn.sinks", "layers_{i}/self_attn/sinks"),
        *DECODER.rules,
    )
)
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
"""What `transformers` assumes for a config.json without RoPE parameters, the base excepted."""
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])
_PAIRS = np.stack([_FP4[np.arange(256) % 16], _FP4[np.arange(256) // 16]], axis=1)
"""The two values of a byte; the lower four bits come first."""


def flat_gpt_oss(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns config.json with RoPE parameters, and without MXFP4, which `GptOssReader` dequantises."""
    given = Fields(values, where)
    mxfp4 = given.mapping("quantization_config").values.get("quant_method") == "mxfp4"
    flat = {key: value for key, value in values.items() if not (mxfp4 and key == "quantization_config")}
    stated = given.mapping("rope_scaling").values or given.mapping("rope_parameters").values
    return flat if stated else flat | {"rope_parameters": _ROPE}


def gpt_oss_fields(fields: Fields) -> dict[str, Any]:
    """Reads the experts of a gpt-oss config.json, as fields of `DecoderConfig`.

    Raises:
      CheckpointError: a key is missing or breaks its rule.
    """
    fields.contradict("experts_per_token", "num_experts_per_tok is", fields.integer("num_experts_per_tok"))
    return read_experts(
        fields,
        intermediate_size=fields.integer("intermediate_size"),
        bias=True,
        limit=fields.number("swiglu_limit", 7.0),
        alpha=fields.number("swiglu_alpha", 1.702),
    )


def gpt_oss_keys(config: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of a gpt-oss config.json that hold its experts."""
    experts = config.experts
    if experts is None:
        return {}
    return {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "swiglu_limit": experts.limit,
        "swiglu_alpha": experts.alpha,
    }


def dequantise_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the values of MXFP4 blocks as bfloat16, which holds them exactly.

    Args:
      blocks: [..., N, 16] bytes, each with two 4-bit floats (e2m1). scales: [..., N] exponents of two, plus 127 (e8m0).

    Returns:
      [..., N * 32].
    """
    out = np.empty((*blocks.shape[:-1], 32), jnp.bfloat16)
    for index in range(len(blocks)):  # one expert at a time in float32
        exponents = scales[index].astype(np.int32)[..., None] - 127
        out[index] = np.ldexp(_PAIRS[blocks[index]].reshape(*blocks.shape[1:-1], 32), exponents)
    return out.reshape(*blocks.shape[:-2], -1)


class GptOssReader(TensorView):
    """Reads the projections of all experts as `experts.gate_proj.weight` [E, out, in], `.bias` [E, out], and so on.

    Files hold gate and up as alternating rows of one tensor, as floats [E, in, out] or in MXFP4.
    """

    def __init__(self, inner: TensorReader) -> None:
        super().__init__(inner)
        self._parts: dict[str, tuple[str, slice]] = {}
        for name, info in list(self.infos.items()):
            match = re.fullmatch(r"(.*\.experts\.)(gate_up|down)_proj(|_bias|_blocks)", name)
            if match is None:
                continue
            base, shape, dtype = name.removesuffix("_blocks"), info.shape, info.dtype
            if match[3] == "_blocks":
                scales = self.infos.get(f"{base}_scales")
                if len(shape) != 4 or scales is None or scales.shape != shape[:-1] or dtype != "uint8":
                    continue  # the loader reports the tensors as unexpected
                shape, dtype = (*shape[:2], shape[2] * 2 * shape[3]), "bfloat16"
                del self.infos[f"{base}_scales"]
            elif not match[3]:
                shape = (shape[0], *shape[:0:-1])
            del self.infos[name]
            leaf = "bias" if match[3] == "_bias" else "weight"
            for number, part in enumerate(match[2].split("_")):
                rows = slice(number, None, 1 + match[2].count("_"))
                size = len(range(*rows.indices(shape[1])))
                self.infos[f"{match[1]}{part}_proj.{leaf}"] = TensorInfo((shape[0], size, *shape[2:]), dtype, info.file)
                self._parts[f"{match[1]}{part}_proj.{leaf}"] = name, rows

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor as stored, or one projection of all experts."""
        if name not in self._parts:
            return super().read(name)
        stored, rows = self._parts[name]
        if stored.endswith("_blocks"):
            scales = super().read(stored.removesuffix("blocks") + "scales")
            return dequantise_mxfp4(super().read(stored)[:, rows], scales[:, rows])
        whole = super().read(stored)
        return np.ascontiguousarray((whole if stored.endswith("_bias") else whole.swapaxes(1, 2))[:, rows])


def _interleaved(parts: Sequence[Any]) -> np.ndarray:
    """Returns projections [E, out, in] (or [E, out]) as alternating rows of one, [E, in, out] (or [E, out])."""
    rows = np.stack([np.asarray(part) for part in parts], axis=2)
    return np.moveaxis(rows.reshape(len(rows), -1, *rows.shape[3:]), 1, -1)


def join_gpt_oss(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Joins gate and up and turns weights to [E, in, out], as float files hold them."""
    out: dict[str, Any] = {}
    for path, leaf in flat.items():
        before, found, after = path.partition("/experts/")
        if not found:
            out[path] = leaf
        elif not after.startswith("up_proj"):
            kind = "" if after.endswith("weight") else "_bias"
            both = after.startswith("gate")
            parts = (leaf, flat[path.replace("gate_proj", "up_proj")]) if both else (leaf,)
            experts, rows, *inputs = leaf.shape
            whole = Deferred((experts, *inputs, rows * len(parts)), functools.partial(_interleaved, parts))
            out[f"{before}/experts/stored/{'gate_up' if both else 'down'}_proj{kind}"] = whole
    return out
