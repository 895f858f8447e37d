"""Maps tensor names of a checkpoint to parameter paths and back, by one table per layout.

A rule is a pair of templates and a transform. One table serves loading, saving and error messages: unlike a regular
expression, a template can name a tensor that is missing.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.core.types import Params
from eagle_jax.models.decoder import init_params
from eagle_jax.models.heads import init_head_params

LM_HEAD = "lm_head.weight"
DTYPES: dict[str, Any] = {
    "float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16), "float16": np.dtype(np.float16),
}  # fmt: skip


class Rule(NamedTuple):
    """The correspondence of a tensor name and a parameter path.

    Attributes:
      name: of the tensor in the file; `{i}` stands for a number, any other `{x}` for a word.
      path: of the parameter, keys joined by "/".
      transpose: PyTorch stores linear weights [out, in], we [in, out].
    """

    name: str
    path: str
    transpose: bool = False


class Table(NamedTuple):
    """The rules of a layout, and patterns of tensors to ignore."""

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()

    def path_of(self, name: str) -> tuple[str, bool] | None:
        """Returns (path, transpose) of a tensor; None if no rule matches."""
        for rule in self.rules:
            match = _pattern(rule.name).fullmatch(name)
            if match:
                return rule.path.format(**match.groupdict()), rule.transpose
        return None

    def name_of(self, path: str) -> tuple[str, bool]:
        """Returns (tensor name, transpose) of a parameter."""
        for rule in self.rules:
            match = _pattern(rule.path).fullmatch(path)
            if match:
                return rule.name.format(**match.groupdict()), rule.transpose
        raise CheckpointError(f"parameter {path!r} has no name in this layout")


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", template)
    # re.split alternates literal text and captured field names.
    return re.compile(
        "".join(
            re.escape(part) if place % 2 == 0 else f"(?P<{part}>{'[0-9]+' if part == 'i' else '[A-Za-z_]+'})"
            for place, part in enumerate(parts)
        )
    )


_ATTENTION_AND_MLP = (
    Rule("layers.{i}.self_attn.{proj}_proj.weight", "layers_{i}/self_attn/{proj}_proj/kernel", True),
    Rule("layers.{i}.self_attn.{proj}_proj.bias", "layers_{i}/self_attn/{proj}_proj/bias"),
    Rule("layers.{i}.self_attn.{norm}_norm.weight", "layers_{i}/self_attn/{norm}_norm/scale"),
    Rule("layers.{i}.mlp.{proj}_proj.weight", "layers_{i}/mlp/{proj}_proj/kernel", True),
    Rule("layers.{i}.mlp.{proj}_proj.bias", "layers_{i}/mlp/{proj}_proj/bias"),
    Rule("layers.{i}.{norm}_layernorm.weight", "layers_{i}/{norm}_layernorm/scale"),
)

DECODER = Table(
    rules=(
        Rule("model.embed_tokens.weight", "embed_tokens/embedding"),
        *(Rule("model." + rule.name, rule.path, rule.transpose) for rule in _ATTENTION_AND_MLP),
        Rule("model.norm.weight", "norm/scale"),
        Rule("lm_head.weight", "lm_head/kernel", True),
    ),
    # Old checkpoints store the RoPE frequencies, which follow from the configuration.
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)

HEAD = Table(
    rules=(
        Rule("embed_tokens.weight", "embed_tokens/embedding"),
        Rule("fc.weight", "fc/kernel", True),
        Rule("fc.bias", "fc/bias"),
        Rule("fc_norm.{i}.weight", "fc_norm_{i}/scale"),
        Rule("input_norm.weight", "input_norm/scale"),
        # The one layer is the head: its parameters have no `layers_0` level.
        *(
            Rule(rule.name.replace("{i}", "0"), rule.path.replace("layers_{i}/", ""), rule.transpose)
            for rule in _ATTENTION_AND_MLP
        ),
        Rule("layers.0.hidden_norm.weight", "hidden_norm/scale"),
        Rule("norm.weight", "norm/scale"),
        Rule("lm_head.weight", "lm_head/kernel", True),
    ),
    ignored=(r"layers\.0\.self_attn\.rotary_emb\.inv_freq",),
)


def canonical_name(name: str) -> str:
    """Removes the prefixes in which projects differ from the name of a head's tensor."""
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def flatten(tree: Params) -> dict[str, Any]:
    """Converts a nested dict to {path: leaf}, keys joined by "/"."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}/{rest}": leaf for rest, leaf in flatten(value).items()})
        else:
            flat[key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> Params:
    """Converts {path: leaf} to a nested dict."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


@functools.lru_cache(maxsize=64)
def expected_shapes(config: DecoderConfig | HeadConfig) -> Mapping[str, tuple[int, ...]]:
    """Returns {path: shape} of the parameters of a decoder or a head, without allocating them."""
    init: Callable[..., Params] = init_params if isinstance(config, DecoderConfig) else init_head_params
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    return types.MappingProxyType({path: tuple(leaf.shape) for path, leaf in flatten(shapes).items()})


def check_dtype(dtype: str) -> np.dtype:
    """Returns the NumPy dtype of a name.

    Raises:
      CheckpointError: it is none of float32, bfloat16, float16.
    """
    return DTYPES[dtype_name(dtype)]


def dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype, given by name or as a JAX type.

    Raises:
      CheckpointError: it is none of them.
    """
    try:
        name = dtype if dtype is None or isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:  # no type at all
        name = None
    if name not in DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    return name
