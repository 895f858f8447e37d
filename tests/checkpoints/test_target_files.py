"""Targets on disk: strictness, round trips, what a directory may look like."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import eagle_jax
from eagle_jax.checkpoints import CheckpointError, load_target_checkpoint, save_target_checkpoint
from eagle_jax.config import DecoderConfig, RopeConfig
from eagle_jax.models.decoder import init_params

CONFIG = DecoderConfig(
    vocab_size=31, hidden_size=12, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
    max_position=64, eos_ids=(2, 7), bos_id=1,
)  # fmt: skip


def random_params(config=CONFIG, seed=0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), shapes)


@pytest.fixture
def saved(tmp_path):
    save_target_checkpoint(CONFIG, random_params(), tmp_path / "model", "float32")
    return tmp_path / "model"


def edit_json(path, **changes):
    """Sets keys; None as a value stays null, `...` removes the key."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def edit_tensors(path, edit):
    tensors = safetensors.numpy.load_file(path)
    edit(tensors)
    safetensors.numpy.save_file(tensors, path)


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(CONFIG, tie_word_embeddings=True, qkv_bias=True, out_bias=True, mlp_bias=True),
        dataclasses.replace(CONFIG, architecture="MistralForCausalLM", rms_norm_eps=1e-6, eos_ids=(), bos_id=None),
        dataclasses.replace(CONFIG, architecture="Qwen2ForCausalLM", qkv_bias=True, eos_ids=(5,)),
        dataclasses.replace(CONFIG, architecture="Qwen3ForCausalLM", qk_norm=True),
        *(
            dataclasses.replace(CONFIG, rope=rope)
            for rope in (
                RopeConfig(5e5, "llama3", 8.0, 16, low_freq_factor=0.5, high_freq_factor=3.0),
                RopeConfig(1e4, "linear", 2.0),
                RopeConfig(1e4, "dynamic", 4.0, 16),  # 16 x 4 is the context of CONFIG
                RopeConfig(1e4, "yarn", 4.0, 16, beta_fast=20.0, attention_factor=1.1, truncate=False),
                RopeConfig(1e4, "yarn", 4.0, 16, mscale=0.8, mscale_all_dim=0.9),
            )
        ),
    ],
    ids=lambda config: f"{config.architecture}-{config.rope.kind}-{config.tie_word_embeddings}",
)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 1500])
def test_round_trip_is_the_identity(config, shard_bytes, tmp_path):
    params = random_params(config)
    save_target_checkpoint(config, params, tmp_path, "float32", max_shard_bytes=shard_bytes)
    assert (tmp_path / "model.safetensors").is_file() == (shard_bytes > 1500)
    loaded_config, loaded = load_target_checkpoint(tmp_path)
    assert loaded_config == config
    assert_same(loaded, params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_round_trip(dtype, tmp_path):
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), random_params())
    save_target_checkpoint(CONFIG, narrow, tmp_path, dtype)
    assert_same(load_target_checkpoint(tmp_path, dtype)[1], narrow)
    # float32 holds both exactly
    assert_same(load_target_checkpoint(tmp_path)[1], jax.tree.map(lambda leaf: leaf.astype("float32"), narrow))


