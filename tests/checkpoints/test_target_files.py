"""Tests targets on disk: safetensors and torch files, tied weights, errors, stop tokens, saving."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import eagle_jax
from eagle_jax.checkpoints import CheckpointError, load_target_checkpoint, save_target_checkpoint
from eagle_jax.checkpoints.files.staging import TEMPORARY, replacing, sweep, write_whole
from eagle_jax.config import RopeConfig
from tests.checkpoints.common import CONFIG, GPT2, assert_same, edit_json, edit_tensors, quiet, random_params

INDEX = "model.safetensors.index.json"
UNTIED = r"tie_word_embeddings is true and model\.safetensors holds an lm_head\.weight that differs"


@pytest.fixture
def saved(tmp_path):
    save_target_checkpoint(CONFIG, random_params(), tmp_path / "model", "float32")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path):
    save_target_checkpoint(CONFIG, random_params(), tmp_path / "model", "float32", max_shard_bytes=3000)
    return tmp_path / "model"


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        GPT2,
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
def test_a_saved_target_loads_as_the_same_target(config, shard_bytes, tmp_path):
    params = random_params(config)
    save_target_checkpoint(config, params, tmp_path, "float32", max_shard_bytes=shard_bytes)
    assert (tmp_path / "model.safetensors").is_file() == (shard_bytes > 1500)
    loaded_config, loaded = load_target_checkpoint(tmp_path)
    assert loaded_config == config
    assert_same(loaded, params)


def test_one_error_names_every_wrong_tensor(saved):
    def edit(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)  # of old files: ignored
        del tensors["model.layers.1.mlp.up_proj.weight"]
        del tensors["lm_head.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
        tensors["model.layers.2.input_layernorm.weight"] = np.zeros(12, np.float32)
        tensors["something.else"] = np.zeros(3, np.float32)
        tensors["model.norm.weight"] = np.zeros(13, np.float32)
        tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((12, 13), np.float32)
        tensors["model.embed_tokens.weight"] = np.zeros((31, 12), np.int8)

    edit_tensors(saved / "model.safetensors", edit)
    with pytest.raises(CheckpointError) as caught:
        load_target_checkpoint(saved)
    for part in (
        str(saved), "missing (2): ", "lm_head.weight", "model.layers.1.mlp.up_proj.weight", "unexpected (3): ",
        "layers.0.self_attn.q_proj.bias", "layers.2.input_layernorm.weight", "something.else",
        "model.norm.weight is [13], expected [12]",
        "model.layers.0.self_attn.k_proj.weight is [12, 13], expected [12, 12]",
        "model.embed_tokens.weight is stored as int8, which config.json does not explain",
    ):  # fmt: skip
        assert part in str(caught.value)
    assert "inv_freq" not in str(caught.value)


def test_a_damaged_file_is_an_error(saved):
    weights = saved / "model.safetensors"
    whole = weights.read_bytes()
    for keep in (0, 5, 100, -1):
        weights.write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or corrupt"):
            load_target_checkpoint(saved)
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors must hold weights, got a Git LFS pointer\. Run"):
        load_target_checkpoint(saved)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"must hold model\.safetensors or .*\.json, got none"):
        load_target_checkpoint(saved)
    (saved / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        load_target_checkpoint(saved)
    (saved / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"must hold config\.json, got none"):
        load_target_checkpoint(saved)


def test_a_damaged_shard_or_index_is_an_error(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=shard.name):
        load_target_checkpoint(sharded)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} must exist because the index names it"):
        load_target_checkpoint(sharded)
    values = json.loads((sharded / INDEX).read_text())
    for file, message in (
        ("../secret.safetensors", r"files of this directory, got '\.\./secret\.safetensors'"),
        (None, "weight_map must map tensors to .safetensors or .bin files of this directory, got None"),
    ):
        values["weight_map"]["model.extra"] = file
        (sharded / INDEX).write_text(json.dumps(values))
        with pytest.raises(CheckpointError, match=message):
            load_target_checkpoint(sharded)


@pytest.mark.parametrize("dtype", ["float64", 3])
def test_an_unknown_dtype_is_an_error(dtype, saved):
    with pytest.raises(CheckpointError, match=f"dtype must be one of float32, bfloat16, float16, got {dtype!r}"):
        eagle_jax.load_target(saved, dtype)


def test_stop_tokens_come_from_the_generation_config_or_else_the_config(saved):
    assert load_target_checkpoint(saved)[0].eos_ids == (2, 7)
    edit_json(saved / "generation_config.json", eos_token_id=9)
    edit_json(saved / "config.json", eos_token_id=[9, 2])
    with pytest.warns(UserWarning, match=r"generation_config\.json overrides config\.json.*: \[2\] are no stop token"):
        assert load_target_checkpoint(saved)[0].eos_ids == (9,)
    edit_json(saved / "generation_config.json", eos_token_id=...)
    edit_json(saved / "config.json", eos_token_id=[4, 5, 31, -1])  # the last two never occur in a vocabulary of 31
    assert load_target_checkpoint(saved)[0].eos_ids == (4, 5)
    (saved / "generation_config.json").unlink()
    edit_json(saved / "config.json", eos_token_id=None)
    assert load_target_checkpoint(saved)[0].eos_ids == ()


@pytest.fixture(params=[CONFIG, GPT2], ids=["llama", "gpt2"])
def tied(request, tmp_path):
    """A directory whose config.json says tied, its embedding's name and its parameters."""
    config = dataclasses.replace(request.param, tie_word_embeddings=True)
    params = random_params(config)
    save_target_checkpoint(config, params, tmp_path / "model", "float32")
    name = "transformer.wte.weight" if config.block == "gpt2" else "model.embed_tokens.weight"
    return tmp_path / "model", name, params


