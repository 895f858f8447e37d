"""Compares policies with adapters of qwix (LoRA) with tunix's own, in an environment with google-tunix.

    python tests/integrations/tunix_lora.py logits|grpo|resume [whole|adapters]

The last line of the output is a JSON object.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import qwix
from flax import nnx
from jax.sharding import Mesh
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask

from eagle_jax import Target
from eagle_jax.integrations.tunix import EagleRollout
from eagle_jax.models import Decoder

sys.path.insert(0, str(Path(__file__).parent))
from tunix_program import PROMPTS, VOCAB, Tokenizer, greedy, models, texts, tiny_qwen3, vanilla

RANK, ALPHA = 2, 6.0
WITH = r".*layers.*(_proj|_einsum)"  # every matrix of the layers


def with_adapters(model, seed=3):
    """Returns the model with random adapters on every matrix of its layers; qwix begins with zeros."""
    provider = qwix.LoraProvider(module_path=WITH, rank=RANK, alpha=ALPHA)
    tokens = jnp.ones((1, 4), jnp.int32)
    real = jnp.ones_like(tokens, bool)
    inputs = (tokens, build_positions_from_mask(real), None, make_causal_attn_mask(real))
    adapted = qwix.apply_lora_to_model(model, provider, *inputs, rngs=nnx.Rngs(0))
    state, rng = nnx.state(adapted, nnx.LoRAParam), np.random.default_rng(seed)
    nnx.update(adapted, jax.tree.map(lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), leaf.dtype), state))
    return adapted


def logits():
    """Returns per model the largest difference to its own logits, and how far its adapters move them."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (2, 24)))
    real, found = jnp.ones_like(tokens, bool), {}
    inputs = (tokens, build_positions_from_mask(real), None, make_causal_attn_mask(real))
    for name, model in models().items():
        adapted = with_adapters(model)
        target = Target.from_tunix(adapted, max_position=512)
        (before, _), (theirs, _) = (nnx.jit(lambda module: module(*inputs))(one) for one in (model, adapted))
        ours = jax.jit(lambda params, config=target.config: Decoder(config).apply(
            {"params": params}, tokens, method="all_logits"
        ))(target.params)  # fmt: skip
        found[name] = {
            "difference": float(jnp.abs(ours - theirs).max()),
            "moved": float(jnp.abs(before - theirs).max()),
            "adapters": len(jax.tree.leaves(nnx.state(adapted, nnx.LoRAParam))),
        }
    return found


def cluster_of(actor, reference, **training):
    """Returns tunix's cluster with `EagleRollout`; `training` are settings of its trainer."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    return rl_cluster.RLCluster(
        actor=actor, reference=reference, tokenizer=Tokenizer(), cluster_config=rl_cluster.ClusterConfig(
            rollout_engine=functools.partial(EagleRollout, lanes=8),
            role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(3e-2), eval_every_n_steps=100, **training
            ),
            rollout_config=greedy(12, temperature=1.0, top_p=1.0, return_logprobs=True),
        ),
    )  # fmt: skip


def train(cluster, steps, reward):
    config = GRPOConfig(num_generations=4, num_iterations=2)
    learner = GRPOLearner(rl_cluster=cluster, reward_fns=reward, algo_config=config)
    learner.train([{"prompts": np.array(PROMPTS[:2])} for _ in range(steps)])


def count(completions):
    return [completion.split().count("b") for completion in completions]


def grpo(steps=3):
    """Trains adapters with `EagleRollout`; in every step compares its greedy texts with tunix's."""
    model, seen = with_adapters(tiny_qwen3()), []
    cluster = cluster_of(model, tiny_qwen3(), max_steps=2 * steps)
    engine, base = cluster.rollout, nnx.state(model, nnx.Not(nnx.LoRAParam))

    def reward(prompts, completions, **_):
        seen.append({
            "ours": texts(engine.generate(PROMPTS, greedy())),
            "vanilla": texts(vanilla(cluster.actor_trainer.model).generate(PROMPTS, greedy())),
            "programs": engine._importer.update_program._cache_size(),
        })  # fmt: skip
        return count(completions)

    train(cluster, steps, reward)
    after = nnx.state(cluster.actor_trainer.model, nnx.Not(nnx.LoRAParam))
    return {
        "steps": seen,
        "trained": int(cluster.actor_trainer.train_steps),
        "weights as before": jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), base, after)),
    }


def resume(kind):
    """Returns the texts of a second run of a cluster with checkpoints, before its first step."""
    build = tiny_qwen3 if kind == "whole" else lambda: with_adapters(tiny_qwen3())
    with tempfile.TemporaryDirectory() as folder:
        kept = ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=2)
        saved = {"max_steps": 2, "checkpoint_root_directory": folder, "checkpointing_options": kept}
        train(cluster_of(build(), tiny_qwen3(), **saved), 1, lambda prompts, completions, **_: count(completions))
        again = cluster_of(build(), tiny_qwen3(), **saved)
        models = again.actor_trainer.model, build()
        trained, initial = (vanilla(model).generate(PROMPTS, greedy()) for model in models)
        return {
            "restored": int(again.actor_trainer.train_steps),
            "texts": texts(again.rollout.generate(PROMPTS, greedy())),
            "of the trainer": texts(trained),
            "of the initial policy": texts(initial),
        }


if __name__ == "__main__":
    print(json.dumps({"logits": logits, "grpo": grpo, "resume": resume}[sys.argv[1]](*sys.argv[2:])))