def test_everything_wrong_is_named_in_one_error(saved):
    def edit(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        del tensors["lm_head.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
        tensors["model.layers.2.input_layernorm.weight"] = np.zeros(12, np.float32)
        tensors["something.else"] = np.zeros(3, np.float32)
        tensors["model.norm.weight"] = np.zeros(13, np.float32)
        tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((12, 13), np.float32)

    edit_tensors(saved / "model.safetensors", edit)
    with pytest.raises(CheckpointError) as caught:
        load_target_checkpoint(saved)
    message = str(caught.value)
    assert str(saved) in message
    assert "missing (2): lm_head.weight, model.layers.1.mlp.up_proj.weight" in message or (
        "missing (2): model.layers.1.mlp.up_proj.weight, lm_head.weight" in message
    )
    assert "unexpected (3)" in message
    for name in ("layers.0.self_attn.q_proj.bias", "layers.2.input_layernorm.weight", "something.else"):
        assert name in message
    assert "model.norm.weight is [13], expected [12]" in message
    assert "model.layers.0.self_attn.k_proj.weight is [12, 13], expected [12, 12]" in message


def test_documented_extras_are_ignored(saved):
    def edit(tensors):
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)

    edit_tensors(saved / "model.safetensors", edit)
    assert_same(load_target_checkpoint(saved)[1], random_params())


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_safetensors(saved, keep):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or corrupt"):
        load_target_checkpoint(saved)


def test_a_git_lfs_pointer_is_called_one(saved):
    (saved / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a Git LFS pointer, .*run `git lfs pull`"):
        load_target_checkpoint(saved)


def test_truncated_shard_is_named(tmp_path):
    save_target_checkpoint(CONFIG, random_params(), tmp_path, "float32", max_shard_bytes=3000)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=shard.name):
        load_target_checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path):
    save_target_checkpoint(CONFIG, random_params(), tmp_path, "float32", max_shard_bytes=3000)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}, which is missing"):
        load_target_checkpoint(tmp_path)


def test_index_that_promises_more_than_the_shards_hold(tmp_path):
    save_target_checkpoint(CONFIG, random_params(), tmp_path, "float32", max_shard_bytes=3000)
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.extra"] = sorted(values["weight_map"].values())[0]
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"model\.extra"):
        load_target_checkpoint(tmp_path)


def test_index_cannot_point_outside(tmp_path):
    save_target_checkpoint(CONFIG, random_params(), tmp_path / "m", "float32", max_shard_bytes=3000)
    index = tmp_path / "m" / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.extra"] = "../secret.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"secret\.safetensors"):
        load_target_checkpoint(tmp_path / "m")


