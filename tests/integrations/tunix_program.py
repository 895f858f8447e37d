"""Compares imported models and rollouts with tunix's own, in an environment with google-tunix; see `test_tunix.py`.

    python tests/integrations/tunix_program.py logits|layers|rollout|grpo|follow|devices

The last line of the output is a JSON object.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
import warnings
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask

from eagle_jax import DraftHead, Target, TreeConfig, generate, prompt_lookup
from eagle_jax.config import HeadConfig
from eagle_jax.integrations.tunix import EagleRollout
from eagle_jax.models import Decoder, init_head_params
from eagle_jax.runtime import rollouts
from eagle_jax.training import adapt

VOCAB = 64
PAD, BOS, EOS = 0, 1, 2
SIZES = dict(num_layers=2, vocab_size=VOCAB, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=8, num_kv_heads=2,
             norm_eps=1e-5)  # fmt: skip
GEMMA = dict(num_layers=7, num_embed=VOCAB, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=8, num_kv_heads=2,
             sliding_window_size=5, global_base_frequency=1_000_000, global_scale_factor=8.0,
             param_dtype=jnp.float32)  # fmt: skip
PROMPTS = ["b c d e", "c d", "z y x w v u", "b c d e", "q"]


class Tokenizer:
    """One token per letter; others are `?`."""

    def encode(self, text, **_):
        return [3 + ord(letter) - ord("a") for letter in str(text).split()]

    def decode(self, ids, **_):
        return " ".join(chr(ord("a") + number - 3) if number >= 3 else "?" for number in ids)

    def bos_id(self):
        return BOS

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


def random(module, seed=0, scale=0.3):
    """Replaces the weights, of which some begin as zeros or ones."""
    leaves, structure = jax.tree.flatten(nnx.state(module, nnx.Param))
    rng = np.random.default_rng(seed)
    drawn = [jnp.asarray(leaf + scale * rng.normal(size=leaf.shape), leaf.dtype) for leaf in leaves]
    nnx.update(module, jax.tree.unflatten(structure, drawn))
    return module


def tiny_qwen3(seed=0, **changes):
    config = qwen3.ModelConfig(**{**SIZES, "rope_theta": 1_000_000, **changes})
    return random(qwen3.Qwen3(config, rngs=nnx.Rngs(0)), seed)


def models():
    by_width = gemma3.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
    make = {
        "qwen3": tiny_qwen3,
        "qwen3, tied": lambda: tiny_qwen3(use_tied_embedding=True),
        "qwen3, other base": lambda: tiny_qwen3(rope_theta=10_000),
        "qwen2": lambda: qwen2.Qwen2(qwen2.ModelConfig(**SIZES, rope_theta=10_000), rngs=nnx.Rngs(0)),
        "llama3": lambda: llama3.Llama3(llama3.ModelConfig(**SIZES, rope_theta=500_000), rngs=nnx.Rngs(0)),
        "llama3, tied": lambda: llama3.Llama3(
            llama3.ModelConfig(**SIZES, rope_theta=500_000, weight_tying=True), rngs=nnx.Rngs(0)
        ),
        "gemma3": lambda: gemma3.Gemma3(gemma3.ModelConfig(**GEMMA), rngs=nnx.Rngs(0)),
        "gemma3, one array": lambda: gemma3.Gemma3(
            gemma3.ModelConfig(**GEMMA | dict(num_kv_heads=4, embed_dim=40, query_pre_attn_norm=by_width)),
            rngs=nnx.Rngs(0),
        ),
    }
    return {name: random(build()) for name, build in make.items()}


def logits():
    """Returns the largest difference to each model's own logits, and their largest magnitude."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (2, 24)))
    real = jnp.ones_like(tokens, bool)
    inputs = (tokens, build_positions_from_mask(real), None, make_causal_attn_mask(real))
    found = {}
    for name, model in models().items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            target = Target.from_tunix(model, max_position=512)
        theirs, _ = nnx.jit(lambda module: module(*inputs))(model)
        ours = jax.jit(lambda params, config=target.config: Decoder(config).apply(
            {"params": params}, tokens, method="all_logits"
        ))(target.params)  # fmt: skip
        found[name] = {
            "difference": float(jnp.abs(ours - theirs).max()),
            "largest": float(jnp.abs(theirs).max()),
            "warned": any("apply_rope" in str(one.message) for one in caught),
        }
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def vanilla(model, cache=256, tokenizer=None):
    config = model.config
    sizes = CacheConfig(cache, config.num_layers, config.num_kv_heads, config.head_dim)
    return VanillaRollout(model, TokenizerAdapter(tokenizer or Tokenizer()), sizes)


