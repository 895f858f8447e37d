"""Heads written for other engines: names, shapes and dtypes spelled out, what a layout refuses, and the way back."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import eagle_jax
from eagle_jax.checkpoints import (
    CheckpointError,
    export_head,
    load_head_checkpoint,
    save_head_checkpoint,
    save_target_checkpoint,
    stored_dtype,
)
from eagle_jax.config import HeadConfig, RopeConfig
from eagle_jax.models.decoder import init_params
from eagle_jax.models.heads import init_head_params
from tests.checkpoints.random_heads import TARGET, eagle1, eagle3, write
from train.export import Args, main

DEMO = Path(eagle_jax.__file__).parent / "assets" / "demo"
LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 64, 1.0, 4.0)
LAYER = dataclasses.replace(
    TARGET, num_layers=1, intermediate_size=20, num_heads=6, num_kv_heads=3, head_dim=8, eos_ids=(3,), bos_id=1
)
HEAD = HeadConfig("eagle3", LAYER, 17, 24, (2, 4, 6))
EMBEDDING = np.arange(53 * 24, dtype=np.float32).reshape(53, 24) % 7
EAGLE1 = HeadConfig("eagle1", LAYER, 53, 24, (9,), fc_bias=True)


def random_tree(init, config, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), dtype), shapes)


def random_params(config, dtype="float32"):
    params, rng = random_tree(init_head_params, config, dtype), np.random.default_rng(0)
    if config.kind == "eagle3":
        kept = np.sort(rng.choice(config.layer.vocab_size, config.draft_vocab_size, replace=False))
        params["d2t"] = jnp.asarray(kept - np.arange(config.draft_vocab_size), jnp.int32)
    return params


def export(config, directory, layout, dtype="float32", target=TARGET, **options):
    if layout == "speculators":
        options.setdefault("verifier", "somebody/model")
        options.setdefault("embedding", EMBEDDING)
    return export_head(config, random_params(config, dtype), target, directory, layout, dtype, **options)


def refusal(config, layout, tmp_path, **options):
    with pytest.raises(CheckpointError) as caught:
        export(config, tmp_path / "head", layout, **options)
    assert not list(tmp_path.iterdir())
    return str(caught.value)


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


EAGLE3_TENSORS = {
    "fc.weight": ([24, 72], "BF16"),
    "{layer}.self_attn.q_proj.weight": ([48, 48], "BF16"),
    "{layer}.self_attn.k_proj.weight": ([24, 48], "BF16"),
    "{layer}.self_attn.v_proj.weight": ([24, 48], "BF16"),
    "{layer}.self_attn.o_proj.weight": ([24, 48], "BF16"),
    "{layer}.mlp.gate_proj.weight": ([20, 24], "BF16"),
    "{layer}.mlp.up_proj.weight": ([20, 24], "BF16"),
    "{layer}.mlp.down_proj.weight": ([24, 20], "BF16"),
    "{layer}.input_layernorm.weight": ([24], "BF16"),
    "{layer}.hidden_norm.weight": ([24], "BF16"),
    "{layer}.post_attention_layernorm.weight": ([24], "BF16"),
    "norm.weight": ([24], "BF16"),
    "lm_head.weight": ([17, 24], "BF16"),
    "d2t": ([17], "I64"),
    "t2d": ([53], "BOOL"),
}
EAGLE1_TENSORS = {
    "embed_tokens.weight": ([53, 24], "BF16"),
    "fc.weight": ([24, 48], "BF16"),
    "fc.bias": ([24], "BF16"),
    "layers.0.self_attn.q_proj.weight": ([48, 24], "BF16"),
    "layers.0.self_attn.k_proj.weight": ([24, 24], "BF16"),
    "layers.0.self_attn.v_proj.weight": ([24, 24], "BF16"),
    "layers.0.self_attn.o_proj.weight": ([24, 48], "BF16"),
    "layers.0.mlp.gate_proj.weight": ([20, 24], "BF16"),
    "layers.0.mlp.up_proj.weight": ([20, 24], "BF16"),
    "layers.0.mlp.down_proj.weight": ([24, 20], "BF16"),
    "layers.0.post_attention_layernorm.weight": ([24], "BF16"),
}
LAYER_VALUES = {
    "model_type": "llama",
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
}
RAW_VALUES = LAYER_VALUES | {
    "draft_vocab_size": 17,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},  # layers whose output is taken (SGLang)
    "eagle_aux_hidden_state_layer_ids": [2, 4, 6],  # layers that it enters (vLLM)
}
SPECULATORS_VALUES = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": "somebody/model", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": LAYER_VALUES | {"attention_bias": False, "mlp_bias": False},
    "draft_vocab_size": 17,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_output": False,
    "norm_before_residual": False,
    "embed_requires_grad": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "layout", "options", "tensors", "prefix", "values"),
    [
        (HEAD, "official", {}, EAGLE3_TENSORS, "midlayer", RAW_VALUES | {"architectures": ["LlamaForCausalLM"]}),
        (HEAD, "sglang", {}, EAGLE3_TENSORS, "midlayer", RAW_VALUES | {"architectures": ["LlamaForCausalLMEagle3"]}),
        (
            HEAD,
            "speculators",
            {"speculative_tokens": 4},
            EAGLE3_TENSORS | {"embed_tokens.weight": ([53, 24], "BF16")},
            "layers.0",
            SPECULATORS_VALUES,
        ),
        (
            EAGLE1,
            "official",
            {"embedding": EMBEDDING},
            EAGLE1_TENSORS,
            "layers.0",
            LAYER_VALUES | {"architectures": ["LlamaForCausalLM"], "bias": True},
        ),
    ],
    ids=["official", "sglang", "speculators", "official-eagle1"],
)
def test_golden_files(config, layout, options, tensors, prefix, values, tmp_path):
    export(config, tmp_path / "head", layout, "bfloat16", **options)
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "head" / "config.json").read_text()) == values
    with safetensors.safe_open(tmp_path / "head" / "model.safetensors", framework="np") as stored:
        found = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        described = {name: (part.get_shape(), part.get_dtype()) for name, part in found.items()}
        assert stored.metadata() == {"format": "pt"}
    assert described == {name.format(layer=prefix): info for name, info in tensors.items()}


VARIANTS = {
    "plain": HEAD,
    "norms": dataclasses.replace(HEAD, fc_norm=True, norm_output=True, taps=(1, 3, 5, 8)),
    "full vocabulary": dataclasses.replace(HEAD, draft_vocab_size=53),
    "llama3": dataclasses.replace(HEAD, layer=dataclasses.replace(LAYER, rope=LLAMA3)),
    "another width": dataclasses.replace(
        HEAD, own_embedding=True, layer=dataclasses.replace(LAYER, hidden_size=36)
    ),
    "residual": dataclasses.replace(HEAD, norm_before_residual=True, norm_before_fc=True),
    "own embedding": dataclasses.replace(HEAD, own_embedding=True),
    "qwen3": dataclasses.replace(HEAD, layer=dataclasses.replace(LAYER, qk_norm=True)),
    "biases": dataclasses.replace(
        HEAD, layer=dataclasses.replace(LAYER, qkv_bias=True, out_bias=True, mlp_bias=True)
    ),
    "fc bias": dataclasses.replace(HEAD, fc_bias=True),
}  # fmt: skip
NOT_FOR = {
    "sglang": ("residual", "own embedding", "qwen3", "biases", "fc bias"),
    "speculators": ("fc bias",),
    "official": (),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("layout", "name"), [(layout, name) for layout in NOT_FOR for name in VARIANTS if name not in NOT_FOR[layout]]
)
def test_round_trip_is_the_identity(layout, name, dtype, tmp_path):
    config = VARIANTS[name]
    target = dataclasses.replace(TARGET, rope=config.layer.rope)
    written = export(config, tmp_path / "head", layout, dtype, target)
    assert written == config
    loaded, params = load_head_checkpoint(tmp_path / "head", target, dtype, embedding=jnp.asarray(EMBEDDING))
    assert loaded == config
    assert_same(params, random_params(config, dtype))
    assert stored_dtype(tmp_path / "head") == dtype


def test_a_rounded_copy_of_the_embedding_is_still_the_targets(tmp_path):
    """A head in bfloat16 of a target in float32 drafts from the target's own embedding, as it did before."""
    exact = np.random.default_rng(0).standard_normal((53, 24)).astype(np.float32)
    export(HEAD, tmp_path, "speculators", "bfloat16", embedding=exact)
    config, params = load_head_checkpoint(tmp_path, TARGET, embedding=jnp.asarray(exact))
    assert config == HEAD
    assert "embed_tokens" not in params["head"]
    assert load_head_checkpoint(tmp_path, TARGET, embedding=jnp.asarray(exact + 0.1))[0].own_embedding


