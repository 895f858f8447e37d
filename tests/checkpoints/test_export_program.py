"""Tests `python -m train.export`: heads of a run, the bundled one, the target's embedding, errors."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import eagle_jax
from eagle_jax.checkpoints import load_head_checkpoint, save_target_checkpoint
from tests.checkpoints.common import assert_same, edit_tensors, random_params
from tests.checkpoints.random_heads import TARGET, eagle1, eagle3, write
from train.export import Args, main
from train.loop.places import note_run

DEMO = Path(eagle_jax.__file__).parent / "assets" / "demo"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny target as files."""
    directory = tmp_path_factory.mktemp("target")
    save_target_checkpoint(TARGET, random_params(TARGET), directory, "float32")
    return directory


@pytest.fixture
def head(tmp_path):
    """An EAGLE-3 head for it, as files."""
    return write(tmp_path / "head", *eagle3(rope_theta=10000.0))


def tensors_of(directory):
    return safetensors.numpy.load_file(directory / "model.safetensors")


def embedding_of(target):
    return tensors_of(target)["model.embed_tokens.weight"]


def verifier_of(directory):
    return json.loads((directory / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"]


def test_a_speculators_export_loads_as_the_same_head(target, head, tmp_path, capsys):
    out = tmp_path / "out"
    main(Args("speculators", str(head), out, str(target), speculative_tokens=3))
    size = (out / "model.safetensors").stat().st_size
    expected = {"out": str(out), "to": "speculators", "head": str(head), "dtype": "float32", "bytes": size}
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == expected
    assert verifier_of(out) == str(target)
    values = json.loads((out / "config.json").read_text())["speculators_config"]
    assert values["proposal_methods"][0]["speculative_tokens"] == 3
    embedding = jnp.asarray(embedding_of(target))
    found, given = (load_head_checkpoint(path, TARGET, embedding=embedding) for path in (out, head))
    assert found[0] == given[0]
    assert_same(found[1], given[1])
    main(Args("speculators", str(head), tmp_path / "named", str(target), "somebody/model"))
    assert verifier_of(tmp_path / "named") == "somebody/model"


def test_the_embedding_of_the_target_is_copied(target, head, tmp_path):
    """EAGLE-1/2 files always hold a copy, others by option."""
    config, tensors = eagle1(rope_theta=10000.0)
    del tensors["embed_tokens.weight"]
    for name, path, embedding in (
        ("eagle1", write(tmp_path / "eagle1", config, tensors), False),
        ("eagle3", head, True),
    ):
        main(Args("official", str(path), tmp_path / f"{name}-out", str(target), embedding=embedding))
        stored = tensors_of(tmp_path / f"{name}-out")
        np.testing.assert_array_equal(stored.pop("embed_tokens.weight"), embedding_of(target))
        assert_same(stored, tensors_of(path))


def test_an_sglang_export_drops_a_copy_of_the_embedding(target, head, tmp_path):
    copy = embedding_of(target)
    edit_tensors(head / "model.safetensors", lambda tensors: tensors.update({"embed_tokens.weight": copy}))
    main(Args("sglang", str(head), tmp_path / "out", str(target)))
    assert "embed_tokens.weight" not in tensors_of(tmp_path / "out")


def test_the_weights_of_a_hub_target_are_fetched_only_for_their_embedding(target, head, tmp_path, monkeypatch):
    downloads = []

    def snapshot_download(repo_id, *, allow_patterns, **options):
        downloads.append((repo_id, allow_patterns))
        return str(target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    main(Args("sglang", str(head), tmp_path / "out", "somebody/model"))
    assert downloads == [("somebody/model", ["config.json", "generation_config.json"])]
    main(Args("speculators", str(head), tmp_path / "speculators", "somebody/model"))
    assert "model*.safetensors" in downloads[-1][1]  # its embedding goes into the file
    assert verifier_of(tmp_path / "speculators") == "somebody/model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": None}, "was trained for, got none. Give it: the exported config takes"),
        ({"verifier": "a/b"}, "--verifier must come with --to speculators"),
        ({"to": "speculators", "verifier": "/nope/x"}, "--verifier must be a directory or hub id, got /nope/x"),
        ({"speculative_tokens": 0}, "--speculative-tokens"),
        ({"target": "{head}"}, "must hold a whole model, got an EAGLE-3 head. Load it with load_drafter"),
        ({"out": "{target}", "overwrite": True}, "--out must not be the target's directory"),
        ({"out": "{head}", "target": "some/body"}, "must be missing or an empty dir"),  # before anything is fetched
    ],
)
def test_a_wrong_argument_is_an_error_and_changes_no_file(change, message, target, head, tmp_path):
    places = {"target": target, "head": head}
    before = {path: path.read_bytes() for path in (*head.iterdir(), *target.iterdir())}
    options = {key: value.format(**places) if isinstance(value, str) else value for key, value in change.items()}
    if "out" in options:
        options["out"] = Path(options["out"])
    args = Args("sglang", str(head), tmp_path / "out", str(target))
    with pytest.raises(ValueError, match=r".") as caught:
        main(dataclasses.replace(args, **options))
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert {path: path.read_bytes() for path in before} == before


def test_the_bundled_head_keeps_its_tensors(tmp_path):
    main(Args("official", "demo", tmp_path))
    assert_same(tensors_of(tmp_path), tensors_of(DEMO / "eagle3"))


def test_a_head_of_a_run_needs_no_target_argument(tmp_path):
    shutil.copytree(DEMO / "eagle3", tmp_path / "run" / "head")
    (tmp_path / "run" / "log.jsonl").touch()
    note_run(tmp_path / "run", "demo")
    for place in ("run", "run/head"):
        main(Args("official", str(tmp_path / place), tmp_path / "out", overwrite=True))
        assert (tmp_path / "out" / "model.safetensors").is_file()