def greedy(tokens=24, **changes):
    # Tunix hides generated pads from attention: here they end a text.
    stops = {"eos_tokens": [EOS, PAD], "max_prompt_length": 8, "kv_cache_size": 256}
    return RolloutConfig(**{"max_tokens_to_generate": tokens, "temperature": 0.0, "top_p": None, **stops, **changes})


def texts(output):
    return [row.tolist() for row in output.tokens]


def eagle(model, config=None, **options):
    return EagleRollout(rollout_actor=model, tokenizer=Tokenizer(), rollout_config=config or greedy(), **options)


def run_page(page, names):
    """Runs the first block of a page that needs tunix."""
    text = Path(__file__).resolve().parents[2].joinpath("docs", f"{page}.md").read_text(encoding="utf-8")
    exec(re.search(r"^```py\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1], names)


def layers():
    """Returns texts of the imported model and of the same layer by layer, and how far log-probabilities differ."""
    imported = Target.from_tunix(model := tiny_qwen3(), max_position=512)
    names = {"model": model, "config": imported.config}
    run_page("own_model", names)
    options = dict(max_new_tokens=24, eos_ids=[EOS], log_probs="target")
    prompts = [[BOS, 4, 5, 6], [BOS, 9], [BOS, 20, 30, 20, 30, 20, 30, 20]]
    runs = [generate(target, drafter, prompts, **options) for target in (imported, names["target"])
            for drafter in (None, prompt_lookup(target))]  # fmt: skip
    difference = max(np.abs(a - b).max() for a, b in zip(runs[0].log_probs, runs[2].log_probs, strict=True))
    return {"tokens": [run.tokens for run in runs], "log-probabilities": float(difference)}


def rollout():
    """Compares every method of `EagleRollout` with tunix's own engine."""
    model, found = tiny_qwen3(), {}
    config = greedy(return_logprobs=True)
    theirs = vanilla(model)
    expected = theirs.generate(PROMPTS, config)
    found["vanilla"] = texts(expected)
    engines = {"plain": eagle(model, lanes=2), "lookup": eagle(model, lanes=3, drafter=prompt_lookup, cycle_cost=1.5)}
    for name, engine in engines.items():
        output = engine.generate(PROMPTS, config)
        found[name] = {
            "tokens": texts(output),
            "text": output.text == expected.text,
            "prompts": np.array_equal(output.left_padded_prompt_tokens, expected.left_padded_prompt_tokens),
            "log-probabilities": max(
                float(np.abs(np.asarray(own) - np.asarray(other)).max(initial=0))
                for own, other in zip(output.logprobs, expected.logprobs, strict=True)
            ),
        }
    engine = engines["lookup"]
    spent = {key: float(payoff.spent) for key, payoff in engine._payoffs.items() if payoff is not None}
    asked = []

    def noted(*args, samples_per_prompt, **options):
        asked.append((len(args[2]), samples_per_prompt))
        return rollouts.rollout(*args, samples_per_prompt=samples_per_prompt, **options)

    with mock.patch("eagle_jax.integrations.tunix.rollout", noted):
        for prompts in (["b"] * 4 + ["c"] * 2, ["b", "b", "c"]):
            engine.generate(prompts, config)
    found["runs of prompts"] = asked
    ends = int(expected.tokens[0][5])
    short, cut = (one.generate(PROMPTS[:1], greedy(eos_tokens=[ends, EOS, PAD])).tokens[0] for one in (engine, theirs))
    found["other stops"] = [list(map(int, short)), list(map(int, cut)), ends]
    found["payoffs"] = [list(engines["plain"]._payoffs.values()), list(spent), min(spent.values()) > 0]
    out = generate(
        Target.from_tunix(model, max_position=512), None, [[BOS, 4, 5]], max_new_tokens=24, eos_ids=[EOS, PAD]
    )
    single = theirs.generate(["b c"], config)
    found["generate"] = {"ours": [t for t in out.tokens[0] if t not in (EOS, PAD)], "theirs": texts(single)[0]}
    long = "a " * 11
    wide = [one.generate([long], greedy(3)).left_padded_prompt_tokens for one in (theirs, engine)]
    found["long prompt"] = [list(map(int, padded[0])) for padded in wide]

    prompts, replies = expected.left_padded_prompt_tokens, np.zeros((len(PROMPTS), 24), np.int32)
    for row, tokens in zip(replies, expected.tokens, strict=True):
        row[: len(tokens)] = tokens
    found["scores"] = float(np.abs(np.where(
        replies != PAD,
        np.asarray(engine.get_per_token_logps(prompts, replies))
        - np.asarray(theirs.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(replies))),
        0,
    )).max())  # fmt: skip

    # Sampled, of the whole law: log-probabilities are those of the trained model at that temperature.
    hot = greedy(12, temperature=0.7, top_p=1.0, return_logprobs=True)
    first, second = (engine.generate(["b c d"] * 4, hot) for _ in range(2))
    seeded = [texts(engine.generate(["b c d"] * 4, greedy(12, temperature=0.7, seed=seed))) for seed in
              (5, jax.random.PRNGKey(5), jnp.int32(5))]  # fmt: skip
    replies = np.zeros((4, 12), np.int32)
    for row, tokens in zip(replies, first.tokens, strict=True):
        row[: len(tokens)] = tokens
    graph, state = nnx.split(model)
    scored = common.compute_per_token_logps(
        graph, state, jnp.asarray(first.left_padded_prompt_tokens), jnp.asarray(replies), pad_id=PAD, eos_id=EOS,
        temperature=0.7,
    )  # fmt: skip
    found["sampled"] = {
        "differs by call": texts(first) != texts(second),
        "one text per sample": len({tuple(row) for row in texts(first)}),
        "same by seed": seeded[0] == seeded[1] == seeded[2],
        "log-probabilities": max(
            float(np.abs(own - np.asarray(row)[: len(own)]).max(initial=0))
            for own, row in zip(first.logprobs, scored, strict=True)
        ),
    }

    filters = (dict(top_p=1.0, top_k=1), dict(top_p=1e-6), dict(top_p=None, top_k=-1))
    found["filters"] = [texts(engine.generate(PROMPTS, greedy(temperature=1.0, **own))) == found["vanilla"]
                        for own in filters]  # fmt: skip

    # New weights: the same programs.
    programs = (engine._importer.update_program, rollouts.start_program, rollouts.advance_program)
    other, sizes = tiny_qwen3(seed=7), []
    for new in (model, other, model, other):
        engine.update_params(nnx.state(new, nnx.Param), (nnx.Param,))
        again = engine.generate(PROMPTS, config)
        sizes.append([program._cache_size() for program in programs])
    engine.update_params(jax.tree.map(jnp.copy, nnx.state(other, nnx.Param)))
    found["update"] = {
        "ours": texts(again),
        "theirs": texts(vanilla(other).generate(PROMPTS, config)),
        "programs": sizes,
        "source lives": not any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(other))),
    }
    return found