@pytest.mark.parametrize("layout", ["official", "sglang", "speculators"])
def test_context_length_is_the_targets(layout, tmp_path):
    """Engines draft only as far as the head's config says; published heads say 2048."""
    short = dataclasses.replace(HEAD, layer=dataclasses.replace(LAYER, max_position=64))
    assert export(short, tmp_path, layout).layer.max_position == TARGET.max_position
    assert load_head_checkpoint(tmp_path, TARGET, embedding=jnp.asarray(EMBEDDING))[0] == HEAD


class TestRope:
    TARGET = dataclasses.replace(TARGET, rope=LLAMA3)

    def test_a_difference_is_not_decided_silently(self, tmp_path):
        message = refusal(HEAD, "sglang", tmp_path, target=self.TARGET)
        assert "the head's RoPE is default theta=10000, its target's llama3 theta=500000 factor=8.0" in message
        assert "choose rope 'head', which drafts as it does here, or rope 'target'" in message

    @pytest.mark.parametrize(("rope", "written"), [("head", RopeConfig()), ("target", LLAMA3)])
    def test_either_may_be_chosen(self, rope, written, tmp_path):
        export(HEAD, tmp_path, "sglang", target=self.TARGET, rope=rope)
        assert load_head_checkpoint(tmp_path, self.TARGET)[0].layer.rope == written


