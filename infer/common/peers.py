"""Wraps other engines as methods of `infer.bench`: `transformers` in this process, vLLM in its own environment."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import eagle_jax
from eagle_jax.checkpoints import is_gguf, save_target_checkpoint
from infer.common.methods import NOTHING
from infer.common.results import Draft
from infer.common.timing import Answer, Method

PROGRAM = Path(__file__).with_name("vllm_program.py")


def hugging_face(target: eagle_jax.Target) -> Callable[[int, float], Method]:
    """Wraps `generate` of `transformers` on the same weights in PyTorch."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # loading takes a second
    path = Path(target.name)
    place, options = (path.parent, {"gguf_file": path.name}) if is_gguf(path) else (target.name, {})
    model = AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, target.dtype), **options).eval()
    stops = set(target.config.eos_ids)

    @torch.no_grad()
    def run(prompts: list[list[int]], keys: jax.Array, max_new_tokens: int, temperature: float) -> Answer:
        torch.manual_seed(int(jax.random.key_data(keys)[0, -1]))  # PyTorch has one seed for all rows
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        # These override generation_config.json, whose settings may change the law.
        options: dict[str, Any] = {"eos_token_id": sorted(stops) or None, "pad_token_id": 0, "repetition_penalty": 1.0}
        if temperature:
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        full = model.generate(
            ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=temperature > 0, **options
        )
        rows = full[:, width:].tolist()
        ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in rows]
        return Answer([row[:end] for row, end in zip(rows, ends, strict=True)])

    def method(max_new_tokens: int, temperature: float) -> Method:
        answer = functools.partial(run, max_new_tokens=max_new_tokens, temperature=temperature)
        return Method(answer, functools.partial(answer, max_new_tokens=1))

    return method


class Vllm:
    """An engine of vLLM in a process of its own, which ends with this object or with `close`.

    Args:
      python: Python of an environment with vLLM.
      engine: arguments of `vllm.LLM`.
      variables: of its environment, in addition to this process's own.

    Raises:
      ValueError: the process ends before it has loaded the model; the message has its last lines.
    """

    def __init__(self, python: str | os.PathLike[str], engine: dict[str, Any], **variables: str) -> None:
        command = [os.fspath(python), os.fspath(PROGRAM), json.dumps(engine)]
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # lives as long as the process
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                env={**os.environ, **variables},
            )  # fmt: skip
        except OSError as error:
            raise ValueError(
                f"--vllm must be the Python of an environment with vLLM, got {python} ({error})."
            ) from None
        self.close = weakref.finalize(self, _end, self._process)
        try:
            self.version = self._read()["version"]
        except (json.JSONDecodeError, TypeError, KeyError):
            raise ValueError(
                f"--vllm must be the Python of an environment with vLLM, got {python}, which does not run a program. "
                "Give its bin/python."
            ) from None

    def __call__(self, prompts: list[list[int]], max_tokens: int, **options: Any) -> dict[str, Any]:
        """Generates; `options` are the other fields of a request of `vllm_program`."""
        assert self._process.stdin is not None
        request = json.dumps({"prompts": prompts, "max_tokens": max_tokens, **options})
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which `_read` reports
            print(request, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.wait()
        self._log.seek(0)
        last = self._log.read().strip().splitlines()[-15:]
        raise ValueError("\n".join(["vLLM ended before it answered; its last lines:", *last]))


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def vllm_methods(
    python: str, target: eagle_jax.Target, dtypes: Sequence[str], head: str | None, chain: int
) -> dict[str, tuple[Callable[[int, float], Method], Draft]]:
    """Starts vLLM with the target once per dtype, and in float32 with an exported head if there is one.

    The weights are written as float32 to a temporary folder, until all engines have read them.

    Args:
      head: folder of `train.export`. chain: tokens that it drafts.

    Raises:
      ValueError: as `Vllm`.
    """
    common = {
        "skip_tokenizer_init": True, "enable_prefix_caching": False, "max_model_len": target.config.max_position,
    }  # fmt: skip
    engines: dict[str, tuple[dict[str, Any], Draft]] = {
        f"vllm@{dtype}": ({"dtype": dtype}, NOTHING) for dtype in dtypes
    }
    if head is not None:
        draft = Draft(f"chain of {chain}", "deterministic", chain + 1, head)
        config = {"method": "eagle3", "model": head, "num_speculative_tokens": chain}
        engines[f"vllm@chain{chain}"] = (
            {"dtype": "float32", "speculative_config": config, "per_request_spec_decode_metrics": "detailed"}, draft
        )  # fmt: skip
    # Without this, vLLM leaves a core to a server that does not run here.
    threads = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    stops = sorted(target.config.eos_ids)

    def method(engine: Vllm, max_new_tokens: int, temperature: float) -> Method:
        def run(prompts: list[list[int]], keys: jax.Array, tokens: int) -> Answer:
            seed = int(jax.random.key_data(keys)[0, -1]) % 2**31
            found = engine(prompts, tokens, temperature=temperature, seed=seed, stop=stops)
            if None in found["accepted"]:
                return Answer(found["tokens"])
            # The whole accepted path of a cycle counts, also what the budget or a stop token cuts off.
            accepted = [[row.count(n) for n in range(chain + 1)] for row in found["accepted"]]
            return Answer(found["tokens"], [sum(row) for row in accepted], accepted)

        return Method(functools.partial(run, tokens=max_new_tokens), functools.partial(run, tokens=1))

    found: dict[str, tuple[Callable[[int, float], Method], Draft]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "target"
        save_target_checkpoint(target.config, target.params, model, "float32")
        for name, (own, draft) in engines.items():
            engine = Vllm(python, common | own | {"model": str(model)}, VLLM_CPU_OMP_THREADS_BIND=threads)
            found[name] = functools.partial(method, engine), draft
    return found
