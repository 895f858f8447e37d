"""Checks that models in memory are imported with their values, without a file: tables of names, messages, donation.

The trees have the shapes of tunix, gemma and MaxText. `tests/integrations` compares with tunix's own logits.
"""

from __future__ import annotations

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eagle_jax
from eagle_jax import CheckpointError, ConfigError, Target
from eagle_jax.checkpoints.memory import Leaf, Names, leaves_by_path, maxtext_names, tunix_config, tunix_names
from eagle_jax.parallel import make_mesh, param_shardings
from eagle_jax.runtime.importing import Importer, importer_of
from tests.checkpoints.memory_layouts import (
    FAMILIES,
    GEMMA,
    Node,
    QueryNorm,
    drawn,
    gemma_attention,
    gemma_norms,
    gemma_sizes,
    maxtext_tree,
    stacked,
    tunix_model,
    tunix_tree,
)  # fmt: skip


def check_same(found, expected):
    assert flatten_dict(found).keys() == flatten_dict(expected).keys()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, expected)


@pytest.mark.parametrize(("kind", "config"), [*FAMILIES.items(), ("Gemma3", GEMMA)])
def test_tunix_models(kind, config):
    params = drawn(config)
    target = Target.from_tunix(tunix_model(kind, config, params), max_position=64, eos_ids=config.eos_ids)
    assert target.config == config
    check_same(target.params, params)
    assert target.name == kind and target.dtype == "float32"


def test_a_model_of_tunix_generates():
    config = FAMILIES["Qwen3"]
    target = Target.from_tunix(tunix_model("Qwen3", config, drawn(config)), max_position=64)
    own = Target.from_params(config, drawn(config))
    options = dict(max_new_tokens=12, eos_ids=())
    ours = eagle_jax.generate(target, eagle_jax.prompt_lookup(target), [[1, 2, 3]], **options)
    assert ours.tokens == eagle_jax.generate(own, None, [[1, 2, 3]], **options).tokens


def test_equal_heads_are_one_array():
    config = dataclasses.replace(GEMMA, num_kv_heads=4, hidden_size=20, query_scalar=5)
    params = drawn(config)
    model = tunix_model("Gemma3", config, params)
    model.config.query_pre_attn_norm = QueryNorm.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
    for layer in model.layers:
        joined = jnp.concatenate([layer.attn.q_einsum.w[...][None], layer.attn.kv_einsum.w[...]])
        del layer.attn.q_einsum, layer.attn.kv_einsum
        layer.attn.qkv_einsum = Node({"w": joined})
    target = Target.from_tunix(model, max_position=64)
    assert target.config == config
    check_same(target.params, params)


def test_the_base_of_the_rotation_is_what_the_model_computes():
    config = FAMILIES["Llama3"]

    def attention(source):
        space = {}
        exec(f"def apply_rope(x, positions, head_dim, rope_theta=1_000_000): ...\ndef block(self, x): {source}", space)
        return space["block"]

    def theta(source):
        model = tunix_model("Llama3", config, drawn(config))
        for layer in model.layers:
            layer.attn.__class__ = type("Attention", (Node,), {"block": attention(source)})
        return tunix_config(model, 64).rope.theta

    with pytest.warns(UserWarning, match=r"rope_theta is 500000.0, but its attention rotates by .* 1000000"):
        assert theta("return apply_rope(x, x, head_dim=2)") == 1_000_000
    assert theta("return apply_rope(x, x, 2, self.config.rope_theta)") == 500_000


