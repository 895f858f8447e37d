"""Checks the process that runs vLLM, with a module in vLLM's place."""

import sys

import pytest

from infer.bench import Args, main
from infer.common.peers import Vllm

FAKE = """
import os, types
__version__ = "9"
class SamplingParams:
    def __init__(self, **options): self.__dict__.update(options)
class LLM:
    def __init__(self, **engine):
        print("loading", engine["model"])
        if engine["model"] == "missing": raise ValueError("no such model")
    def generate(self, prompts, params, use_tqdm):
        rows = []
        for prompt, own in zip(prompts, params, strict=True):
            print("a line of vLLM")
            ids = prompt["prompt_token_ids"]
            if ids == [0]: os._exit(3)
            tokens = [ids[-1] + 1 + i for i in range(own.max_tokens)] if own.temperature == 0 else [own.seed]
            row = types.SimpleNamespace(token_ids=tokens, logprobs=None)
            rows.append(types.SimpleNamespace(outputs=[row]))
        return rows
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(FAKE, encoding="utf-8")
    return lambda model="m": Vllm(sys.executable, {"model": model}, PYTHONPATH=str(tmp_path))


def test_an_engine_answers_requests_until_it_is_closed(start):
    engine = start()
    assert engine.version == "9"
    assert engine([[1, 2], [7]], 3)["tokens"] == [[3, 4, 5], [8, 9, 10]]
    assert engine([[1], [1]], 3, temperature=0.5, seed=11)["tokens"] == [[11], [12]]
    engine.close()
    assert engine._process.poll() is not None


def test_an_engine_that_ends_is_an_error_with_its_last_lines(start):
    with pytest.raises(ValueError, match=r"(?s)^vLLM ended before it answered.*loading missing.*no such model"):
        start("missing")
    engine = start()
    with pytest.raises(ValueError, match=r"(?s)^vLLM ended before it answered.*a line of vLLM"):
        engine([[0]], 3)
    with pytest.raises(ValueError, match=r"^vLLM ended before it answered"):  # and so does every later request
        engine([[1]], 3)


def test_a_python_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"^--vllm must be the Python of an environment with vLLM, got .*nowhere"):
        Vllm(tmp_path / "nowhere", {"model": "m"})
    with pytest.raises(ValueError, match=r"^--vllm must be the Python of .*, got /bin/echo, which does not run"):
        Vllm("/bin/echo", {"model": "m"})


def test_options_of_vllm_that_contradict_are_errors(tmp_path, monkeypatch):
    monkeypatch.setattr("infer.bench.prepare", lambda *_, **__: pytest.fail("went on to load the target"))
    with pytest.raises(ValueError, match=r"^--vllm must come without --weights, got int8"):
        main(Args(vllm=sys.executable, weights="int8", out=tmp_path))
    with pytest.raises(ValueError, match=r"^--vllm-head must come with --vllm"):
        main(Args(vllm_head="head", out=tmp_path))
    with pytest.raises(ValueError, match=r"^--vllm-head must be a folder of train\.export, got .*absent"):
        main(Args(vllm=sys.executable, vllm_head=str(tmp_path / "absent"), out=tmp_path))