def test_no_weights(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load_target_checkpoint(saved)


def test_no_config(saved):
    (saved / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json in"):
        load_target_checkpoint(saved)


def test_broken_config(saved):
    (saved / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        load_target_checkpoint(saved)


def test_integer_weights_are_quantised(saved):
    edit_tensors(saved / "model.safetensors", lambda t: t.update({"model.norm.weight": np.zeros(12, np.int8)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored as int8: quantised"):
        load_target_checkpoint(saved)


def test_float16_overflow_is_an_error(tmp_path):
    params = random_params()
    params["norm"]["scale"] = params["norm"]["scale"].at[3].set(1e6)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*float16"):
        save_target_checkpoint(CONFIG, params, tmp_path / "model", "float16")
    save_target_checkpoint(CONFIG, params, tmp_path / "model", "float32")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*float16"):
        load_target_checkpoint(tmp_path / "model", "float16")


def test_unknown_dtype(saved):
    with pytest.raises(CheckpointError, match="dtype must be one of float32, bfloat16, float16, got 'int4'"):
        load_target_checkpoint(saved, "int4")
    with pytest.raises(CheckpointError, match=r"dtype must be one of .*, got 3"):
        eagle_jax.load_target(saved, 3)


def test_stop_tokens_come_from_the_generation_config_first(saved):
    assert load_target_checkpoint(saved)[0].eos_ids == (2, 7)
    edit_json(saved / "generation_config.json", eos_token_id=9)
    edit_json(saved / "config.json", eos_token_id=[9, 2])
    with pytest.warns(UserWarning, match=r"generation_config\.json overrides config\.json.*: \[2\] are no stop token"):
        assert load_target_checkpoint(saved)[0].eos_ids == (9,)
    edit_json(saved / "generation_config.json", eos_token_id=...)
    edit_json(saved / "config.json", eos_token_id=[4, 5, 6])
    assert load_target_checkpoint(saved)[0].eos_ids == (4, 5, 6)
    (saved / "generation_config.json").unlink()
    edit_json(saved / "config.json", eos_token_id=None)
    assert load_target_checkpoint(saved)[0].eos_ids == ()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_stop_tokens_outside_the_vocabulary_end_nothing(saved, name):
    """As in `transformers`, in which they never occur; `generate` would refuse them."""
    size = load_target_checkpoint(saved)[0].vocab_size
    edit_json(saved / "generation_config.json", eos_token_id=...)
    edit_json(saved / name, eos_token_id=[3, size, -1])
    message = rf"/{name}: eos_token_id \[{size}, -1\] lies outside the vocabulary of {size} tokens and is ignored"
    with pytest.warns(UserWarning, match=message):
        target = eagle_jax.load_target(saved)
    assert target.config.eos_ids == (3,)
    assert eagle_jax.generate(target, None, [[5]], max_new_tokens=1).tokens


def test_every_parameter_is_placed_as_it_is_read(saved):
    seen = {}

    def place(path, host):
        seen[path] = host.shape
        return jnp.asarray(host)

    _, params = load_target_checkpoint(saved, place=place)
    assert seen["layers_0/self_attn/q_proj/kernel"] == (12, 24)
    assert len(seen) == len(jax.tree.leaves(params))


class TestSaving:
    def test_wrong_parameters_are_named_and_nothing_is_written(self, tmp_path):
        params = random_params()
        del params["norm"]
        params["extra"] = {"scale": jnp.zeros(3)}
        params["lm_head"]["kernel"] = jnp.zeros((12, 30))
        with pytest.raises(CheckpointError) as caught:
            save_target_checkpoint(CONFIG, params, tmp_path / "model")
        for part in ("missing (1): norm/scale", "unexpected (1): extra/scale", "lm_head/kernel is [12, 30]"):
            assert part in str(caught.value)
        assert not list(tmp_path.iterdir())

    def test_a_failure_leaves_the_old_checkpoint(self, saved, monkeypatch):
        before = {path.name: path.read_bytes() for path in saved.iterdir()}

        def fail(*args, **kwargs):
            raise OSError("disk full")

        monkeypatch.setattr(safetensors.numpy, "save_file", fail)
        with pytest.raises(OSError, match="disk full"):
            save_target_checkpoint(CONFIG, random_params(seed=1), saved, "float32")
        assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
        assert [path.name for path in saved.parent.iterdir()] == [saved.name]

    def test_replaces_weights_and_keeps_other_files(self, saved):
        (saved / "tokenizer.json").write_text("{}")
        (saved / "pytorch_model.bin").write_bytes(b"old")
        params = random_params(seed=1)
        save_target_checkpoint(CONFIG, params, saved, "float32", max_shard_bytes=3000)
        names = {path.name for path in saved.iterdir()}
        assert {"tokenizer.json", "config.json", "model.safetensors.index.json"} <= names
        assert not names & {"model.safetensors", "pytorch_model.bin"}
        assert_same(load_target_checkpoint(saved)[1], params)
        assert [path.name for path in saved.parent.iterdir()] == [saved.name]

    def test_follows_a_link(self, saved):
        link = saved.parent / "link"
        link.symlink_to(saved)
        params = random_params(seed=1)
        save_target_checkpoint(CONFIG, params, link, "float32")
        assert link.is_symlink()
        assert_same(load_target_checkpoint(saved)[1], params)

    def test_refuses_a_directory_with_other_things_in_it(self, tmp_path):
        (tmp_path / "project" / "src").mkdir(parents=True)
        with pytest.raises(CheckpointError, match="no checkpoint directory"):
            save_target_checkpoint(CONFIG, random_params(), tmp_path / "project")
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="no checkpoint directory"):
            save_target_checkpoint(CONFIG, random_params(), tmp_path / "file")

    def test_an_architecture_that_cannot_say_it(self, tmp_path):
        config = dataclasses.replace(CONFIG, qk_norm=True)
        with pytest.raises(CheckpointError, match=r"LlamaForCausalLM cannot express .*qk_norm=True"):
            save_target_checkpoint(config, random_params(config), tmp_path / "model")
