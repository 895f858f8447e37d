"""Measures tunix's rollouts and those of this library, in an environment with google-tunix; see `test_tunix.py`.

    python tests/integrations/tunix_speed.py [trained|random|smollm2 [TEMPERATURES]]

Temperatures are separated by commas. The last line of the output is a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import jax
import numpy as np
from flax import nnx
from tunix.models.qwen2 import model as qwen2

from eagle_jax import DraftHead, TreeConfig, load_demo, prompt_lookup
from eagle_jax.assets import bundled_questions
from eagle_jax.integrations.tunix import EagleRollout
from eagle_jax.models.projections import split_projections
from eagle_jax.runtime.compilation import machine, revision
from infer import REPOSITORY
from infer.common.tasks import load_task
from tests.integrations.tunix_program import EOS, Tokenizer, greedy, texts, tiny_qwen3, vanilla


def bundled_qwen2(target):
    """Returns a bundled target as a Qwen2 of tunix, whose biases are zero."""
    config, params = target.config, split_projections(target.params, target.config)
    model = qwen2.Qwen2(qwen2.ModelConfig(
        num_layers=config.num_layers, vocab_size=config.vocab_size, embed_dim=config.hidden_size,
        hidden_dim=config.intermediate_size, num_heads=config.num_heads, head_dim=config.head_dim,
        num_kv_heads=config.num_kv_heads, rope_theta=config.rope.theta, norm_eps=config.rms_norm_eps,
        use_tied_embedding=config.tie_word_embeddings,
    ), rngs=nnx.Rngs(0))  # fmt: skip
    model.embedder.input_embedding.set_value(params["embed_tokens"]["embedding"])
    model.final_norm.w.set_value(params["norm"]["scale"])
    if not config.tie_word_embeddings:
        model.lm_head.w.set_value(params["lm_head"]["weight"].T)
    for index, layer in enumerate(model.layers):
        own = params[f"layers_{index}"]
        for part in ("q_proj", "k_proj", "v_proj"):
            weight = own["self_attn"][part]["weight"].T.reshape(config.hidden_size, -1, config.head_dim)
            getattr(layer.attn, part).w.set_value(weight)
        out = own["self_attn"]["o_proj"]["weight"].T.reshape(-1, config.head_dim, config.hidden_size)
        layer.attn.o_proj.w.set_value(out)
        for part in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, part).kernel.set_value(own["mlp"][part]["weight"].T)
        for part in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, part).w.set_value(own[part]["scale"])
    return model


def speed(case="trained", temperatures="0", tokens=128, rows=8, repetitions=3):
    """Returns tokens per second in float32, of a bundled target ("trained" or "smollm2") or of a random Qwen3.

    Those of every temperature, and the machine.

    Sampled texts differ from tunix's, but each engine of ours writes the same ones.
    """
    drafters = {"plain": None, "prompt lookup": prompt_lookup}
    if case != "random":
        target, head, words = load_demo("smollm2" if case == "smollm2" else "eagle3")
        if words.pad_token_id == words.eos_token_id:  # tunix hides pads, also those that end the turns of a prompt
            words.pad_token = words.convert_ids_to_tokens(0)
        model, chain = bundled_qwen2(target), TreeConfig.chain(3)
        drafters["EAGLE-3"] = lambda policy: DraftHead.from_params(head.config, head.params, policy, chain)
        tasks = [load_task(name, bundled_questions()).questions for name in ("chat", "math", "code")]
        questions = [question.turns[0] for task in tasks for question in task[: rows // 3 + 1]][:rows]
        chats = [[{"role": "user", "content": question}] for question in questions]
        prompts = [words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        stop = words.eos_token_id
    else:
        sizes = dict(num_layers=4, embed_dim=256, hidden_dim=768, num_heads=8, head_dim=32, num_kv_heads=4)
        model, words, stop = tiny_qwen3(vocab_size=512, **sizes), Tokenizer(), EOS
        letters = np.random.default_rng(0).integers(ord("a"), ord("z") + 1, (rows, 24))
        prompts = [" ".join(map(chr, row)) for row in letters]
    config = greedy(tokens, max_prompt_length=256, kv_cache_size=512, eos_tokens=[stop])

    given = dict(rollout_actor=model, tokenizer=words, rollout_config=config)
    engines = {"tunix": vanilla(model, 512, words)}
    engines |= {name: EagleRollout(drafter=drafter, lanes=rows, **given) for name, drafter in drafters.items()}
    measured = {
        temperature: measure(engines, prompts, at_temperature(config, float(temperature)), repetitions)
        for temperature in temperatures.split(",")
    }
    return {"machine": machine(), "revision": revision(REPOSITORY), "temperatures": measured}


def at_temperature(config, temperature):
    """Returns a function that makes the settings of a call: the vanilla engine deletes the seed that it gets."""
    if temperature == 0:
        return lambda: config
    law = dict(temperature=temperature, top_p=1.0)
    return lambda: dataclasses.replace(config, **law, seed=jax.random.PRNGKey(0))


def measure(engines, prompts, settings, repetitions):
    """Returns tokens per second of every engine, and the share of its texts that equal those of others."""
    written = {name: texts(engine.generate(prompts, settings())) for name, engine in engines.items()}  # compiles
    seconds = {name: [] for name in engines}
    for name in list(engines) * repetitions:
        start = time.perf_counter()
        engines[name].generate(prompts, settings())
        seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "tokens": (count := sum(map(len, written[name]))),
            "tokens per second": round(count / float(np.median(seconds[name])), 1),
            "texts of tunix": sum(map(list.__eq__, written[name], written["tunix"])) / len(prompts),
            "texts of plain": sum(map(list.__eq__, written[name], written["plain"])) / len(prompts),
        }
        for name in engines
    }


if __name__ == "__main__":
    print(json.dumps(speed(*sys.argv[1:])))
