"""Runs tunix with rollouts of this library, and compares with tunix's own models and rollouts.

google-tunix needs packages that this project does not, so it has an environment of its own (`ENVIRONMENT`). The program
in `tunix_program.py` runs there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLE = "EAGLE_JAX_TUNIX_PYTHON"
ENVIRONMENT = f"""{VARIABLE} must be the Python of an environment with google-tunix, in any folder:
    python3.11 -m venv tunix && tunix/bin/pip install google-tunix==0.1.7 -e '.[tunix]'
    export {VARIABLE}=$PWD/tunix/bin/python"""
FOLDER = Path(__file__).parent
ROUNDING = 1e-4  # of float32 logits up to 10, by two orders of summation


def test_without_tunix_the_message_names_the_extra():
    code = "import sys; sys.modules['tunix'] = None; import eagle_jax.integrations.tunix"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "eagle_jax.integrations.tunix needs google-tunix" in run.stderr
    assert "pip install -e '.[tunix]'" in run.stderr


@pytest.fixture(scope="module")
def run(repository):
    """Returns a function that runs a part of `tunix_program.py`, or another program, and returns its result."""
    python = os.environ.get(VARIABLE)
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tunix') is None)"
    if python is None or subprocess.run([python, "-c", find], check=False).returncode:
        pytest.skip(ENVIRONMENT)
    variables = {"PYTHONPATH": str(repository), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}

    def run(*parts, program="tunix_program.py"):
        command, environment = [python, FOLDER / program, *parts], os.environ | variables
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.slow
def test_logits_are_the_models_own(run):
    found = run("logits")
    assert len(found) == 8
    for name, model in found.items():
        assert model["largest"] > 1, name
        assert model["difference"] < ROUNDING, (name, model)
        # tunix 0.1.7 rotates by 1,000,000 whatever the configuration of these says.
        assert model["warned"] == (name in ("qwen3, other base", "llama3", "llama3, tied")), name


@pytest.mark.slow
def test_a_model_runs_layer_by_layer(run):
    found = run("layers")
    assert all(tokens == found["tokens"][0] for tokens in found["tokens"])
    assert found["log-probabilities"] < ROUNDING


@pytest.mark.slow
def test_rollouts_are_those_of_tunix(run):
    found = run("rollout")
    assert len({tuple(text) for text in found["vanilla"]}) > 2 and max(map(len, found["vanilla"])) == 24
    assert min(map(len, found["vanilla"])) < 24, "no reply ends at a stop token"
    ours, theirs, ends = found["other stops"]
    assert ours == theirs and ends not in ours
    assert found["runs of prompts"] == [[3, 2], [3, 1]]  # prompts, and samples of each
    for name in ("plain", "lookup"):
        assert found[name]["tokens"] == found["vanilla"]
        assert found[name]["text"] and found[name]["prompts"]
        assert found[name]["log-probabilities"] < ROUNDING
    assert found["generate"]["ours"] == found["generate"]["theirs"]
    assert found["payoffs"] == [[None], [False], True]
    assert found["long prompt"][0] == found["long prompt"][1] and len(found["long prompt"][0]) == 16
    assert found["scores"] < ROUNDING

    sampled = found["sampled"]
    assert sampled["differs by call"] and sampled["same by seed"] and sampled["one text per sample"] > 1
    assert sampled["log-probabilities"] < ROUNDING

    assert found["filters"] == [True, True, False]  # of the likeliest token; without a filter

    update = found["update"]
    assert update["ours"] == update["theirs"] != found["vanilla"]
    assert update["source lives"]
    assert all(sizes == update["programs"][0] for sizes in update["programs"]) and update["programs"][0][0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "drafted"])
def test_three_steps_of_grpo(kind, run):
    found = run("grpo", kind)
    assert (found["updates"] is None) == (kind == "plain")
    assert kind == "plain" or (found["updates"] > 6 and found["tau"] > 1)
    assert found["trained"] == 6 and len(found["steps"]) == 3
    for step in found["steps"]:
        assert step["ours"] == step["vanilla"]
        assert step["prompts"] == 8
    assert len({json.dumps(step["ours"]) for step in found["steps"]}) == 3  # the weights did change
    assert [step["programs"] for step in found["steps"]] == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "adapters"])
def test_a_resumed_run_begins_with_the_restored_policy(kind, run):
    """tunix restores the trainer after it has made the rollout, and hands weights over after the first step alone."""
    found = run("resume", kind, program="tunix_lora.py")
    assert found["restored"] == 2
    assert found["texts"] == found["of the trainer"] != found["of the initial policy"]


@pytest.mark.slow
def test_adapters_are_part_of_the_policy(run):
    found = run("logits", program="tunix_lora.py")
    assert len(found) == 8
    for name, model in found.items():
        assert model["difference"] < ROUNDING < 1 < model["moved"], (name, model)
        assert model["adapters"] >= 28, name


@pytest.mark.slow
def test_three_steps_of_grpo_train_adapters(run):
    found = run("grpo", program="tunix_lora.py")
    assert found["trained"] == 6 and len(found["steps"]) == 3 and found["weights as before"]
    assert all(step["ours"] == step["vanilla"] for step in found["steps"])
    assert len({json.dumps(step["ours"]) for step in found["steps"]}) == 3
    assert [step["programs"] for step in found["steps"]] == [0, 1, 1]


@pytest.mark.slow
def test_a_head_and_a_history_follow_the_policy(run):
    found = run("follow")
    steps = found["steps"]
    assert all(step["same"] for step in steps)
    # The same prompts again: their replies are in the history, and the head has learned from them.
    for last in (steps[2], steps[5]):
        assert last["follows"] > last["still"] + 0.5
        assert last["learns"] > last["still"] + 0.3
    assert steps[3]["follows"] < steps[2]["follows"]  # of a new policy
    assert steps[5]["programs"] == steps[2]["programs"]
    assert 0 < found["kept"] <= 512


@pytest.mark.slow
def test_wrong_engines_and_calls_are_refused(run):
    messages = (
        "drafter must look prompts up if there is a history, got None",
        "drafter must be an EAGLE head if it is updated, got None",
        "lanes must be an integer of at least 1, got 2.5",
        "drafter must be a function of the target, got a str",
        "drafter must return a BoundDrafter, got a NoneType",
        "lora_alpha must be that of a policy with adapters (LoRA), got None and 'layers/0/attn/q_proj/w_lora_a'",
        "lora_alpha must be that of a policy with adapters (LoRA), got 16.0 without adapters. Pass the alpha of",
        "lora_alpha must be that of the model's LoRA rules, 6.0, got 16.0. Leave it out.",
        "lora_alpha must be a number above 0, got -1.0",
        "model: parameters must be those of Qwen3ForCausalLM, got 'layers/0/attn/q_proj/w_lora_a'",
        "head_optimizer must be of optax, got a float",
        "cycle_cost must be a number of plain steps, at least 1",
        "cycle_cost must come with a drafter, got none",
        "head_updates must come with a head_optimizer, got none. Pass one, or leave head_updates out.",
        "head_micro must come with a head_optimizer, got none. Pass one, or leave head_micro out.",
        "max_position must be an integer of at least 1, got 0",
        "params must have all adapters, got none for 'layers/0/attn/k_proj/w_lora_a'",
        "prompts must be one or more strings, got []",
        "prompts must be one or more strings, got 'b c'",
        "rollout_config.max_tokens_to_generate must be an integer of at least 1, got 0",
        "rollout_config.max_tokens_to_generate must be an integer of at least 1, got None",
        "generate must be called with prompts and rollout_config, got images",
        "rollout_config.seed must be",
        "rollout_config must be a RolloutConfig, got a NoneType",
        "rollout_config.eos_tokens must be a token id",
        "rollout_config.temperature must be a number, got None",
        "rollout_config.top_k must be",
        "rollout_config.max_tokens_to_generate must be at most 9 after the 7 tokens of row 2 (max_position is 16)",
    )
    found = run(program="tunix_refused.py")
    assert len(found) == len(messages)
    for message, error in zip(messages, found, strict=True):
        assert error.startswith(message), error


@pytest.mark.slow
def test_a_rollout_has_a_device_of_its_own(run):
    found = run("devices")
    assert found["same"] == [True] * 5 and found["devices"] == [found["second"]]
    assert found["updates"] == 6 and found["tau"] > 1  # two after each of three calls


@pytest.mark.slow
@pytest.mark.parametrize("case", ["trained", "random"])
def test_speed_is_reported(case, run):
    found = run(case, program="tunix_speed.py")
    print(json.dumps(found))
    assert all(engine["texts of tunix"] == 1 for engine in found["temperatures"]["0"].values()), found
