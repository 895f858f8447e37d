"""Reads and writes mixtures of experts: their keys of config.json, and tensors of single experts as stacks."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from eagle_jax.checkpoints.files.fields import CheckpointError, Fields, notice
from eagle_jax.checkpoints.files.mapping import DECODER, Rule, linear_rules
from eagle_jax.checkpoints.files.tensors import TensorInfo, TensorReader, TensorView
from eagle_jax.checkpoints.files.weights import Deferred, to_floats
from eagle_jax.config import ConfigError, DecoderConfig, ExpertsConfig

_LAYER, _PATH = "model.layers.{i}.mlp.", "layers_{i}/mlp/"
QWEN3_MOE = DECODER._replace(
    rules=(
        *linear_rules(f"{_LAYER}gate", f"{_PATH}router"),
        # A file holds tensors of single experts; `StackReader` and `split_experts` know them by the name of the stack.
        Rule(f"{_LAYER}experts.{{proj}}_proj.weight", f"{_PATH}experts/{{proj}}_proj/weight"),
        Rule(f"{_LAYER}experts.{{n}}.{{proj}}_proj.weight", f"{_PATH}experts/{{n}}/{{proj}}_proj/weight"),
        *DECODER.rules,
    )
)


def qwen3_experts(fields: Fields) -> dict[str, Any]:
    """Reads the experts of a Qwen3-MoE config.json, as fields of `DecoderConfig`.

    Raises:
      CheckpointError: a key is missing or breaks its rule.
    """
    layers, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", 1)
    plain = fields.ids("mlp_only_layers")
    return read_experts(
        fields,
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        normalise=fields.flag("norm_topk_prob"),
        dense_layers=tuple(layer for layer in range(layers) if layer in plain or (layer + 1) % step),
    )


def read_experts(fields: Fields, **others: Any) -> dict[str, Any]:
    """Returns the field `experts` of `DecoderConfig` with the keys that families share; `others` holds the rest."""
    count, top_k = fields.integer("num_experts"), fields.integer("num_experts_per_tok")
    try:
        return {"experts": ExpertsConfig(num_experts=count, top_k=top_k, **others)}
    except ConfigError:
        name = fields.names["num_experts"]
        fields.fail("num_experts_per_tok", f"at most {name}={count}")


def qwen3_expert_keys(config: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of a Qwen3-MoE config.json that hold its experts."""
    experts = config.experts
    if experts is None:
        return {}
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.dense_layers),
    }


class StackReader(TensorView):
    """Reads the tensors `experts.0.gate_proj.weight`, `experts.1....` as one, named `experts.gate_proj.weight`.

    Raises:
      CheckpointError: an expert is missing, or has another shape or dtype than the first.
    """

    def __init__(self, inner: TensorReader) -> None:
        super().__init__(inner)
        self._members: dict[str, list[str]] = {}
        found: dict[str, dict[int, str]] = {}
        for name in self.infos:
            if match := re.fullmatch(r"(.*\.experts\.)([0-9]+)\.(.*)", name):
                found.setdefault(match[1] + match[3], {})[int(match[2])] = name
        for stack, members in found.items():
            names = [members.get(number) for number in range(max(members) + 1)]
            infos = [self.infos.pop(name) for name in members.values()]
            first = infos[0]
            if None in names or any((info.shape, info.dtype) != (first.shape, first.dtype) for info in infos):
                raise CheckpointError(
                    f"{self.directory}: {stack} must have experts 0 to {max(members)} of one shape and dtype, got "
                    f"{len(infos)} of {len({info.shape for info in infos})} shapes. Fetch the checkpoint again."
                )
            self.infos[stack] = TensorInfo((len(infos), *first.shape), first.dtype, first.file)
            self._members[stack] = [name for name in names if name is not None]

    def read(self, name: str) -> Any:
        """Reads a tensor as stored, or the stack of a projection [E, out, in], which may be quantised by channel."""
        if name not in self._members:
            return super().read(name)
        members = [super(StackReader, self).read(member) for member in self._members[name]]
        if any(isinstance(one, Mapping) and (one["q"].ndim == 3 or "zero" in one) for one in members):
            # The product of experts has one scale per output, and no zero point.
            members = [to_floats(one) for one in members]
            notice(
                f"{self.directory}: experts are quantised in groups, in blocks or with zero points: they were "
                'dequantised. weights="int8" or "fp8" quantises them again'
            )
        return jax.tree.map(lambda *parts: np.stack(parts), *members)


def split_experts(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Splits the stacks into tensors of single experts, as files hold them."""
    out: dict[str, Any] = {}
    for path, leaf in flat.items():
        before, found, after = path.partition("/experts/")
        if not found:
            out[path] = leaf
            continue
        for index in range(len(leaf)):
            one = Deferred(tuple(leaf.shape[1:]), functools.partial(operator.getitem, leaf, index))
            out[f"{before}/experts/{index}/{after}"] = one
    return out
