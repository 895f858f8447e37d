"""Maps tensor names of a checkpoint to parameter paths and back, by one table per layout.

A rule is a pair of templates and a transform. One table serves loading, saving and error messages: unlike a regular
expression, a template can name a tensor that is missing.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.config import DecoderConfig, HeadConfig, MedusaConfig
from eagle_jax.core.types import Params
from eagle_jax.models import init_head_params, init_medusa_params, init_params
from eagle_jax.models.quantised import Scheme

LM_HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens/embedding"
"""Path of the input embedding among the parameters."""
DTYPES = {name: jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}


class Rule(NamedTuple):
    """The correspondence of a tensor name and a parameter path.

    Attributes:
      name: of the tensor in the file; `{i}` and `{n}` stand for numbers, `{name}` for a word.
      path: of the parameter, keys joined by "/".
      transpose: the file stores the weight [in, out], as GPT-2's do.
    """

    name: str
    path: str
    transpose: bool = False


class Table(NamedTuple):
    """The mapping from tensor names of a layout to parameters.

    Attributes:
      rules: the first that matches a name or a path counts.
      ignored: patterns of tensors that are not read, besides the RoPE frequencies of old files.
      canonical: a tensor's name in a file -> its name in the rules; prefixes differ between projects.
    """

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    canonical: Callable[[str], str] = str

    def path_of(self, name: str) -> tuple[str, bool] | None:
        """Returns (path, transpose) of a tensor; None if no rule matches."""
        for rule in self.rules:
            match = template_pattern(rule.name).fullmatch(self.canonical(name))
            if match:
                return rule.path.format(**match.groupdict()), rule.transpose
        return None

    def name_of(self, path: str) -> tuple[str, bool]:
        """Returns (tensor name, transpose) of a parameter.

        Raises:
          CheckpointError: no rule matches.
        """
        for rule in self.rules:
            match = template_pattern(rule.path).fullmatch(path)
            if match:
                return rule.name.format(**match.groupdict()), rule.transpose
        raise CheckpointError(f"parameter must be one of this layout, got {path!r}. Leave it out.")

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor is not read."""
        plain = self.canonical(name)
        return plain.endswith("rotary_emb.inv_freq") or any(re.fullmatch(pattern, plain) for pattern in self.ignored)

    def ignoring(self, *names: str) -> Table:
        """Returns the table without the tensors of these names."""
        return self._replace(ignored=(*self.ignored, *map(re.escape, names)))


@functools.cache
def template_pattern(template: str) -> re.Pattern[str]:
    """Returns the pattern of a template, whose fields are its groups."""
    parts = re.split(r"\{(\w+)\}", template)
    # re.split alternates literal text and captured field names.
    return re.compile(
        "".join(
            re.escape(part) if place % 2 == 0 else f"(?P<{part}>{'[0-9]+' if part in ('i', 'n') else '[A-Za-z_]+'})"
            for place, part in enumerate(parts)
        )
    )


def linear_rules(name: str, path: str, *, transpose: bool = False) -> tuple[Rule, Rule]:
    """Returns the rules of the weight and the bias of a linear layer."""
    return Rule(f"{name}.weight", f"{path}/weight", transpose), Rule(f"{name}.bias", f"{path}/bias")


def layer_rules(name: str, path: str) -> tuple[Rule, ...]:
    """Returns the rules of a Llama-like layer whose tensor names and parameter paths begin with these."""
    return (
        *linear_rules(f"{name}self_attn.{{proj}}_proj", f"{path}self_attn/{{proj}}_proj"),
        *linear_rules(f"{name}mlp.{{proj}}_proj", f"{path}mlp/{{proj}}_proj"),
        Rule(f"{name}self_attn.{{norm}}_norm.weight", f"{path}self_attn/{{norm}}_norm/scale"),
        Rule(f"{name}{{norm}}_layernorm.weight", f"{path}{{norm}}_layernorm/scale"),
    )


DECODER = Table(
    rules=(
        Rule("model.embed_tokens.weight", EMBEDDING),
        *layer_rules("model.layers.{i}.", "layers_{i}/"),
        Rule("model.norm.weight", "norm/scale"),
        Rule(LM_HEAD, "lm_head/weight"),
    ),
)


def head_table(prefix: str) -> Table:
    """Returns the table of EAGLE heads whose one layer has this prefix, "midlayer." or "layers.0."."""
    return Table(
        rules=(
            Rule("embed_tokens.weight", EMBEDDING),
            *linear_rules("fc", "fc"),
            Rule("fc_norm.{i}.weight", "fc_norm_{i}/scale"),
            Rule("input_norm.weight", "input_norm/scale"),
            *layer_rules(prefix, ""),
            Rule(f"{prefix}hidden_norm.weight", "hidden_norm/scale"),
            Rule("norm.weight", "norm/scale"),
            Rule(LM_HEAD, "lm_head/weight"),
        ),
        canonical=lambda name: name.removeprefix("model."),
    )


def canonical_name(name: str) -> str:
    """Returns the name of a head's tensor without the prefixes in which projects differ."""
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def flatten(tree: Params) -> dict[str, Any]:
    """Converts a nested dict to {path: leaf}, keys joined by "/"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


_INITS: dict[type, Callable[..., Params]] = {
    DecoderConfig: init_params, HeadConfig: init_head_params, MedusaConfig: init_medusa_params,
}  # fmt: skip


@functools.lru_cache(maxsize=64)
def expected_shapes(config: DecoderConfig | HeadConfig | MedusaConfig) -> Mapping[str, tuple[int, ...]]:
    """Returns {path: shape} of the parameters of a decoder or of heads, without allocating them.

    Paths of heads begin below the keys "head" and "heads".
    """
    shapes = flatten(jax.eval_shape(lambda: _INITS[type(config)](config, jax.random.key(0))))
    return types.MappingProxyType({re.sub("^heads?/", "", path): tuple(leaf.shape) for path, leaf in shapes.items()})


def check_dtype(dtype: Any) -> np.dtype:
    """Returns the NumPy dtype of a name or a JAX type.

    Raises:
      CheckpointError: it is not float32, bfloat16 or float16.
    """
    try:
        return DTYPES[np.dtype(dtype).name]
    except (TypeError, KeyError):
        raise CheckpointError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}. Choose one.") from None


def check_scheme(weights: str | None) -> Scheme | None:
    """Returns the scheme of quantised weights of a name.

    Raises:
      CheckpointError: it is not int8, int4, fp8 or None.
    """
    for scheme in (None, *get_args(Scheme)):
        if weights == scheme:
            return scheme
    known = ", ".join(get_args(Scheme))
    raise CheckpointError(f"weights must be one of {known} or None, got {weights!r}. Choose one.")