def add_lm_head(path, change):
    edit_tensors(path / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": change(tensors)}))


def test_an_lm_head_that_differs_is_loaded(tied):
    path, _, params = tied
    own = np.random.default_rng(1).standard_normal(params["embed_tokens"]["embedding"].shape).astype(np.float32)
    add_lm_head(path, lambda tensors: own)
    for layers in (True, False):
        with pytest.warns(UserWarning, match=UNTIED):
            config, loaded = load_target_checkpoint(path, layers=layers)
        assert not config.tie_word_embeddings and ("layers_0" in loaded) == layers
        np.testing.assert_array_equal(loaded["lm_head"]["weight"], own)


def test_an_lm_head_that_is_equal_in_the_loaded_dtype_is_tied(tied):
    """`transformers` compares loaded weights: rounding alone does not untie."""
    path, embedding, params = tied
    add_lm_head(path, lambda tensors: tensors[embedding])
    with quiet():
        assert_same(load_target_checkpoint(path)[1], params)
    add_lm_head(path, lambda tensors: tensors[embedding] * np.float32(1 + 1e-6))
    with pytest.warns(UserWarning, match=UNTIED):
        load_target_checkpoint(path)
    with quiet():
        load_target_checkpoint(path, "bfloat16")


def test_an_lm_head_that_is_missing_or_of_another_size_is_an_error(tied):
    path, embedding, _ = tied
    add_lm_head(path, lambda tensors: tensors[embedding][:-1])
    with (
        pytest.warns(UserWarning, match=UNTIED),
        pytest.raises(CheckpointError, match=r"lm_head\.weight is \[\d+, \d+\], expected"),
    ):
        load_target_checkpoint(path)
    edit_tensors(path / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    edit_json(path / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing \(1\): lm_head\.weight"):
        load_target_checkpoint(path)


@pytest.fixture
def torch_state(saved):
    """Directory with config.json alone, tensors for it, and torch, whose `weights_only=True` runs no code of a file."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install eagle-jax[test]")
    tensors = safetensors.numpy.load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    return saved, {name: torch.tensor(tensor) for name, tensor in tensors.items()}, torch


def assert_loads(directory, dtype="float32"):
    assert_same(load_target_checkpoint(directory, dtype)[1], random_params(dtype=dtype))


@pytest.mark.parametrize(("zipped", "dtype"), [(True, "float32"), (False, "float32"), (True, "bfloat16")])
def test_a_torch_file_loads(zipped, dtype, torch_state):
    directory, state, torch = torch_state
    state = {name: value.to(getattr(torch, dtype)) for name, value in state.items()}
    torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert_loads(directory, dtype)


def test_torch_shards_load_and_safetensors_come_first(torch_state):
    directory, state, torch = torch_state
    weight_map = {name: f"pytorch_model-{1 + i % 2:05d}-of-00002.bin" for i, name in enumerate(sorted(state))}
    for file in set(weight_map.values()):
        torch.save({name: state[name] for name in state if weight_map[name] == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_loads(directory)
    save_target_checkpoint(CONFIG, random_params(), directory, "float32")
    (directory / "pytorch_model.bin").write_bytes(b"never read")
    assert_loads(directory)


class Payload:
    """Creates a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_torch_file_with_code_is_an_error_and_runs_nothing(torch_state):
    directory, state, torch = torch_state
    trace = directory / "executed"
    torch.save(state | {"model.norm.weight": Payload(str(trace))}, directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: torch\.load.*failed .*No code in it"):
        load_target_checkpoint(directory)
    assert not trace.exists()


def test_a_torch_file_without_a_state_dict_is_an_error(torch_state):
    directory, state, torch = torch_state
    path = directory / "pytorch_model.bin"
    torch.save({"state_dict": state}, path)
    with pytest.raises(CheckpointError, match="must hold a flat dict of tensors, got other"):
        load_target_checkpoint(directory)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load_target_checkpoint(directory)


def test_without_torch_a_torch_file_is_an_error(torch_state, monkeypatch):
    directory, state, torch = torch_state
    torch.save(state, directory / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=r"torch must be installed to read .*\. Run pip install torch"):
        load_target_checkpoint(directory)


class TestSaving:
    def test_an_error_names_wrong_parameters_and_nothing_is_written(self, tmp_path):
        params = random_params()
        del params["norm"]
        params["extra"] = {"scale": jnp.zeros(3)}
        params["lm_head"]["weight"] = jnp.zeros((12, 30))
        with pytest.raises(CheckpointError) as caught:
            save_target_checkpoint(CONFIG, params, tmp_path / "model")
        for part in ("missing (1): norm/scale", "unexpected (1): extra/scale", "lm_head/weight is [12, 30]"):
            assert part in str(caught.value)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("base", "changes", "message"),
        [
            (CONFIG, {"qk_norm": True}, "must express qk_norm=True, got LlamaForCausalLM"),
            (CONFIG, {"architecture": "MistralForCausalLM", "mlp_bias": True}, "must express mlp_bias=True"),
            (CONFIG, {"architecture": "Qwen2ForCausalLM"}, "must express qkv_bias=False"),
            (GPT2, {"num_kv_heads": 2}, "must express num_kv_heads=2, got GPT2LMHeadModel"),
            (CONFIG, {"architecture": "PhiForCausalLM"}, "architecture must be one of .*, got 'PhiForCausalLM'"),
        ],
    )
    def test_a_config_that_its_architecture_cannot_express_is_an_error(self, base, changes, message, tmp_path):
        config = dataclasses.replace(base, **changes)
        with pytest.raises(CheckpointError, match=message):
            save_target_checkpoint(config, random_params(config), tmp_path / "model")

    def test_saving_replaces_weights_keeps_other_files_and_follows_a_link(self, saved):
        (saved / "tokenizer.json").write_text("{}")
        (saved / "pytorch_model.bin").write_bytes(b"old")
        params = random_params(seed=1)
        link = saved.parent / "link"
        link.symlink_to(saved)
        save_target_checkpoint(CONFIG, params, link, "float32", max_shard_bytes=3000)
        names = {path.name for path in saved.iterdir()}
        assert {"tokenizer.json", "config.json", INDEX} <= names
        assert not names & {"model.safetensors", "pytorch_model.bin"}
        assert_same(load_target_checkpoint(saved)[1], params)
        assert link.is_symlink() and {path.name for path in saved.parent.iterdir()} == {saved.name, "link"}

    def test_a_directory_with_subdirectories_is_an_error(self, tmp_path):
        (tmp_path / "project" / "src").mkdir(parents=True)
        (tmp_path / "file").write_text("")
        for name in ("project", "file"):
            with pytest.raises(CheckpointError, match="must be a directory without subdirectories"):
                save_target_checkpoint(CONFIG, random_params(), tmp_path / name)


def interrupt(*_):
    raise KeyboardInterrupt


def test_sweep_removes_only_temporary_files_of_this_library(tmp_path, monkeypatch):
    names = ("head/config.json", ".cfg.settings/a", "figure.png", ".lock", ".env.template", "big.partial")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    whole = sorted(tmp_path.rglob("*"))
    killed = replacing(tmp_path / "head")
    killed.__enter__().joinpath("config.json").touch()  # never left
    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "figure.png", b"new")
    (tmp_path / f"{TEMPORARY}figure.png.0123abcd").touch()  # of a killed `write_whole`
    (tmp_path / f"{TEMPORARY}corpus-0.17091").mkdir()  # of eagle_jax.data.corpus.documents
    assert len(list(tmp_path.iterdir())) == len(names) + 3
    sweep(tmp_path, tmp_path / "nowhere")
    assert sorted(tmp_path.rglob("*")) == whole
    assert (tmp_path / "figure.png").read_text() == (tmp_path / "head" / "config.json").read_text() == "old"
