"""Checks the program that makes the head for SmolLM2, on a random target."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import eagle_jax
from eagle_jax.checkpoints import write_whole
from eagle_jax.config import TreeConfig
from infer.common.tasks import HUB
from tests.models import random_prompts, tiny_target
from tests.training.common import VOCAB, check_lossless, logged, report_of, save_target
from train.demo import replies
from train.demo import smollm2 as recipe

OPTIONS = dict(batch=32, max_prompt=64, max_new_tokens=24, own_batches=(2, 1), draft_vocab=64, shard_rows=8, length=96,
               rows=4, updates=6, warmup=1, eval_every=4, dtype="float32")  # fmt: skip
KNOWN = "How many of the 12 apples and 7 pears in a basket are left?"


@pytest.mark.slow
def test_replies_of_a_shrinking_batch_are_those_of_generate(monkeypatch):
    sizes = []
    take_rows = replies.take_rows
    monkeypatch.setattr(replies, "CYCLES", 3)
    monkeypatch.setattr(replies, "take_rows", lambda *args: sizes.append(len(args[1])) or take_rows(*args))
    target = tiny_target(64)
    target = dataclasses.replace(target, config=dataclasses.replace(target.config, eos_ids=(15, 21, 52)))
    prompts = random_prompts([1, 5, 11, 16, 2, 9], 64)
    decoder = replies.Decoder(target, rows=8, longest=16, max_tokens=40)
    assert decoder.decode(prompts, 0.0) == eagle_jax.generate(target, None, prompts, max_new_tokens=40).tokens
    assert sizes == [4, 2]

    drawn = [decoder.decode(prompts[:1] * 8, 1.0, budget=4) for _ in range(2)]
    assert drawn[0] != drawn[1] and all(1 <= len(reply) <= 4 for reply in drawn[0])


def test_a_second_round_of_replies_is_sampled():
    prompts = [replies.Prompt(source, [index], False) for source in ("a", "own") for index in range(5)]
    batches = replies.schedule(prompts, 2, np.random.default_rng(0))
    assert all(len({prompt.source for prompt in part}) == 1 and len(part) <= 2 for _, part in batches)
    answered = [(*prompt[:2], heat) for heat, part in batches for prompt in part]
    assert sorted(prompt for *prompt, _ in answered) == sorted([*prompt[:2]] for prompt in prompts * 2)
    assert {heat for heat, _ in batches[6:]} == {1.0}
    first = {(prompt.source, prompt.tokens[0]): heat for heat, part in batches[:6] for prompt in part}
    assert [first["a", index] for index in range(5)] == [0.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.slow
def test_a_run_writes_replies_and_lossless_heads(tmp_path, capsys):
    target = tiny_target(VOCAB, layers=6)
    save_target(dataclasses.replace(target.config, max_position=128), target.params, tmp_path / "target")
    questions = [{"question": text, "answer": "4"} for text in (KNOWN, *(f"What is {i} + {i}?" for i in range(40)))]
    code = {"instruction": "Add.", "input": "", "response": "def add(x, y):\n    return x + y\n"}
    write_whole(tmp_path / "gsm8k" / "train.jsonl", "\n".join(map(json.dumps, questions)))
    write_whole(tmp_path / "gpteacher" / "code.json", json.dumps([code]))
    for name in HUB:
        write_whole(tmp_path / "tasks" / f"{name}.jsonl", json.dumps({"turns": ["Answer. " + KNOWN]}))
    place = str(tmp_path / "target")
    args = recipe.Args(data=tmp_path, tasks=tmp_path / "tasks", target=place, out=tmp_path / "eagle3", **OPTIONS)
    other = dataclasses.replace(args, out=tmp_path / "hass", replies=args.out, method="hass", shards=1)
    loaded = eagle_jax.load_target(place)
    with pytest.raises(ValueError, match="--seconds must be enough for replies to held-out prompts, got 1e-06"):
        recipe.main(dataclasses.replace(args, seconds=1e-6, out=tmp_path / "late"))
    assert not (tmp_path / "late" / recipe.REPLIES).exists()
    top = dataclasses.replace(other, out=tmp_path / "top", method="eagle3", taps=(6,), feature_weight=1.0)
    for run in (args, other, top):
        recipe.main(run)
        assert report_of(capsys)["updates"] == 6
        assert [line["updates"] for line in logged(run.out, "accuracy")] == [4, 6]
        check_lossless(loaded, eagle_jax.load_drafter(run.out / "head", loaded, TreeConfig(2, 2, 3)))
    assert not (other.out / recipe.REPLIES).exists()
    assert eagle_jax.load_drafter(top.out / "head", loaded).config.taps == (6,)
    assert recipe.learner_of(top, loaded).args.feature_weight == 1.0
    rows = [json.loads(line) for name in (recipe.REPLIES, recipe.HELD_OUT) for line in (args.out / name).open()]
    assert {"gsm8k", "code", "completion"} <= {row["source"] for row in rows}
    known = eagle_jax.chat_ids(eagle_jax.load_tokenizer(place, target.config), [{"role": "user", "content": KNOWN}])
    assert known not in [row["tokens"][: len(known)] for row in rows]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_rows": 9}, "--shard-rows must be a multiple of --rows 4 and at least .* got 9"),
        ({"shard_rows": 4, "rows": 4}, "--shard-rows must be a multiple of --rows 4 and at least"),
        ({"updates": 7, "shard_rows": 8}, "--updates must be a multiple of 2, a pass over a shard, got 7"),
        ({"replies": "here"}, "--replies must hold replies.jsonl, got .* without"),
    ],
)
def test_options_that_do_not_fit_raise(tmp_path, options, message):
    given = OPTIONS | {"data": tmp_path, "tasks": tmp_path, "out": tmp_path / "out"} | options
    if "replies" in options:
        given["replies"] = tmp_path
    with pytest.raises(ValueError, match=message):
        recipe.main(recipe.Args(**given))