def grpo(kind="plain", steps=3):
    """Trains with `EagleRollout`; in every step compares its greedy texts with tunix's, of the trained weights."""
    model, seen = tiny_qwen3(), []
    config = greedy(12, temperature=1.0, top_p=1.0, return_logprobs=True)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    settings = {
        "role_to_mesh": dict.fromkeys(rl_cluster.Role, mesh),
        "rollout_config": config,
        "training_config": rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(3e-2),
            eval_every_n_steps=100,
            max_steps=2 * steps,  # two iterations each
        ),
    }
    run_page("rl", settings)
    if kind == "drafted":  # by a head that follows and looks in earlier replies
        own = dict(lanes=2, drafter=own_head, history=64, head_optimizer=optax.adam(1e-2), cycle_cost=1.5)
        rollout_engine = functools.partial(EagleRollout, **own)
        settings["cluster_config"] = dataclasses.replace(settings["cluster_config"], rollout_engine=rollout_engine)
    cluster = rl_cluster.RLCluster(
        actor=model, reference=tiny_qwen3(), tokenizer=Tokenizer(), cluster_config=settings["cluster_config"]
    )
    engine = cluster.rollout

    def reward(prompts, completions, **_):
        trained = cluster.actor_trainer.model
        seen.append({
            "ours": texts(engine.generate(PROMPTS, greedy())),
            "vanilla": texts(vanilla(trained).generate(PROMPTS, greedy())),
            "programs": engine._importer.update_program._cache_size(),
            "prompts": len(prompts),
            "reward": float(np.mean(found := [completion.split().count("b") for completion in completions])),
        })  # fmt: skip
        return found

    learner = GRPOLearner(
        rl_cluster=cluster, reward_fns=reward, algo_config=GRPOConfig(num_generations=4, num_iterations=2)
    )
    learner.train([{"prompts": np.array(PROMPTS[:2])} for _ in range(steps)])
    learner = engine._learner and int(engine._learner.step)
    return {"steps": seen, "trained": int(cluster.actor_trainer.train_steps), "updates": learner, "tau": engine.tau}


