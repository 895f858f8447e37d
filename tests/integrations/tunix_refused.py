"""Prints the messages of wrong engines and calls of `EagleRollout`, as a list of JSON; see `test_tunix.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import optax
from flax import nnx

from eagle_jax import prompt_lookup

sys.path.insert(0, str(Path(__file__).parent))
from tunix_lora import with_adapters
from tunix_program import PROMPTS, eagle, greedy, own_head, tiny_qwen3


def refused():
    """Returns the messages."""
    policy, adapted, found = tiny_qwen3(), tiny_qwen3(), []
    adapted.layers[0].attn.q_proj.w_lora_a = nnx.Param(jnp.zeros(2))
    for one, own in (
        (policy, {"history": 9}), (policy, {"head_optimizer": optax.sgd(1.0)}), (policy, {"lanes": 2.5}),
        (policy, {"drafter": "head"}), (policy, {"drafter": lambda target: None}), (adapted, {}),
        (policy, {"lora_alpha": 16.0}), (with_adapters(policy), {"lora_alpha": 16.0}),
        (adapted, {"lora_alpha": -1.0}), (adapted, {"lora_alpha": 16.0}),
        (policy, {"drafter": own_head, "head_optimizer": 3e-4}),
        (policy, {"drafter": prompt_lookup, "cycle_cost": 0.5}), (policy, {"cycle_cost": 1.5}),
        (policy, {"head_updates": 4}), (policy, {"head_micro": 4}), (policy, {"max_position": 0}),
    ):  # fmt: skip
        try:
            eagle(one, **own)
        except ValueError as error:
            found.append(str(error))
    try:
        eagle(with_adapters(policy)).update_params(nnx.state(policy, nnx.Param))
    except ValueError as error:
        found.append(str(error))
    engine, short = eagle(policy), eagle(policy, max_position=16)
    for one, prompts, config, images in (
        (engine, [], greedy(), None), (engine, "b c", greedy(), None), (engine, PROMPTS, greedy(0), None),
        (engine, PROMPTS, greedy(None), None), (engine, PROMPTS, greedy(), [0]),
        (engine, PROMPTS, greedy(temperature=1.0, seed="one"), None), (engine, PROMPTS, None, None),
        (engine, PROMPTS, greedy(eos_tokens="</s>"), None), (engine, PROMPTS, greedy(temperature=None), None),
        (engine, PROMPTS, greedy(temperature=1.0, top_k=-2), None), (short, PROMPTS, greedy(12), None),
    ):  # fmt: skip
        try:
            one.generate(prompts, config, images=images)
        except ValueError as error:
            found.append(str(error))
    return found


if __name__ == "__main__":
    print(json.dumps(refused()))