def test_tables_for_engines_that_always_read_them(tmp_path):
    """SGLang's layout has d2t and t2d even where draft ids are target ids; the other two leave them out."""
    names = {}
    for layout in ("official", "sglang", "speculators"):
        export(VARIANTS["full vocabulary"], tmp_path / layout, layout)
        names[layout] = safetensors.numpy.load_file(tmp_path / layout / "model.safetensors")
    np.testing.assert_array_equal(names["sglang"]["d2t"], np.zeros(53, np.int64))
    assert names["sglang"]["t2d"].all()
    assert not {"d2t", "t2d"} & (names["official"].keys() | names["speculators"].keys())


class TestRefused:
    @pytest.mark.parametrize(
        ("layout", "change", "part"),
        [
            ("sglang", {"norm_before_residual": True}, "norm_before_residual"),
            ("sglang", {"norm_before_fc": True}, "norm_before_fc"),
            ("sglang", {"own_embedding": True}, "an embedding that is not the target's"),
            ("sglang", {"layer": dataclasses.replace(LAYER, qk_norm=True)}, "norms of queries and keys"),
            ("sglang", {"layer": dataclasses.replace(LAYER, mlp_bias=True)}, "biases of the layer"),
            ("sglang", {"fc_bias": True}, "a bias of fc"),
            ("speculators", {"fc_bias": True}, "a bias of fc"),
            ("speculators", {"fc_norm": True, "norm_before_fc": True}, "norm_before_fc together with fc_norm"),
            ("speculators", {"layer": dataclasses.replace(LAYER, qkv_bias=True)}, "only some attention projections"),
            (
                "speculators",
                {"layer": dataclasses.replace(LAYER, qk_norm=True, mlp_bias=True)},
                "MLP biases beside norms of queries and keys",
            ),
            ("sglang", {"taps": (4, 2, 6)}, "taps (4, 2, 6) (they must ascend, from 1 to 8)"),
            ("sglang", {"taps": (0, 2, 6)}, "taps (0, 2, 6)"),
            ("speculators", {"taps": (2, 4, 9)}, "taps (2, 4, 9)"),  # 9 is behind the final norm
        ],
    )
    def test_what_has_no_place_in_a_layout(self, layout, change, part, tmp_path):
        message = refusal(dataclasses.replace(HEAD, **change), layout, tmp_path)
        assert message.startswith(f"the {layout} layout has no place for ")
        assert part in message

    @pytest.mark.parametrize("layout", ["sglang", "speculators"])
    def test_an_eagle1_head_elsewhere_than_in_the_official_layout(self, layout, tmp_path):
        message = refusal(EAGLE1, layout, tmp_path)
        assert message == f"the {layout} layout is for EAGLE-3 heads, this is one of EAGLE-1/2: export it as 'official'"

    def test_no_embedding_where_there_must_be_one(self, tmp_path):
        message = refusal(EAGLE1, "official", tmp_path)
        assert message == "an EAGLE-1/2 head in the official layout carries its target's embedding: pass it"
        message = refusal(HEAD, "speculators", tmp_path, embedding=None)
        assert message == "an EAGLE-3 head in the speculators layout carries its target's embedding: pass it"

    def test_a_vocabulary_that_is_only_permuted(self, tmp_path):
        config = VARIANTS["full vocabulary"]
        params = random_params(config) | {"d2t": jnp.asarray([1, -1] + [0] * 51, jnp.int32)}
        with pytest.raises(CheckpointError, match="a d2t that permutes the whole vocabulary"):
            export_head(config, params, TARGET, tmp_path, "speculators", verifier="a/b", embedding=EMBEDDING)
        export_head(config, params, TARGET, tmp_path, "official", "float32")
        assert_same(load_head_checkpoint(tmp_path, TARGET)[1], params)

    def test_speculators_without_a_verifier(self, tmp_path):
        assert "give the verifier's hub id or path" in refusal(HEAD, "speculators", tmp_path, verifier="")

    def test_no_speculative_tokens(self, tmp_path):
        message = refusal(HEAD, "speculators", tmp_path, speculative_tokens=0)
        assert message == "speculative_tokens=0 must be at least 1"


