"""Checks tasks: files, names and datasets of the hub; an error names the bad row by its number."""

from __future__ import annotations

import gzip
import json

import pytest

from infer.common import tasks
from infer.common.tasks import (
    BUNDLED,
    HUB,
    Question,
    find_task,
    load_task,
    load_tasks,
    names_of,
    read_questions,
    task_folder,
)

LINE = {"question_id": 7, "category": "math", "turns": ["How many?", "Why?"], "reference": ["3"]}
READ = ("7", ("How many?", "Why?"))


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "question.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
        return path

    return write


def test_questions_are_read_from_lines(write):
    path = write(LINE, "", json.dumps({"question_id": "b", "turns": ["Über?"]}, ensure_ascii=False))
    assert read_questions(path) == [READ, ("b", ("Über?",))]
    assert read_questions(path, limit=1) == [READ]
    with pytest.raises(ValueError, match="must hold questions, got an empty file"):
        read_questions(write("", ""))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ('{"question_id": 1, "turns": ["a"', "line 3"),
        ({"category": "x"}, "line 3 must have one of turns, prompt, .* got category"),
        ({"turns": "a"}, "line 3: turns must be a non-empty list of non-empty strings, got 'a'"),
        ({"prompt": ["a", 1]}, "line 3: prompt must be a non-empty list of non-empty strings, or one string"),
        ({"turns": ["a"], "system": "b"}, "line 3 must have keys that are read, got 'system'. Remove it, or name"),
    ],
)
def test_a_broken_line_is_named_by_its_number(write, broken, message):
    path = write(LINE, "", broken)
    with pytest.raises(ValueError, match=rf"question\.jsonl, {message}"):
        read_questions(path)
    assert len(read_questions(path, limit=1)) == 1  # the bad line is not read


def test_a_task_is_a_name_or_a_path(tmp_path):
    line, folder, packed = tmp_path / "gsm8k.jsonl", tmp_path / "talk", tmp_path / "talk" / "question.jsonl.gz"
    line.write_text(json.dumps(LINE))
    folder.mkdir()
    packed.write_bytes(gzip.compress(json.dumps(LINE).encode()))
    for name, path in (("gsm8k", line), ("talk", packed)):
        assert load_task(name, tmp_path) == load_task(str(path), "nowhere") == (name, (READ,))
    for folder, has in ((tmp_path, "gsm8k, talk"), (tmp_path / "absent", "none there")):
        with pytest.raises(ValueError, match=rf"task must be bundled .* \({has}\), .*got 'alpaca'"):
            find_task("alpaca", folder)


def test_questions_come_with_the_package(tmp_path, monkeypatch):
    """They are the default in every working directory."""
    monkeypatch.delenv("EAGLE_JAX_TASKS", raising=False)
    monkeypatch.chdir(tmp_path)
    found = {task.name: task.questions for task in load_tasks(BUNDLED.split(","), task_folder())}
    assert {name: len(questions) for name, questions in found.items()} == {"chat": 10, "math": 10, "code": 10}
    assert {len(question.turns) for question in found["chat"]} == {2}
    monkeypatch.setenv("EAGLE_JAX_TASKS", str(tmp_path))
    assert len(load_task("chat", task_folder()).questions) == 10
    (tmp_path / "chat.jsonl").write_text(json.dumps(LINE), encoding="utf-8")  # a file in the folder comes first
    assert len(load_task("chat", task_folder()).questions) == 1
    with pytest.raises(ValueError, match="--tasks must have different names, got chat twice"):
        load_tasks(["chat", str(task_folder() / "chat.jsonl")], task_folder())


def test_the_tasks_beside_the_checkout_are_readable(shared):
    for name in ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum"):
        assert len(read_questions(find_task(name, shared / "data" / "tasks"))) > 70


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"prompt_id": 5, "category": "stem", "prompt": ["Hi", "Ho"]}, ("5", ("Hi", "Ho"))),
        ({"question": "Who?", "answer": ["me"]}, ("3", ("Who?",))),
        ({"instruction": "Add.", "input": "1 2"}, ("3", ("Add.\n\n1 2",))),
        ({"article": "News.", "id": "x"}, ("x", ("Summarize: News.",))),
        ({"turns": ["a"], "prompt": "a", "answer": "b", "score": 1}, ("3", ("a",))),
        ({"turns": None, "prompt": "b"}, ("3", ("b",))),  # Parquet has a null where a row has no value
    ],
)
def test_columns_of_other_datasets(write, row, question):
    assert read_questions(write(LINE, "", row))[1] == question


def test_names_of_the_papers_have_aliases(tmp_path):
    for name in ("qa", "sum"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(LINE))
    assert load_task("nq", tmp_path).name == "nq"
    assert load_task("cnn_dm", tmp_path).questions == (READ,)
    (tmp_path / "nq.jsonl").write_text(json.dumps({"turns": ["own"]}))
    assert load_task("nq", tmp_path).questions[0].turns == ("own",)


def test_names_of_questions_are_the_same_in_every_file(tmp_path):
    """They depend on id and text, and not on the file or the position."""
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(LINE)] * 2))
    first, both = load_task("a", tmp_path, 1), load_task("a", tmp_path)
    assert first.key == load_task(str(tmp_path / "a.jsonl"), ".", 1).key != both.key
    one, two, other = Question("1", ("a",)), Question("2", ("b", "c")), Question("1", ("b",))
    names = names_of([one, two, other, one])
    assert len(set(names)) == 4
    assert names_of([two, one]) == [names[1], names[0]]
    assert names_of([Question("1", ("a",))]) == names[:1]


def test_tasks_are_read_from_the_hub(monkeypatch):
    loaded = []

    def rows(name, part):
        loaded.append((name, part))
        return [{"task_id": "T/0", "prompt": "def f():"}, {"answer": "b"}]

    monkeypatch.setattr(tasks, "hub_rows", rows)
    task = load_task("hub:humaneval", "nowhere", 1)
    assert task == ("humaneval", (Question("T/0", ("Complete the code I provided.\n\ndef f():",)),))
    for name in HUB:
        load_task(f"hub:{name}", "nowhere", 1)
    assert ("openai/gsm8k", "main/test") in loaded
    assert load_task("owner/talk:extra.jsonl", "nowhere", 1).name == "talk"
    assert loaded[-1] == ("owner/talk", "extra.jsonl")
    for unknown in ("hub:chat", "owner/talk.jsonl"):
        with pytest.raises(ValueError, match=f"task must be bundled .* hub: and one of mt_bench, .* got '{unknown}'"):
            load_task(unknown, "nowhere")
    with pytest.raises(ValueError, match=r"owner/talk, row 2 must have one of turns, .* got answer"):
        load_task("owner/talk", "nowhere")
