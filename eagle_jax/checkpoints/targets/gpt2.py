"""Names the tensors of GPT-2, whose files hold queries, keys and values side by side."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.checkpoints.files.mapping import EMBEDDING, LM_HEAD, Rule, Table
from eagle_jax.checkpoints.files.tensors import TensorReader

_PROJECTIONS = ("q", "k", "v")
_PREFIX = "transformer."  # of the names in files that `transformers` writes; the first files of OpenAI have none
_LAYER = {
    "h.{i}.attn.c_proj": "layers_{i}/self_attn/o_proj",
    "h.{i}.attn.c_attn": "layers_{i}/self_attn/qkv",  # only where a file is written, see `join_projections`
    "h.{i}.mlp.c_fc": "layers_{i}/mlp/up_proj",
    "h.{i}.mlp.c_proj": "layers_{i}/mlp/down_proj",
    "h.{i}.ln_1": "layers_{i}/input_layernorm",
    "h.{i}.ln_2": "layers_{i}/post_attention_layernorm",
    "ln_f": "norm",
}


def _rules() -> list[Rule]:
    """Returns the rules of weights and biases; GPT-2 stores linear weights [in, out], as we do."""
    rules = []
    for name, path in _LAYER.items():
        weight = "scale" if "norm" in path else "kernel"
        rules += [Rule(f"{_PREFIX}{name}.weight", f"{path}/{weight}"), Rule(f"{_PREFIX}{name}.bias", f"{path}/bias")]
    for leaf, name in (("kernel", "weight"), ("bias", "bias")):
        rules.append(
            Rule(f"{_PREFIX}h.{{i}}.attn.c_attn.{name}/{{proj}}", f"layers_{{i}}/self_attn/{{proj}}_proj/{leaf}")
        )
    return rules


GPT2 = Table(
    rules=(
        Rule(f"{_PREFIX}wte.weight", EMBEDDING),
        Rule(f"{_PREFIX}wpe.weight", "embed_positions/embedding"),
        *_rules(),
        Rule(LM_HEAD, "lm_head/kernel", True),  # tied in every published model
    ),
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),  # causal masks
    canonical=lambda name: name if name.startswith((_PREFIX, "lm_head.")) else _PREFIX + name,
)


class Gpt2Reader(TensorReader):
    """Reads `c_attn` as three tensors, named `.../q`, `.../k` and `.../v`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        for name, info in list(self.infos.items()):
            if re.search(r"attn\.c_attn\.\w+$", name):
                part = info._replace(shape=(*info.shape[:-1], info.shape[-1] // len(_PROJECTIONS)))
                self.infos |= {f"{name}/{projection}": part for projection in _PROJECTIONS}
                del self.infos[name]

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor as stored, or a third of `c_attn`."""
        whole, _, projection = name.partition("/")
        array = super().read(whole)
        return np.split(array, len(_PROJECTIONS), axis=-1)[_PROJECTIONS.index(projection)] if projection else array


def join_projections(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the projections of queries, keys and values to one tensor, as files hold them."""
    out = dict(flat)
    for path in flat:
        layer, found, leaf = path.partition("/q_proj/")
        if found:
            parts = [np.asarray(out.pop(f"{layer}/{projection}_proj/{leaf}")) for projection in _PROJECTIONS]
            out[f"{layer}/qkv/{leaf}"] = np.concatenate(parts, axis=-1)
    return out
