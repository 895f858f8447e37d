"""Checks that `train.regenerate` writes the target's replies: resumed, with a head, by two processes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import eagle_jax
import train.regenerate as program
from eagle_jax.checkpoints import save_head_checkpoint, save_target_checkpoint
from eagle_jax.config import TreeConfig
from eagle_jax.data.corpus.sources import Source, build_corpus
from tests.data.chats import TEMPLATES, tokenizer_with
from tests.models import tiny_head, tiny_target
from tests.training.common import finished, free_port, report_of
from train.loop.places import LOCK

VOCAB = 272  # the tokenizer has 263
STOPS = tuple(range(60, 80))  # enough letters that some replies end by themselves
SYSTEM = {"role": "system", "content": "s" * 232}  # all prompts fall into one bucket: one compilation serves them
OLD = {"role": "assistant", "content": "never used"}


def row_of(*questions: str) -> dict:
    return {"messages": [SYSTEM, *(turn for text in questions for turn in ({"role": "user", "content": text}, OLD))]}


ROWS = [
    row_of("one"), row_of("one", "two"), {"text": "plain"}, row_of("2"), row_of("a", "b"), row_of("x" * 200),
    row_of("three"), row_of("four"), {"messages": [OLD]}, row_of("five", "x" * 200),
    {"messages": [SYSTEM, {"role": "user", "content": "six"}]}, row_of("q", "r", "s"), row_of("seven"),
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


def test_every_reply_is_written_and_supervised_once(folder, whole):
    tokenizer = tokenizer_with(TEMPLATES["chatml"])
    shards = [f"shard-0000{number}.json{end}" for number in range(3) for end in ("", "l")]
    assert sorted(written(whole)) == ["settings.json", *shards]
    texts, replies = texts_of(whole), collections.Counter()
    for text in texts:
        row, tokens, spans = text["row"], text["tokens"], text["supervised"]
        assert text["source"] == str(folder / ("a.jsonl" if row < 8 else "b.jsonl"))
        assert text["temperature"] == row % 2
        both = text["messages"], ROWS[row]["messages"][: len(text["messages"])]
        questions = [[turn for turn in turns if turn["role"] != "assistant"] for turns in both]
        assert questions[0] == questions[1]
        replies[row] += len(spans)
        for start, end in spans:
            assert end - start == 8 or (0 < end - start < 8 and tokens[end - 1] in STOPS)
            assert not set(tokens[start : end - 1]) & set(STOPS)
        assert tokenizer.decode(tokens[: spans[0][0]]).endswith("<|im_start|>assistant\n")
        last = tokens[slice(*spans[-1])]
        reply = tokenizer.decode(last[:-1] if last[-1] in STOPS else last)
        assert text["messages"][-1] == {"role": "assistant", "content": reply}
    turns = {i: sum(turn == OLD for turn in row.get("messages", [])) for i, row in enumerate(ROWS)}
    wanted = {**turns, SHORT: 1, PROMPT: 1}
    assert replies == {i: count for i, count in wanted.items() if i not in (PLAIN, ALONE, LONG)}
    corpus, skipped = build_corpus([Source(str(whole / "*.jsonl"))], tokenizer)
    assert [corpus[i].tokens.tolist() for i in range(len(corpus))] == [text["tokens"] for text in texts]
    assert skipped == {}


def test_the_report_counts_texts_and_replies(folder, whole, capsys):
    before = written(whole)
    program.main(args_of(folder, whole))  # all shards exist: nothing is generated
    assert written(whole) == before
    texts = texts_of(whole)
    replies = [text["tokens"][start:end] for text in texts for start, end in text["supervised"]]
    cut = sum(reply[-1] not in STOPS for reply in replies)
    assert 0 < cut < len(replies)
    too_long = {"prompt longer than --max-prompt 384": 1}
    skipped = {"plain text, which has no replies": 1, "no turn of a user to answer": 1, **too_long}
    assert report_of(capsys) == {
        "rows": 13, "shards": 3, "texts": len(texts), "replies": len(replies), "cut": cut, "skipped": skipped,
        "reply_tokens": sum(map(len, replies)), "shortened": too_long, "out": str(whole),
    }  # fmt: skip


def test_a_killed_and_resumed_run_writes_the_same(folder, whole, tmp_path, monkeypatch):
    """The kill comes between the turns of a batch and tears a line (test_shards tears it everywhere)."""
    out, generate, calls = tmp_path / "out", eagle_jax.generate, itertools.count(1)

    def killing(*args, **options):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return generate(*args, **options)

    monkeypatch.setattr(eagle_jax, "generate", killing)
    with pytest.raises(KeyboardInterrupt):
        program.main(args_of(folder, out))
    monkeypatch.undo()
    assert (out / "shard-00000.jsonl").exists()
    (partial,) = out.glob("*.partial")
    with partial.open("ab") as journal:
        journal.write(partial.read_bytes().splitlines()[-1][:50])
    program.main(args_of(folder, out))
    assert written(out) == written(whole)


@pytest.mark.slow
def test_a_head_changes_no_reply(folder, whole, tmp_path, capsys):
    """The sizes of batches and shards change no reply either: every row has its own key."""
    changes = dict(head=str(folder / "head"), tree="2,2,4", batch=8, shard_rows=13)
    program.main(args_of(folder, tmp_path / "out", **changes))
    drafted, plain = (sorted(texts_of(out), key=json.dumps) for out in (tmp_path / "out", whole))
    assert drafted == plain
    assert report_of(capsys)["tau"] > 1


def test_keys_depend_on_seed_row_and_turn_and_not_on_place():
    rows = jnp.asarray([5, 9, 5, 0], jnp.uint32)
    given = [(0, 0), (0, 1), (1, 0)]
    keys = [jax.random.key_data(program._keys(jax.random.key(seed), rows, turn)).tolist() for seed, turn in given]
    assert all(found[0] == found[2] for found in keys)
    assert len({tuple(key) for found in keys for key in found[1:]}) == 9


@pytest.mark.slow  # two processes on two cores
def test_two_processes_share_the_shards(folder, whole, tmp_path):
    given = dataclasses.asdict(args_of(folder, tmp_path / "out"))
    code = f"import train.regenerate as program\nfrom pathlib import PosixPath\nprogram.main(program.Args(**{given!r}))"
    names = {**os.environ, "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    start = functools.partial(subprocess.Popen, [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    outputs = finished(*(start(env={**names, "JAX_PROCESS_ID": str(index)}) for index in range(2)))
    assert written(tmp_path / "out") == written(whole)
    report = json.loads(outputs[0].splitlines()[-1])
    assert (report["rows"], report["shards"], report["texts"]) == (13, 3, len(texts_of(whole)))
    assert '"rows"' not in outputs[1]  # one process prints


def test_no_keep_cut_leaves_out_cut_replies(folder, whole, tmp_path, capsys):
    program.main(args_of(folder, tmp_path / "out", keep_cut=False))
    texts = texts_of(tmp_path / "out")
    ends = [text["tokens"][end - 1] for text in texts for _, end in text["supervised"]]
    assert ends and set(ends) <= set(STOPS)
    assert report_of(capsys)["skipped"]["reply cut by --max-new-tokens 8"] > 0
    assert {text["row"] for text in texts} < {text["row"] for text in texts_of(whole)}


def test_a_larger_limit_draws_a_superset_of_rows(folder, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(program, "write", lambda writer, sources, rows: drawn.append(rows.tolist()))
    for limit, seed in ((4, 3), (8, 3), (4, 5), (20, 3)):
        program.main(args_of(folder, tmp_path / f"{limit}-{seed}", limit=limit, seed=seed))
    few, more, other, everything = drawn
    assert len(few) == 4 and len(more) == 8 and set(few) < set(more)
    assert few == sorted(few) != other and everything == list(range(13))


def test_a_resumed_run_raises_if_settings_changed(folder, whole, tmp_path, monkeypatch):
    before = written(whole)
    (tmp_path / "c.jsonl").write_text(json.dumps(row_of("other")) + "\n")
    (tmp_path / "other.jinja").write_text(TEMPLATES["marked"])
    for changes, message in (
        ({"seed": 1}, r"settings must be those of .*whole, got others \(seed was 0 and is now 1\)\. Choose"),
        ({"data": (str(tmp_path / "c.jsonl"),)}, r"data was .* and is now .*; contents of data was "),
        ({"chat_template": str(tmp_path / "other.jinja")}, r"chat template was '\w{16}' and is now '\w{16}'"),
    ):
        with pytest.raises(ValueError, match=message):
            program.main(args_of(folder, whole, **changes))
    monkeypatch.setattr(program, "stop_ids", lambda *_: (3, 262))
    with pytest.raises(ValueError, match=r"stop tokens was \[60, .* 79, 262\] and is now \[3, 262\]"):
        program.main(args_of(folder, whole))
    assert written(whole) == before


def test_rows_with_only_too_long_prompts_raise(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(eagle_jax, "generate", lambda *_, **__: pytest.fail("generated"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row_of("x" * 200)) + "\n")
    with pytest.raises(ValueError, match="--data must get a reply, got none: 1 x prompt longer than --max-prompt 384"):
        program.main(args_of(folder, tmp_path / "out", data=(str(tmp_path / "rows.jsonl"),)))
