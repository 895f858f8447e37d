"""`python -m train.export`: heads of one's own, the bundled ones, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import eagle_jax
from eagle_jax.checkpoints import (
    CheckpointError,
    load_head_checkpoint,
    save_head_checkpoint,
    save_target_checkpoint,
)
from eagle_jax.models.decoder import init_params
from tests.checkpoints.random_exports import (
    HEAD,
    assert_same,
    export,
    random_params,
    random_tree,
)
from tests.checkpoints.random_heads import TARGET, eagle1, eagle3, write
from train.export import Args, main
from train.loop.places import note_run

DEMO = Path(eagle_jax.__file__).parent / "assets" / "demo"


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
        with pytest.raises(CheckpointError, match="cannot hold an embedding that is not the target's"):
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
                "was trained for. The exported config takes its vocabulary, RoPE and context length.",
            ),
            ({"head": "./nowhere"}, "--head ./nowhere: no such directory: nowhere"),
            ({"target": "./nowhere"}, "--target ./nowhere: no such directory: nowhere"),
            ({"verifier": "a/b"}, "--verifier is an option of --to speculators"),
            ({"speculative_tokens": 0}, "--speculative-tokens 0 must be at least 1"),
            ({"head": "{run}"}, "is a training run without a head"),
            ({"head": "{target}"}, "holds a whole model and no draft head"),
            ({"target": "{head}"}, "holds an EAGLE-3 head and no model"),
            ({"out": "{target}", "overwrite": True}, "--out must not be the target's directory"),
            ({"out": "{head}", "target": "some/body"}, "is not an empty directory"),  # said before anything is fetched
        ],
    )
    def test_refused(self, change, message, target_directory, tmp_path):
        head = write(tmp_path / "head", *eagle3(rope_theta=10000.0))
        run = tmp_path / "run"
        run.mkdir()
        (run / "log.jsonl").touch()
        before = {path: path.read_bytes() for path in (*head.iterdir(), *target_directory.iterdir())}
        change = {
            key: value.format(target=target_directory, head=head, run=run) if isinstance(value, str) else value
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
    ("name", "layouts"), [("eagle3", ("official", "sglang", "speculators")), ("hass", ("official",))]
)
def test_the_bundled_heads_draft_the_same_from_every_layout(name, layouts, prompts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target, head, _ = eagle_jax.load_demo(name)
    expected = eagle_jax.generate(target, head, prompts, max_new_tokens=32, eos_ids=())
    assert expected.tau > 1
    for layout in layouts:
        where = ("demo", None) if name == "eagle3" else (str(DEMO / "hass"), str(DEMO / "target"))
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


def test_the_bundled_target_may_be_named(tmp_path):
    """A head that was trained for it; and with the bundled head, where it goes without saying."""
    for head, out in ((str(DEMO / "hass"), tmp_path / "two"), ("demo", tmp_path / "three")):
        main(Args("official", head, out, "demo"))
        assert json.loads((out / "config.json").read_text())["vocab_size"] == 512


def test_a_head_of_a_run_knows_its_target(tmp_path):
    """By the run's directory as well as by the head's."""
    shutil.copytree(DEMO / "eagle3", tmp_path / "run" / "head")
    (tmp_path / "run" / "log.jsonl").touch()
    note_run(tmp_path / "run", "demo")
    for head in ("run", "run/head"):
        main(Args("official", str(tmp_path / head), tmp_path / "out", overwrite=True))
        assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_head_that_was_just_trained_may_be_overwritten_in_place(tmp_path):
    """The trainer's own save and the exporter agree about what may be replaced."""
    save_head_checkpoint(HEAD, random_params(HEAD), tmp_path / "head", "float32")
    shutil.copytree(tmp_path / "head", tmp_path / "before")
    export(HEAD, tmp_path / "head", "official", overwrite=True)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "head" / file).read_bytes() == (tmp_path / "before" / file).read_bytes()