@pytest.mark.parametrize("transposed", [True, False])
def test_gemma_parameters(transposed):
    params = drawn(GEMMA)
    flat = flatten_dict(params, sep="/")
    order = (lambda gate: gate) if transposed else (lambda gate: gate.transpose(0, 2, 1))
    tree = {
        f"layer_{i}": {
            "attn": gemma_attention(GEMMA, flat, i),
            "mlp": {
                "gating_einsum": order(jnp.stack([flat[f"layers_{i}/mlp/{p}_proj/weight"] for p in ("gate", "up")])),
                "linear": flat[f"layers_{i}/mlp/down_proj/weight"].T,
            },
            **gemma_norms(flat, i),
        }
        for i in range(GEMMA.num_layers)
    }
    tree["embedder"] = {"input_embedding": flat["embed_tokens/embedding"], "mm_input_projection": {"w": jnp.ones(3)}}
    tree["final_norm"] = {"scale": flat["norm/scale"]}
    kind = enum.Enum("Kind", ["GLOBAL", "LOCAL_SLIDING"])
    given = gemma_sizes(
        GEMMA, transpose_gating_einsum=transposed, final_logit_softcap=None, attn_logits_soft_cap=None,
        use_post_attn_norm=True, use_post_ffw_norm=True, use_qk_norm=True,
        attention_types=[kind.LOCAL_SLIDING if window else kind.GLOBAL for window in GEMMA.windows],
    )  # fmt: skip
    target = Target.from_gemma(tree, given, max_position=64)
    assert target.config == GEMMA
    check_same(target.params, params)
    given.final_logit_softcap = 30.0
    with pytest.raises(CheckpointError, match=r"config must have final_logit_softcap=None, got 30.0. Pass a Gemma 3"):
        Target.from_gemma(tree, given)
    del given.final_logit_softcap
    with pytest.raises(CheckpointError, match="config must have final_logit_softcap=None, got no such field"):
        Target.from_gemma(tree, given)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("config", [*FAMILIES.values(), GEMMA], ids=lambda config: config.architecture)
def test_maxtext_parameters(config, scan):
    params = drawn(config)
    tree = maxtext_tree(config, params)
    for name, axis in (("token_embedder/embedding", 0), ("decoder/logits_dense/kernel", 1)):
        if name in tree:  # MaxText pads vocabularies
            tree[name] = jnp.pad(tree[name], [(0, 8 * (axis == own)) for own in (0, 1)], constant_values=9)
    if scan:
        tree = stacked(tree, config, 6 if config.block == "gemma3" else 1)
    target = Target.from_maxtext({"params": {"params": unflatten_dict(tree, sep="/")}}, config)
    assert target.config == config
    found = flatten_dict(target.params, sep="/")
    for path, expected in flatten_dict(params, sep="/").items():
        np.testing.assert_allclose(found[path], expected, atol=1e-6, err_msg=path)


def test_maxtext_errors():
    config = FAMILIES["Qwen3"]
    tree = stacked(maxtext_tree(config, drawn(config)), config, 1)
    with pytest.raises(CheckpointError, match=r"decoder/layers/.* must have 3 layers on axis 1, got shape"):
        Target.from_maxtext(unflatten_dict(tree, sep="/"), dataclasses.replace(config, num_layers=3))
    with pytest.raises(CheckpointError, match=r"config must be of a dense .*, got GPT2LMHeadModel. Convert"):
        maxtext_names(dataclasses.replace(config, architecture="GPT2LMHeadModel"))


@pytest.mark.parametrize(("edit", "message"), [
    (lambda tree: tree["layers"][1]["attn"].pop("k_norm"),
     r"must have the parameter layers/1/attn/k_norm/w \(named layers_1/self_attn/k_norm/scale in this lib"),
    (lambda tree: tree["layers"][0]["attn"]["q_proj"].update(w_lora_a=jnp.ones(2)),
     r"must be those of Qwen3ForCausalLM, got 'layers/0/attn/q_proj/w_lora_a' \(1 unknown\). Pass lora_alpha"),
    (lambda tree: tree["layers"].append(tree["layers"][0]), "got 'layers/2/attn/k_norm/w'"),
    (lambda tree: tree["final_norm"].update(w=jnp.ones(3)),
     r"final_norm/w must have the shape \[16\], got \[3\]"),
    (lambda tree: tree["lm_head"].update(w=jnp.ones((16, 24, 1))),
     r"lm_head/w must have a shape that the axes DV->V,D turn into \[24, 16\], got \[16, 24, 1\]"),
])  # fmt: skip
def test_a_wrong_leaf_is_named(edit, message, monkeypatch):
    config = FAMILIES["Qwen3"]
    model = tunix_model("Qwen3", config, drawn(config))
    tree = tunix_tree("Qwen3", config, drawn(config))
    edit(tree)
    importer = Importer(tunix_names(model), config)
    monkeypatch.setattr(importer, "first_program", lambda *_: pytest.fail("went on to compile"))
    with pytest.raises(CheckpointError, match=message):
        importer(leaves_by_path(tree))


