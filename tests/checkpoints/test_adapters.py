"""Checks that adapters of qwix are merged into the weights that they change.

The products are those of tunix's layers with adapters, written down apart from the tables. `tests/integrations`
compares with qwix itself.
"""

from __future__ import annotations

import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from eagle_jax import CheckpointError, ConfigError, Target
from eagle_jax.checkpoints.memory import leaves_by_path, tunix_names
from eagle_jax.checkpoints.memory.adapters import adapter_alpha
from eagle_jax.runtime.importing import Importer
from tests.checkpoints.memory_layouts import FAMILIES, GEMMA, drawn, tunix_model, tunix_tree

RANK, ALPHA = 3, 12.0
PRODUCTS = {
    "attn/o_proj/w": "NHr,rD->NHD", "attn/attn_vec_einsum/w": "NHr,rD->NHD", "attn/q_einsum/w": "Dr,rNH->NDH",
    "attn/kv_einsum/w": "Dr,rCKH->CKDH", "_proj/w": "Dr,rNH->DNH", "_proj/kernel": "Dr,rF->DF",
    "lm_head/w": "Dr,rV->DV",
}  # fmt: skip
"""Adapters of a leaf and the change of it, by the end of its path; the first that fits counts."""


def with_adapters(tree, dtype="float32"):
    """Returns the leaves of a tree in the layout of tunix with random adapters, and leaves without that equal them."""
    leaves, merged, rng = leaves_by_path(tree), {}, np.random.default_rng(0)
    found = {path: leaf.astype(dtype) for path, leaf in leaves.items()}
    for path, leaf in leaves.items():
        merged[path] = found[path]
        product = next((product for end, product in PRODUCTS.items() if path.endswith(end)), None)
        if product is None:
            continue
        parts, letters = product.split("->")
        size = dict(zip(letters, leaf.shape, strict=True)) | {"r": RANK}
        shapes = [[size[letter] for letter in part] for part in parts.split(",")]
        down, up = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
        change = np.einsum(product, np.asarray(down, np.float64), np.asarray(up, np.float64)) * ALPHA / RANK
        merged[path] = jnp.asarray(np.asarray(found[path], np.float64) + change, dtype)
        if path.endswith("kernel"):  # a `Linear` joins its inputs, and its outputs
            down, up = down.reshape(-1, RANK), up.reshape(RANK, -1)
        found |= {f"{path}_lora_a": down, f"{path}_lora_b": up}
    return found, merged


@pytest.mark.parametrize(("kind", "config"), [*FAMILIES.items(), ("Gemma3", GEMMA)])
def test_adapters_are_merged(kind, config):
    tree = tunix_tree(kind, config, drawn(config))
    leaves, merged = with_adapters(tree)
    model = tunix_model(kind, config, drawn(config))
    found = Importer(tunix_names(model, ALPHA), config)(leaves)
    expected = Importer(tunix_names(model), config)(merged)
    assert len(leaves) == len(merged) + 2 * sum(any(path.endswith(end) for end in PRODUCTS) for path in merged)
    for path, array in flatten_dict(expected, sep="/").items():
        np.testing.assert_allclose(flatten_dict(found, sep="/")[path], array, atol=1e-5, err_msg=path)


def test_a_model_with_adapters():
    """In bfloat16 the sum is rounded once, and a rank of another layer counts for that layer."""
    config = FAMILIES["Qwen3"]
    leaves, _ = with_adapters(tunix_tree("Qwen3", config, drawn(config)), "bfloat16")
    path = "layers/0/mlp/up_proj/kernel"
    leaves[f"{path}_lora_a"], leaves[f"{path}_lora_b"] = leaves[f"{path}_lora_a"][:, :1], leaves[f"{path}_lora_b"][:1]
    model = tunix_model("Qwen3", config, drawn(config))
    importer = Importer(tunix_names(model, ALPHA), config, "bfloat16")
    found = importer(leaves)["layers_0"]["mlp"]["up_proj"]["weight"]
    weight, down, up = (np.asarray(leaves[path + end], np.float64) for end in ("", "_lora_a", "_lora_b"))
    np.testing.assert_array_equal(found, jnp.asarray((weight + ALPHA * down @ up).T, jnp.bfloat16))
    assert importer(leaves, old=importer(leaves)) and importer.update_program._cache_size() == 1


