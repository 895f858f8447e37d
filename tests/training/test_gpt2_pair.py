"""The textbook pair of standard speculative sampling, in miniature: a GPT-2 and a smaller one distilled from it."""

from __future__ import annotations

import dataclasses
import shutil

import jax

import eagle_jax
import train.distill
from eagle_jax.assets import bundled
from eagle_jax.checkpoints import load_target_checkpoint, save_target_checkpoint
from eagle_jax.config import DecoderConfig, RopeConfig, TreeConfig
from eagle_jax.models.decoder import init_params
from tests.training.runs import OPTIONS, VOCAB, losses

LARGE = DecoderConfig(
    vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=6,
    rope=RopeConfig(kind="none"), max_position=128, block="gpt2", qkv_bias=True, out_bias=True, mlp_bias=True,
    tie_word_embeddings=True, eos_ids=(1,), bos_id=0, architecture="GPT2LMHeadModel",
)  # fmt: skip
SMALL = dataclasses.replace(LARGE, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=2,
                            head_dim=8)  # fmt: skip


def test_a_gpt2_is_distilled_into_a_smaller_one_that_drafts_losslessly(place):
    for seed, (name, config) in enumerate({"gpt2-medium": LARGE, "gpt2": SMALL}.items()):
        params = jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, init_params(config, jax.random.key(seed)))
        save_target_checkpoint(config, params, place / name, "float32")
        for path in bundled("target").glob("tokenizer*"):
            shutil.copy(path, place / name)
    skipped = ("unroll", "taps", "draft_vocab", "eval_tree")
    options = {name: value for name, value in OPTIONS.items() if name not in skipped}
    args = train.distill.Args(**{
        **options, "target": str(place / "gpt2-medium"), "init": str(place / "gpt2"), "out": place / "draft",
        "data": (str(place / "train.jsonl"),), "data_axis": 1, "rate": 1e-2,
    })  # fmt: skip
    assert train.distill.main(args) == 0
    seen = losses(place / "draft")
    assert seen[-1][0] < seen[0][0]
    config, _ = load_target_checkpoint(place / "draft" / "model")
    assert (config.block, config.num_layers, config.hidden_size) == ("gpt2", 1, 16)
    target = eagle_jax.load_target(place / "gpt2-medium")
    model = eagle_jax.load_draft_model(place / "draft" / "model", target).with_tree(TreeConfig(3, 2, 6))
    prompts = [[7, 8, 9], [100, 20]]
    fast, plain = (eagle_jax.generate(target, one, prompts, max_new_tokens=16) for one in (model, None))
    assert fast.tokens == plain.tokens