def test_other_models_are_errors():
    with pytest.raises(CheckpointError, match="model must be a tunix Llama3, Qwen2, Qwen3, Gemma3, got a Node"):
        Target.from_tunix(Node({}))
    config = FAMILIES["Qwen3"]
    with pytest.raises(CheckpointError, match="model must be without experts, got num_experts=8"):
        Target.from_tunix(tunix_model("Qwen3", config, drawn(config), num_experts=8))
    with pytest.raises(CheckpointError, match=r"model: DecoderConfig.num_heads must be a multiple"):
        Target.from_tunix(tunix_model("Qwen3", config, drawn(config), num_kv_heads=3))


def test_any_tree_by_a_table():
    """A table of one's own: here of our layout under other names, with boxed kernels as those of Linen."""
    config = FAMILIES["Llama3"]
    params = drawn(config)
    names = Names((Leaf("layers_{i}/{block}/{name}/weight", "model/h_{i}/{block}_{name}/kernel", "IO->O,I"),
                   Leaf("layers_{i}/{name}/scale", "model/h_{i}/{name}"), Leaf("norm/scale", "model/norm"),
                   Leaf("{name}/embedding", "model/wte"), Leaf("lm_head/weight", "head")),
                  ignored=("model/mask",))  # fmt: skip
    tree = {"head": params["lm_head"]["weight"], "model": {"wte": params["embed_tokens"]["embedding"],
            "norm": params["norm"]["scale"], "mask": jnp.ones(2)}}  # fmt: skip
    for i in range(config.num_layers):
        layer = params[f"layers_{i}"]
        tree["model"][f"h_{i}"] = {name: part["scale"] for name, part in layer.items() if "scale" in part} | {
            f"{block}_{name}": {"kernel": nn.Partitioned(layer[block][name]["weight"].T, ("embed", None))}
            for block in ("self_attn", "mlp") for name in layer[block]
        }  # fmt: skip
    check_same(Target.from_tree(tree, config, names).params, params)
    with pytest.raises(CheckpointError, match="names must have a rule for the parameter 'embed_tokens/embedding'"):
        Target.from_tree(tree, config, Names(names.leaves[:1]))


def test_an_update_writes_into_the_old_buffers_without_compiling():
    config = FAMILIES["Qwen3"]
    names = tunix_names(tunix_model("Qwen3", config, drawn(config)))
    importer = Importer(names, config)
    leaves = [leaves_by_path(tunix_tree("Qwen3", config, drawn(config, seed))) for seed in range(3)]
    params = importer(leaves[0])
    compiled = importer.update_program.lower(params, leaves[1]).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    with jax.transfer_guard("disallow_explicit"):  # tunix updates a rollout under such guards
        updated = importer(leaves[1], old=params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    check_same(updated, drawn(config, 1))
    check_same(importer(leaves[2], old=updated), drawn(config, 2))
    assert importer.update_program._cache_size() == 1
    assert not any(leaf.is_deleted() for tree in leaves for leaf in tree.values())


def test_an_update_of_another_mesh_deletes_the_old_weights():
    config = FAMILIES["Qwen3"]
    ours, home = make_mesh(fsdp=2, devices=jax.devices()[:2]), jax.devices()[3]
    importer = Importer(tunix_names(tunix_model("Qwen3", config, drawn(config))), config, mesh=ours)
    params = None
    for seed in range(2):
        tree, old = leaves_by_path(tunix_tree("Qwen3", config, drawn(config, seed))), params
        params = importer({path: jax.device_put(leaf, home) for path, leaf in tree.items()}, old=old)
        check_same(params, drawn(config, seed))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))