def own_head(target):
    """Returns a random EAGLE-3 head for a target, under which prompt lookup looks in earlier samples."""
    layer = dataclasses.replace(target.config, num_layers=1)
    config = HeadConfig("eagle3", layer, VOCAB, target.config.hidden_size, (0, 1, 2))
    params = init_head_params(config, jax.random.key(1)) | {"d2t": jnp.zeros(VOCAB, jnp.int32)}
    head = DraftHead.from_params(config, params, target, TreeConfig.chain(3))
    return head.with_lookup(prompt_lookup(target, ngram=4, length=4, history=[]))


def follow(steps=6):
    """Returns texts and tau of plain decoding and of a head that follows two policies in turns, and programs."""
    policies = [tiny_qwen3(seed) for seed in (0, 7)]
    config, plain = greedy(32), eagle(policies[0])
    learns = dict(head_optimizer=optax.adam(1e-2), head_updates=8, head_micro=2)
    options = {"still": {}, "learns": learns, "follows": learns | {"history": 512}}
    engines = {name: eagle(policies[0], drafter=own_head, **own) for name, own in options.items()}
    engine = engines["follows"]
    programs, found = (adapt, engine._importer.update_program, rollouts.advance_program), []
    for step in range(steps):
        for one in (plain, *engines.values()):
            one.update_params(nnx.state(policies[step // 3], nnx.Param), (nnx.Param,))
        wanted = texts(plain.generate(PROMPTS, config))
        found.append({
            "same": [texts(one.generate(PROMPTS, config)) for one in engines.values()] == [wanted] * 3,
            **{name: one.tau for name, one in engines.items()},
            "programs": [program._cache_size() for program in programs],
        })  # fmt: skip
    kept = sum(len(row) for _, row in engine._samples)
    return {"steps": found, "kept": kept}


def devices():
    """Returns whether an engine on the second device writes what the first device's policy writes, before and after."""
    first, second = jax.devices()[:2]
    mesh, found = Mesh(np.array([second]).reshape(1, 1), ("fsdp", "tp")), []
    engine = eagle(tiny_qwen3(), drafter=own_head, history=64, mesh=mesh)
    for seed in (0, 7):
        policy = jax.device_put(nnx.state(tiny_qwen3(seed), nnx.Param), first)
        engine.update_params(policy, (nnx.Param,))
        wanted = texts(vanilla(tiny_qwen3(seed)).generate(PROMPTS, greedy()))
        found.append(texts(engine.generate(PROMPTS, greedy())) == wanted)
    homes = {str(home) for leaf in jax.tree.leaves(engine.target.params) for home in leaf.devices()}

    # Five replies on two devices: an update of the head fills up the rows.
    both = Mesh(np.array([first, second]).reshape(2, 1), ("fsdp", "tp"))
    spread = eagle(tiny_qwen3(7), drafter=own_head, head_optimizer=optax.adam(1e-2), mesh=both)
    for _ in range(3):
        found.append(texts(spread.generate(PROMPTS, greedy())) == wanted)
    return {
        "same": found, "devices": sorted(homes), "second": str(second), "updates": int(spread._learner.step),
        "tau": spread.tau,
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "devices":
        jax.config.update("jax_num_cpu_devices", 2)
    parts = {
        "logits": logits,
        "layers": layers,
        "rollout": rollout,
        "grpo": grpo,
        "follow": follow,
        "devices": devices,
    }
    print(json.dumps(parts[sys.argv[1]](*sys.argv[2:])))