class TestOut:
    def test_a_directory_that_is_not_empty(self, tmp_path):
        (tmp_path / "README.md").write_text("mine")
        with pytest.raises(CheckpointError, match=r"exists and is not an empty directory.*--overwrite"):
            export(HEAD, tmp_path, "sglang")
        assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
        export(HEAD, tmp_path, "sglang", overwrite=True)
        export(HEAD, tmp_path, "speculators", overwrite=True)
        assert {path.name for path in tmp_path.iterdir()} == {"README.md", "config.json", "model.safetensors"}
        assert (tmp_path / "README.md").read_text() == "mine"
        assert load_head_checkpoint(tmp_path, TARGET, embedding=jnp.asarray(EMBEDDING))[0] == HEAD

    def test_a_file(self, tmp_path):
        (tmp_path / "head").write_text("mine")
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match="head"):
                export(HEAD, tmp_path / "head", "sglang", overwrite=overwrite)
        assert (tmp_path / "head").read_text() == "mine"

    def test_a_full_disk_leaves_what_was_there(self, tmp_path):
        export(HEAD, tmp_path / "head", "sglang")
        before = {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # config.json fits, the weights do not
        try:
            with pytest.raises(CheckpointError, match=r"could not be written in .*: make room and save again"):
                export(HEAD, tmp_path / "head", "official", overwrite=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["head"]


class TestStoredDtype:
    def test_the_widest_wins(self, tmp_path):
        config, tensors = eagle3()
        halves = {name: value.astype(jnp.bfloat16) if value.ndim == 2 else value for name, value in tensors.items()}
        assert stored_dtype(write(tmp_path, config, halves)) == "float32"

    def test_one_that_cannot_be_written(self, tmp_path):
        config, tensors = eagle3()
        with pytest.raises(CheckpointError, match=r"holds float32, float64: choose a dtype, one of float32"):
            stored_dtype(write(tmp_path, config, tensors | {"norm.weight": np.ones(24)}))


@pytest.fixture(scope="module")
def target_directory(tmp_path_factory):
    """A tiny target as files."""
    directory = tmp_path_factory.mktemp("target")
    save_target_checkpoint(TARGET, random_tree(init_params, TARGET), directory, "float32")
    return directory


def embedding_of(target_directory):
    return safetensors.numpy.load_file(target_directory / "model.safetensors")["model.embed_tokens.weight"]


class TestProgram:
    def test_a_head_of_ones_own(self, target_directory, tmp_path, capsys):
        head = write(tmp_path / "head", *eagle3(rope_theta=10000.0))
        out = tmp_path / "out"
        main(Args("speculators", str(head), out, str(target_directory), speculative_tokens=3))
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert report == {
            "out": str(out),
            "to": "speculators",
            "head": str(head),
            "dtype": "float32",
            "bytes": (out / "model.safetensors").stat().st_size,
        }
        spoken = json.loads((out / "config.json").read_text())["speculators_config"]
        assert spoken["verifier"]["name_or_path"] == str(target_directory)
        assert spoken["proposal_methods"][0]["speculative_tokens"] == 3
        embedding = jnp.asarray(embedding_of(target_directory))
        found, expected = (load_head_checkpoint(path, TARGET, embedding=embedding) for path in (out, head))
        assert found[0] == expected[0]
        assert_same(found[1], expected[1])

    def test_the_verifier_may_be_named(self, target_directory, tmp_path):
        head = write(tmp_path / "head", *eagle3(rope_theta=10000.0))
        main(Args("speculators", str(head), tmp_path / "out", str(target_directory), "somebody/model"))
        values = json.loads((tmp_path / "out" / "config.json").read_text())
        assert values["speculators_config"]["verifier"]["name_or_path"] == "somebody/model"

    @pytest.mark.parametrize("to", ["official", "sglang", "speculators"])
    def test_a_copy_of_the_targets_embedding(self, to, target_directory, tmp_path):
        head = write(tmp_path / "head", *eagle3(rope_theta=10000.0))
        main(Args(to, str(head), tmp_path / "out", str(target_directory), embedding=True))
        stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
        np.testing.assert_array_equal(stored["embed_tokens.weight"], embedding_of(target_directory))

    def test_sglang_drops_a_copy_of_the_embedding_and_refuses_another(self, target_directory, tmp_path):
        config, tensors = eagle3(rope_theta=10000.0)
        copy = {"embed_tokens.weight": embedding_of(target_directory)}
        head = write(tmp_path / "head", config, tensors | copy)
        main(Args("sglang", str(head), tmp_path / "out", str(target_directory)))
        assert "embed_tokens.weight" not in safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
        write(head, config, tensors | {"embed_tokens.weight": copy["embed_tokens.weight"] + 1})
        with pytest.raises(CheckpointError, match="no place for an embedding that is not the target's"):
            main(Args("sglang", str(head), tmp_path / "other", str(target_directory)))

    def test_an_eagle1_head_gets_the_targets_embedding(self, target_directory, tmp_path):
        config, tensors = eagle1(rope_theta=10000.0)
        del tensors["embed_tokens.weight"]
        head = write(tmp_path / "head", config, tensors)
        main(Args("official", str(head), tmp_path / "out", str(target_directory)))
        stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
        np.testing.assert_array_equal(stored.pop("embed_tokens.weight"), embedding_of(target_directory))
        assert_same(stored, tensors)

    def test_the_weights_of_a_hub_target_stay_there(self, target_directory, tmp_path, monkeypatch):
        """Only its configuration is needed, unless its embedding is."""
        import huggingface_hub

        asked = []

        def snapshot_download(repo_id, *, allow_patterns, **options):
            asked.append((repo_id, allow_patterns))
            return str(target_directory)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        head = write(tmp_path / "head", *eagle3(rope_theta=10000.0))
        main(Args("sglang", str(head), tmp_path / "out", "somebody/model"))
        assert asked == [("somebody/model", ["config.json", "generation_config.json"])]
        main(Args("speculators", str(head), tmp_path / "speculators", "somebody/model"))
        assert "model*.safetensors" in asked[-1][1]  # its embedding goes into the file
        values = json.loads((tmp_path / "speculators" / "config.json").read_text())
        assert values["speculators_config"]["verifier"]["name_or_path"] == "somebody/model"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"target": None},
                "--target is missing: the exported config takes vocabulary, RoPE and context length from",
            ),
            ({"head": "demo"}, "--target is not for --head demo"),
            ({"head": "./nowhere"}, "no such directory: nowhere"),
            ({"target": "./nowhere"}, "no such directory: nowhere"),
            ({"verifier": "a/b"}, "--verifier is for --to speculators"),
            ({"speculative_tokens": 0}, "--speculative-tokens 0 must be at least 1"),
            ({"head": "{target}"}, "holds a whole model and no draft head"),
            ({"target": "{head}"}, "this is a draft head, not a model"),
            ({"out": "{target}", "overwrite": True}, "is the target itself"),
            ({"out": "{head}", "target": "some/body"}, "is not an empty directory"),  # said before anything is fetched
        ],
    )
    def test_refused(self, change, message, target_directory, tmp_path):
        head = write(tmp_path / "head", *eagle3(rope_theta=10000.0))
        before = {path: path.read_bytes() for path in (*head.iterdir(), *target_directory.iterdir())}
        change = {
            key: value.format(target=target_directory, head=head) if isinstance(value, str) else value
            for key, value in change.items()
        }
        if "out" in change:
            change["out"] = Path(change["out"])
        args = Args("sglang", str(head), tmp_path / "out", str(target_directory))
        with pytest.raises(ValueError, match=r".") as caught:
            main(dataclasses.replace(args, **change))
        assert message in str(caught.value)
        assert not (tmp_path / "out").exists()
        assert {path: path.read_bytes() for path in before} == before

    def test_a_head_of_another_target(self, target_directory, tmp_path):
        head = write(tmp_path / "head", *eagle3(vocab_size=64))
        with pytest.raises(CheckpointError, match="vocab_size is 64, the target's 53: a head for another target"):
            main(Args("sglang", str(head), tmp_path / "out", str(target_directory)))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(2, 400, length).tolist() for length in (9, 14)]


