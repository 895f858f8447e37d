"""Wraps methods as calls that can be timed: the whole answer, and the prefill alone."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax.core.randomness import row_keys
from eagle_jax.runtime.generation import first_tokens


def keys_of(seed: int, names: Sequence[str], turn: int) -> jax.Array:
    """Returns [rows] keys by `seed`, the question's name (`names_of`) and the turn, whatever the batch.

    Questions with the same noise would not be independent, and intervals over them would be too narrow.
    """
    numbers = [zlib.crc32(f"{name}, turn {turn}".encode()) for name in names]
    return _row_keys(jax.random.key(seed, impl="threefry2x32"), jnp.asarray(np.array(numbers, np.uint32)))


_row_keys = jax.jit(row_keys)


class Answer(NamedTuple):
    """Holds new tokens per row and, for methods that count passes, counts per row."""

    tokens: list[list[int]]  # [rows] new tokens
    cycles: list[int] | None = None  # [rows] target passes after the prefill
    accepted: list[list[int]] | None = None  # [rows][D+1] histograms


class Method(NamedTuple):
    """Holds functions `(prompts, keys) -> Answer` that wait for the result; `keys` has one per prompt."""

    answer: Callable[[list[list[int]], jax.Array], Answer]  # whole replies
    # only the first token of every reply, by the same program if the method has one
    prefill: Callable[[list[list[int]], jax.Array], Answer]


def engine(
    target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter | None, max_new_tokens: int, temperature: float
) -> Method:
    """Wraps this library's `generate`."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}

    def answer(prompts: list[list[int]], keys: jax.Array) -> Answer:
        out = eagle_jax.generate(target, drafter, prompts, key=keys, **options)
        return Answer(out.tokens, out.cycles.tolist(), out.accepted.tolist())

    def prefill(prompts: list[list[int]], keys: jax.Array) -> Answer:
        return Answer(first_tokens(target, drafter, prompts, key=keys, **options).tokens)

    return Method(answer, prefill)


def hugging_face(target: eagle_jax.Target) -> Callable[[int, float], Method]:
    """Wraps `generate` of `transformers` on the same weights in PyTorch."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # loading takes a second
    model = AutoModelForCausalLM.from_pretrained(target.name, dtype=getattr(torch, target.dtype)).eval()
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
