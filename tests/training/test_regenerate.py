"""Every reply is the target's: killed and resumed, with a head and without, by one process and two."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import train.regenerate as program
from eagle_jax.checkpoints import CheckpointError, save_head_checkpoint, save_target_checkpoint
from eagle_jax.config import TreeConfig
from eagle_jax.data.corpus.sources import Source, build_corpus
from tests.data.chats import TEMPLATES, tokenizer_with
from tests.models import tiny_head, tiny_target
from tests.training.runs import free_port
from train.loop import dialogues
from train.loop.dialogues import _keys
from train.loop.places import LOCK

VOCAB = 272  # the tokenizer has 263
STOPS = tuple(range(60, 80))  # enough letters that some replies end by themselves
SYSTEM = {"role": "system", "content": "s" * 232}  # all prompts fall into one bucket: one compilation serves them
OLD = {"role": "assistant", "content": "never used"}


def asking(*questions: str) -> dict:
    return {"messages": [SYSTEM, *(turn for text in questions for turn in ({"role": "user", "content": text}, OLD))]}


ROWS = [
    asking("one"), asking("one", "two"), {"text": "plain"}, asking("2"), asking("a", "b"), asking("x" * 200),
    asking("three"), asking("four"), {"messages": [OLD]}, asking("five", "x" * 200),
    {"messages": [SYSTEM, {"role": "user", "content": "six"}]}, asking("q", "r", "s"), asking("seven"),
]  # fmt: skip
PLAIN, ALONE, LONG = 2, 8, 5  # rows that give nothing
SHORT, PROMPT = 9, 10  # one that ends early, one whose last turn has no reply


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target with its tokenizer, a head, and two sources of rows."""
    root = tmp_path_factory.mktemp("regenerate")
    target, head = tiny_target(VOCAB), tiny_head("eagle1", TreeConfig.chain(2), VOCAB)
    config = dataclasses.replace(target.config, eos_ids=STOPS)
    save_target_checkpoint(config, target.params, root / "target", "float32")
    tokenizer_with(TEMPLATES["chatml"]).save_pretrained(root / "target")
    save_head_checkpoint(head.config, head.params, root / "head", "float32")
    for name, rows in (("a", ROWS[:8]), ("b", ROWS[8:])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def args_of(folder: Path, out: Path, **changes) -> program.Args:
    given = dict(
        target=str(folder / "target"), data=(str(folder / "a.jsonl"), str(folder / "b.jsonl")), out=out,
        batch=4, shard_rows=5, max_new_tokens=8, max_prompt=384,
    )  # fmt: skip
    return program.Args(**{**given, **changes})


def written(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.name != LOCK}


def texts_of(out: Path) -> list[dict]:
    return [json.loads(line) for path in sorted(out.glob("*.jsonl")) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(folder) -> Path:
    """An uninterrupted run without a head."""
    program.main(args_of(folder, folder / "whole"))
    return folder / "whole"


def test_every_reply_is_the_targets_and_taught_once(folder, whole):
    tokenizer = tokenizer_with(TEMPLATES["chatml"])
    shards = [f"shard-0000{number}.json{end}" for number in range(3) for end in ("", "l")]
    assert sorted(written(whole)) == ["settings.json", *shards]
    texts = texts_of(whole)
    replies: dict[int, int] = {}
    for text in texts:
        row = ROWS[text["row"]]
        assert text["source"] == str(folder / ("a.jsonl" if text["row"] < 8 else "b.jsonl"))
        assert text["temperature"] == text["row"] % 2
        assert [turn for turn in text["messages"] if turn["role"] != "assistant"] == [
            turn for turn in row["messages"][: len(text["messages"])] if turn["role"] != "assistant"
        ]
        for start, end in text["supervised"]:
            replies[text["row"]] = replies.get(text["row"], 0) + 1
            assert 0 < end - start <= 8
            assert end - start == 8 or text["tokens"][end - 1] in STOPS
            assert not set(text["tokens"][start : end - 1]) & set(STOPS)
        shown = tokenizer.decode(text["tokens"][: text["supervised"][0][0]])
        assert shown.endswith("<|im_start|>assistant\n")
        last = text["tokens"][slice(*text["supervised"][-1])]
        said = tokenizer.decode(last[:-1] if last[-1] in STOPS else last)
        assert text["messages"][-1] == {"role": "assistant", "content": said}
    turns = {i: sum(turn == OLD for turn in row.get("messages", [])) for i, row in enumerate(ROWS)}
    wanted = {**turns, SHORT: 1, PROMPT: 1}
    assert replies == {i: count for i, count in wanted.items() if i not in (PLAIN, ALONE, LONG)}
    corpus, skipped = build_corpus([Source(str(whole / "*.jsonl"))], tokenizer, progress=False)
    assert [corpus[i].tokens.tolist() for i in range(len(corpus))] == [text["tokens"] for text in texts]
    assert skipped == {}


def test_the_report_counts_what_was_written(folder, whole, capsys):
    before = written(whole)
    program.main(args_of(folder, whole))  # all shards exist: nothing is generated
    assert written(whole) == before
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    texts = texts_of(whole)
    spans = [(text["tokens"], start, end) for text in texts for start, end in text["supervised"]]
    cut = sum(tokens[end - 1] not in STOPS for tokens, _, end in spans)
    assert 0 < cut < len(spans)
    too_long = {"prompt longer than --max-prompt 384": 1}
    skipped = {"plain text, which has no replies": 1, "no turn of a user to answer": 1, **too_long}
    assert report == {
        "rows": 13, "shards": 3, "texts": len(texts), "replies": len(spans), "cut": cut, "skipped": skipped,
        "reply_tokens": sum(end - start for _, start, end in spans), "shortened": too_long, "out": str(whole),
    }  # fmt: skip


def test_killed_and_resumed_it_writes_the_same(folder, whole, tmp_path, monkeypatch):
    """Killed between the turns of a batch, and a line torn off (test_shards tears everywhere)."""
    out, generate, calls = tmp_path / "out", dialogues.generate, itertools.count(1)

    def killing(*args, **options):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return generate(*args, **options)

    monkeypatch.setattr(dialogues, "generate", killing)
    with pytest.raises(KeyboardInterrupt):
        program.main(args_of(folder, out))
    monkeypatch.undo()
    assert (out / "shard-00000.jsonl").exists()
    (partial,) = out.glob("*.partial")
    done = partial.read_bytes()
    last = done.splitlines()[-1]
    partial.write_bytes(done + last[: len(last) // 2])
    program.main(args_of(folder, out))
    assert written(out) == written(whole)


def test_a_head_changes_nothing_but_the_time(folder, whole, tmp_path, capsys):
    """Nor do the sizes of batches and shards, which put rows into other places: every row has its own key."""
    changes = dict(head=str(folder / "head"), tree="2,2,4", batch=8, shard_rows=13)
    program.main(args_of(folder, tmp_path / "out", **changes))
    found = {(text["row"], tuple(text["tokens"])): text for text in texts_of(tmp_path / "out")}
    assert found == {(text["row"], tuple(text["tokens"])): text for text in texts_of(whole)}
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["tau"] > 1


def test_keys_differ_by_row_and_by_turn_and_not_by_place():
    rows = jnp.asarray([5, 9, 5, 0], jnp.uint32)
    given = [(0, 0), (0, 1), (1, 0)]
    keys = [jax.random.key_data(_keys(jax.random.key(seed), rows, turn)).tolist() for seed, turn in given]
    assert all(found[0] == found[2] for found in keys)
    assert len({tuple(key) for found in keys for key in found[1:]}) == 9


@pytest.mark.slow  # two processes on two cores
def test_two_processes_share_the_shards(folder, whole, tmp_path):
    given = dataclasses.asdict(args_of(folder, tmp_path / "out"))
    code = f"import train.regenerate as program\nfrom pathlib import PosixPath\nprogram.main(program.Args(**{given!r}))"
    names = {**os.environ, "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env={**names, "JAX_PROCESS_ID": str(index)})
        for index in range(2)
    ]  # fmt: skip
    outputs = [each.communicate(timeout=600) for each in both]
    assert [each.returncode for each in both] == [0, 0], outputs
    assert written(tmp_path / "out") == written(whole)
    report = json.loads(outputs[0][0].splitlines()[-1])
    assert (report["rows"], report["shards"], report["texts"]) == (13, 3, len(texts_of(whole)))
    assert '"rows"' not in outputs[1][0]  # one process prints


def test_cut_replies_may_be_left_out(folder, whole, tmp_path, capsys):
    program.main(args_of(folder, tmp_path / "out", keep_cut=False))
    texts = texts_of(tmp_path / "out")
    ends = [text["tokens"][end - 1] for text in texts for _, end in text["supervised"]]
    assert ends
    assert set(ends) <= set(STOPS)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["skipped"]["reply cut by --max-new-tokens 8"] > 0
    assert {text["row"] for text in texts} < {text["row"] for text in texts_of(whole)}


def test_a_limit_draws_rows_and_a_larger_one_more_of_them(folder, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(program, "write", lambda writer, sources, rows: drawn.append(rows.tolist()))
    for limit, seed in ((4, 3), (8, 3), (4, 5), (20, 3)):
        program.main(args_of(folder, tmp_path / f"{limit}-{seed}", limit=limit, seed=seed))
    few, more, other, everything = drawn
    assert len(few) == 4 and len(more) == 8 and set(few) < set(more)
    assert few == sorted(few) != other and everything == list(range(13))


def test_other_settings_are_refused(folder, whole, tmp_path):
    before = written(whole)
    (tmp_path / "c.jsonl").write_text(json.dumps(asking("other")) + "\n")
    (tmp_path / "other.jinja").write_text(TEMPLATES["marked"])
    for changes, message in (
        ({"seed": 1}, r"whole was begun with other settings \(seed was 0 and is now 1\)\. Choose"),
        ({"data": (str(tmp_path / "c.jsonl"),)}, r"data was .* and is now .*; contents of data was "),
        ({"chat_template": str(tmp_path / "other.jinja")}, r"chat template was '\w{16}' and is now '\w{16}'"),
    ):
        with pytest.raises(ValueError, match=message):
            program.main(args_of(folder, whole, **changes))
    stops = folder / "target" / "generation_config.json"
    said = stops.read_text() if stops.exists() else None
    stops.write_text(json.dumps({"eos_token_id": [3]}))
    try:
        with pytest.raises(ValueError, match=r"stop tokens was \[60, .* 79, 262\] and is now \[3, 262\]"):
            program.main(args_of(folder, whole))
    finally:
        stops.unlink() if said is None else stops.write_text(said)
    assert written(whole) == before


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([ROWS[ALONE]], {}, "--data must hold a row with a reply to write, got none: 1 x no turn of a user to answer"),
        ([asking("a", "b")], {"template": "{{ messages[-1]['content'] }}"}, "1 x the chat template drops a turn"),
        ([asking("a")], {"template": ""}, "the tokenizer must have a chat template"),
        ([asking("a")], {"vocab": 262}, "must have at most the target's 262 tokens, got 263"),
    ],
)
def test_rows_and_tokenizers_that_do_not_fit_are_named(rows, changes, message, folder, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"data": (str(tmp_path / "rows.jsonl"),)}
    if "template" in changes:
        tokenizer_with(changes["template"]).save_pretrained(tmp_path / "other")
        given["tokenizer"] = str(tmp_path / "other")
    if "vocab" in changes:
        target = tiny_target(changes["vocab"])
        save_target_checkpoint(target.config, target.params, tmp_path / "small", "float32")
        given |= {"target": str(tmp_path / "small"), "tokenizer": str(folder / "target")}
    monkeypatch.setattr("train.loop.dialogues.generate", lambda *_, **__: pytest.fail("generated"))
    with pytest.raises((ValueError, CheckpointError), match=re.escape(message)):
        program.main(args_of(folder, tmp_path / "out", **given))
    assert not (tmp_path / "out").exists()


def test_rows_whose_prompts_are_all_too_long_are_counted(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("train.loop.dialogues.generate", lambda *_, **__: pytest.fail("generated"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(asking("x" * 200)) + "\n")
    with pytest.raises(ValueError, match="--data must get a reply, got none: 1 x prompt longer than --max-prompt 384"):
        program.main(args_of(folder, tmp_path / "out", data=(str(tmp_path / "rows.jsonl"),)))