@pytest.mark.parametrize(
    ("name", "layouts"), [("eagle3", ("official", "sglang", "speculators")), ("eagle2", ("official",))]
)
def test_the_bundled_heads_draft_the_same_from_every_layout(name, layouts, prompts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target, head, _ = eagle_jax.load_demo(name)
    expected = eagle_jax.generate(target, head, prompts, max_new_tokens=32, eos_ids=())
    assert expected.tau > 1
    for layout in layouts:
        where = ("demo", None) if name == "eagle3" else (str(DEMO / "eagle2"), str(DEMO / "target"))
        main(Args(layout, where[0], Path(layout), where[1]))
        loaded = eagle_jax.load_drafter(tmp_path / layout, target, head.tree)
        assert loaded.config == head.config
        assert_same(loaded.params, head.params)
        assert loaded.drafter is head.drafter
        found = eagle_jax.generate(target, loaded, prompts, max_new_tokens=32, eos_ids=())
        assert found.tokens == expected.tokens
        assert found.tau == expected.tau
        np.testing.assert_array_equal(found.accepted, expected.accepted)
    stored = safetensors.numpy.load_file(tmp_path / "official" / "model.safetensors")
    original = safetensors.numpy.load_file(DEMO / name / "model.safetensors")
    assert_same(stored, original)


def test_a_head_that_was_just_trained_may_be_overwritten_in_place(tmp_path):
    """The trainer's own save and the exporter agree about what may be replaced."""
    save_head_checkpoint(HEAD, random_params(HEAD), tmp_path / "head", "float32")
    shutil.copytree(tmp_path / "head", tmp_path / "before")
    export(HEAD, tmp_path / "head", "official", overwrite=True)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "head" / file).read_bytes() == (tmp_path / "before" / file).read_bytes()