def test_a_dtype_or_a_table_of_another_kind_is_an_error():
    config = FAMILIES["Qwen3"]
    model = tunix_model("Qwen3", config, drawn(config))
    for dtype in ("int8", "foo"):
        with pytest.raises(CheckpointError, match=f"dtype must be one of float32, bfloat16, float16, got '{dtype}'"):
            Target.from_tunix(model, dtype=dtype)
    with pytest.raises(ConfigError, match=r"config and names must be .*, got a Names and a DecoderConfig"):
        Target.from_tree(leaves_by_path(model), tunix_names(model), config)


def test_a_second_import_compiles_nothing_and_is_checked():
    config = dataclasses.replace(FAMILIES["Qwen3"], max_position=60)  # of this test alone
    models = [tunix_model("Qwen3", config, drawn(config, seed)) for seed in range(2)]
    for seed, model in enumerate(models):
        check_same(Target.from_tunix(model, max_position=60, eos_ids=config.eos_ids).params, drawn(config, seed))
    assert importer_of(tunix_names(models[0]), config, None, None).first_program._cache_size() == 1
    models[0].final_norm.w = nnx.Param(jnp.ones(3))
    with pytest.raises(CheckpointError, match="final_norm/w must have the shape"):
        Target.from_tunix(models[0], max_position=60, eos_ids=config.eos_ids)


def test_the_source_may_be_deleted():
    """A leaf that needs no change, as a norm, is copied as well: tunix's trainer may donate the source."""
    config = FAMILIES["Qwen3"]
    leaves = leaves_by_path(tunix_tree("Qwen3", config, drawn(config)))
    names = tunix_names(tunix_model("Qwen3", config, drawn(config)))
    params = Importer(names, config)(leaves)
    for leaf in leaves.values():
        leaf.delete()
    check_same(params, drawn(config))


def test_shardings_are_kept_or_those_of_a_mesh():
    config = FAMILIES["Qwen3"]
    theirs = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
    specs = {"q_proj/w": P("fsdp", "tp", None), "o_proj/w": P("tp", None, "fsdp"), "input_embedding": P("tp", "fsdp")}

    def place(path, leaf):
        spec = next((spec for end, spec in specs.items() if path.endswith(end)), P())
        return jax.device_put(leaf, NamedSharding(theirs, spec))

    model = tunix_model("Qwen3", config, drawn(config))
    tree = leaves_by_path(model)
    placed = {path: place(path, leaf) for path, leaf in tree.items()}
    kept = Target.from_tree(placed, config, tunix_names(model)).params
    attention = kept["layers_0"]["self_attn"]
    shards = [weight.sharding.shard_shape(weight.shape) for weight in (
        kept["embed_tokens"]["embedding"], attention["q_proj"]["weight"], attention["o_proj"]["weight"]
    )]  # fmt: skip
    assert shards == [(12, 8), (12, 8), (8, 12)]

    ours = make_mesh(fsdp=2, tensor=2)
    for leaves in (placed, tree, {path: jax.device_put(leaf, jax.devices()[3]) for path, leaf in tree.items()}):
        spread = Target.from_tree(leaves, config, tunix_names(model), mesh=ours)
        homes = param_shardings(spread.params, ours)
        same = lambda leaf, home: leaf.sharding.is_equivalent_to(home, leaf.ndim)  # noqa: E731
        assert all(jax.tree.leaves(jax.tree.map(same, spread.params, homes)))
        check_same(spread.params, drawn(config))
    with pytest.raises(ConfigError, match="num_kv_heads must be a multiple of tensor=4"):
        Target.from_tree(tree, config, tunix_names(model), mesh=make_mesh(tensor=4))


def test_dtype_is_that_of_the_leaves_or_given():
    config = FAMILIES["Qwen3"]
    model = tunix_model("Qwen3", config, drawn(config))
    for dtype in ("float32", "bfloat16"):
        target = Target.from_tunix(model, dtype=dtype)
        assert target.dtype == dtype and {str(leaf.dtype) for leaf in jax.tree.leaves(target.params)} == {dtype}