@pytest.mark.parametrize(("alpha", "edit", "message"), [
    (None, lambda leaves: None, r"got 'layers/0/attn/k_proj/w_lora_a' \(30 unknown\). Pass lora_alpha if these are"),
    (ALPHA, lambda leaves: leaves.update({"layers/1/mlp/up_proj/kernel_lora_b": jnp.ones((RANK, 5))}),
     r"layers/1/mlp/up_proj/kernel \[16, 20\] needs adapters \[inputs, rank\] and \[rank, outputs\], got \[16, 3\] and "
     r"\[3, 5\]. Merge them"),
    (ALPHA, lambda leaves: leaves.update({"layers/1/mlp/up_proj/kernel_lora_b": jnp.ones((RANK + 1, 20))}),
     r"layers/1/mlp/up_proj/kernel \[16, 20\] needs adapters"),
    (ALPHA, lambda leaves: leaves.pop("layers/1/attn/o_proj/w_lora_a"), "got 'layers/1/attn/o_proj/w_lora_b'"),
    (ALPHA, lambda leaves: leaves.update({f"final_norm/w_lora_{part}": jnp.ones((16, 16)) for part in "ab"}),
     r"final_norm/w \[16\] needs adapters"),
])  # fmt: skip
def test_wrong_adapters_are_named(alpha, edit, message, monkeypatch):
    config = FAMILIES["Qwen3"]
    leaves, _ = with_adapters(tunix_tree("Qwen3", config, drawn(config)))
    edit(leaves)
    importer = Importer(tunix_names(tunix_model("Qwen3", config, drawn(config)), alpha), config)
    monkeypatch.setattr(importer, "first_program", lambda *_: pytest.fail("went on to compile"))
    with pytest.raises(CheckpointError, match=message):
        importer(leaves)


def wrapped(model, *rules):
    """The model with `__call__` as qwix wraps it: the provider of the rules is in a closure."""

    class Provider:
        def __init__(self):
            self._rules = list(rules)

        def process(self, *args):
            return args

    def wrapper(transform):
        def call(self, *args):
            return transform(*args)

        return call

    call = wrapper(functools.partial(Provider().process, 1))
    model.__class__ = type(type(model).__name__, (type(model),), {"__call__": call})
    return model


def rule(alpha=ALPHA, dropout=0.0, weight_qtype=None):
    return types.SimpleNamespace(alpha=alpha, dropout=dropout, weight_qtype=weight_qtype)


def test_alpha_is_read_from_the_rules_of_qwix():
    config = FAMILIES["Qwen3"]
    model = tunix_model("Qwen3", config, drawn(config))
    assert adapter_alpha(model) is None and tunix_names(model).lora_alpha is None
    wrapped(model, rule(), types.SimpleNamespace(weight_qtype=None), rule())
    assert adapter_alpha(model) == tunix_names(model).lora_alpha == ALPHA
    assert tunix_names(model) == tunix_names(model, ALPHA)
    with pytest.raises(ConfigError, match=r"must be that of the model's LoRA rules, 12.0, got 16.0. Leave it out"):
        tunix_names(model, 16.0)


@pytest.mark.parametrize(("rules", "message"), [
    ((rule(), rule(alpha=4.0)), r"LoRA rules of one alpha, got \[4.0, 12.0\]. Give every rule"),
    ((rule(), rule(dropout=0.1)), "LoRA rules without dropout, got 0.1. Set it to 0"),
    ((rule(weight_qtype="int8"),), r"float weights under its adapters, got quantised ones \(QLoRA\)"),
])  # fmt: skip
def test_rules_that_cannot_be_merged_are_errors(rules, message):
    config = FAMILIES["Qwen3"]
    with pytest.raises(CheckpointError, match=message):
        Target.from_tunix(wrapped(tunix_model("Qwen3", config, drawn(config)), *rules))


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_is_a_number_above_zero(alpha):
    config = FAMILIES["Qwen3"]
    with pytest.raises(ConfigError, match=r"lora_alpha must be a number above 0, got .*Leave it out"):
        Target.from_tunix(tunix_model("Qwen3", config, drawn(config)), lora_alpha=alpha)
