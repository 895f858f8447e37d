"""Tasks: files, names, folders laid out like datasets of the hub; what is no question is named by its number."""

from __future__ import annotations

import gzip
import json
import lzma

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from infer.common import tasks
from infer.common.tasks import BUNDLED, HUB, Question, find_task, load_task, load_tasks, read_questions, task_folder

LINE = {"question_id": 7, "category": "math", "turns": ["How many?", "Why?"], "reference": ["3"]}


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "question.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8")
        return path

    return write


def test_questions(write):
    path = write(json.dumps(LINE), "", json.dumps({"question_id": "b", "turns": ["Über?"]}, ensure_ascii=False))
    first, second = read_questions(path)
    assert first == ("7", "math", ("How many?", "Why?"))
    assert second == ("b", "", ("Über?",))
    assert read_questions(path, limit=1) == [first]


def test_questions_spread_over_the_categories_of_a_file(write):
    """One of each first, then the second of each; in the order of the file."""
    entries = [
        {"question_id": f"{kind}{n}", "category": kind, "turns": ["a"]} for kind in ("x", "y", "z") for n in (1, 2)
    ]
    path = str(write(*(json.dumps(entry) for entry in entries)))

    def names(limit, **how):
        (task,) = load_tasks([path], "nowhere", limit, **how)
        return [question.id for question in task.questions]

    assert names(4) == ["x1", "x2", "y1", "y2"]
    assert names(4, spread=True) == ["x1", "x2", "y1", "z1"]
    assert names(2, spread=True) == ["x1", "y1"]
    assert names(99, spread=True) == names(None, spread=True) == names(99)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ('{"question_id": 1, "turns": ["a"', r"question\.jsonl, line 3: not JSON"),
        ("[1, 2]", r"line 3: list instead of an object; every row is a JSON object"),
        ('{"category": "x"}', r"line 3: it has none of turns, prompt, .* \(found category\)"),
        ('{"question_id": 1, "turns": "a"}', r"line 3: turns must be a non-empty list of non-empty strings$"),
        ('{"prompt": ["a", 1]}', r"line 3: prompt must be a non-empty list of non-empty strings or one string"),
        ('{"question_id": 1, "turns": []}', r"line 3: turns must"),
        ('{"question_id": 1, "turns": ["a", ""]}', r"line 3: turns must"),
        ('{"turns": ["a"], "system": "b"}', r"line 3: it has the key 'system', which is not read\. Remove it, or name"),
        ('{"question": "a", "choices": ["b"]}', r"line 3: it has the key 'choices', which is not read"),
    ],
)
def test_a_broken_line_is_named_by_its_number(write, broken, message):
    path = write(json.dumps(LINE), "", broken)
    with pytest.raises(ValueError, match=message):
        read_questions(path)
    assert len(read_questions(path, limit=1)) == 1  # never reached


def test_a_line_that_is_no_text_is_named_by_its_number(write):
    path = write(json.dumps(LINE))
    path.write_bytes(path.read_bytes() + b"\n\x80\n")
    with pytest.raises(ValueError, match=r"question\.jsonl, line 2: not UTF-8"):
        read_questions(path)


@pytest.mark.parametrize("name", ["talk.json", "talk.jsonl.gz", "talk/question.json.xz"])
def test_arrays_and_compressed_files(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    content = json.dumps([LINE] if ".json." in name or name.endswith(".json") else LINE).encode()
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(content))
    task = load_task("talk", tmp_path)
    assert task == ("talk", (Question("7", "math", ("How many?", "Why?")),))
    assert load_task(str(path), "nowhere") == task
    with pytest.raises(ValueError, match=r"\(it has talk; bundled"):
        find_task("other", tmp_path)


def test_no_questions(write):
    with pytest.raises(ValueError, match="holds no questions"):
        read_questions(write("", ""))


def test_a_task_is_a_name_or_a_path(tmp_path):
    (tmp_path / "gsm8k.jsonl").touch()
    (tmp_path / "mt_bench").mkdir()
    (tmp_path / "mt_bench" / "question.jsonl").touch()
    assert find_task("gsm8k", tmp_path) == tmp_path / "gsm8k.jsonl"
    assert find_task("mt_bench", tmp_path) == tmp_path / "mt_bench" / "question.jsonl"
    assert find_task(str(tmp_path / "gsm8k.jsonl"), "nowhere") == tmp_path / "gsm8k.jsonl"
    with pytest.raises(
        ValueError,
        match=r"task 'alpaca' is neither a file nor a name .* \(it has gsm8k, mt_bench; bundled are chat, math, code\)",
    ):
        find_task("alpaca", tmp_path)
    with pytest.raises(ValueError, match=r"^--data .*absent: no such directory, in which task 'alpaca'"):
        find_task("alpaca", tmp_path / "absent")


def test_questions_come_with_the_package(tmp_path, monkeypatch):
    """What programs ask where nothing is said, wherever they run: a clone has no files of the papers."""
    monkeypatch.delenv("EAGLE_JAX_TASKS", raising=False)
    monkeypatch.chdir(tmp_path)
    found = {task.name: task.questions for task in load_tasks(BUNDLED.split(","), task_folder())}
    assert {name: len(questions) for name, questions in found.items()} == {"chat": 10, "math": 10, "code": 10}
    assert {len(question.turns) for question in found["chat"]} == {2}
    with pytest.raises(ValueError, match=r"\(it has chat, code, math\).*; hub:nq fetches questions of the kind$"):
        load_task("qa", task_folder())
    monkeypatch.setenv("EAGLE_JAX_TASKS", str(tmp_path))
    assert task_folder() == tmp_path
    assert len(load_task("chat", task_folder()).questions) == 10
    (tmp_path / "chat.jsonl").write_text(json.dumps(LINE), encoding="utf-8")  # one's own of that name comes first
    assert len(load_task("chat", task_folder()).questions) == 1


def test_the_tasks_beside_the_checkout_are_readable(shared):
    for name in ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum"):
        assert len(read_questions(find_task(name, shared / "data" / "tasks"))) > 70


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"prompt": "Hi"}, ("3", "", ("Hi",))),
        ({"prompt_id": 5, "category": "stem", "prompt": ["Hi", "Ho"]}, ("5", "stem", ("Hi", "Ho"))),
        ({"question": "Who?", "answer": ["me"]}, ("3", "", ("Who?",))),
        ({"instruction": "Add.", "input": "1 2"}, ("3", "", ("Add.\n\n1 2",))),
        ({"instruction": "Sing.", "input": ""}, ("3", "", ("Sing.",))),
        ({"article": "News.", "id": "x"}, ("x", "", ("Summarize: News.",))),
        ({"turns": ["a"], "prompt": "a", "answer": "b", "score": 1}, ("3", "", ("a",))),
        ({"turns": None, "prompt": "b"}, ("3", "", ("b",))),  # Parquet has a null where a row says nothing
    ],
)
def test_columns_of_other_datasets(write, row, question):
    path = write(json.dumps(LINE), "", json.dumps(row))
    assert read_questions(path)[1] == question


def test_names_of_the_papers(tmp_path):
    for name in ("qa", "sum"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(LINE))
    assert load_task("nq", tmp_path).name == "nq"
    assert load_task("cnn_dm", tmp_path).questions == (("7", "math", ("How many?", "Why?")),)
    assert load_task(str(tmp_path / "qa.jsonl"), "nowhere").name == "qa"
    (tmp_path / "nq.jsonl").write_text(json.dumps({"turns": ["own"]}))
    assert load_task("nq", tmp_path).questions[0].turns == ("own",)


def test_the_key_changes_with_the_questions(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(LINE)] * 2))
    one, two = load_task("a", tmp_path, 1), load_task("a", tmp_path)
    assert one.key == load_task(str(tmp_path / "a.jsonl"), ".", 1).key
    assert one.key != two.key


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder laid out like a repository of the hub, by its name in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "owner" / "talk" / "data"
    data.mkdir(parents=True)
    rows = [{"prompt_id": i, "category": "stem", "prompt": [f"Hi {i}?", "And?"]} for i in range(3)]
    parquet.write_table(pa.Table.from_pylist(rows), data / "test-00000-of-00001.parquet")
    (tmp_path / "owner" / "talk" / "extra.jsonl").write_text(json.dumps({"question": "Who?"}) + "\n")
    return tmp_path / "owner" / "talk"


def test_a_dataset_of_the_hub(hub, tmp_path):
    task = load_task("owner/talk:test", "nowhere", limit=2)
    assert task.name == "talk"
    assert task.questions == (("0", "stem", ("Hi 0?", "And?")), ("1", "stem", ("Hi 1?", "And?")))
    assert load_task("owner/talk:extra.jsonl", "nowhere").questions == (("1", "", ("Who?",)),)
    assert read_questions(hub / "data" / "test-00000-of-00001.parquet", 1) == [task.questions[0]]
    with pytest.raises(ValueError, match="no dataset owner/talk:validation could be loaded"):
        load_task("owner/talk:validation", "nowhere")


def test_the_known_tasks_of_the_hub(monkeypatch):
    asked = []

    def rows(name, part):
        asked.append((name, part))
        return [{"task_id": "T/0", "prompt": "def f():"}, {"prompt": "def g():"}]

    monkeypatch.setattr(tasks, "hub_rows", rows)
    task = load_task("hub:humaneval", "nowhere", 1)
    assert task == ("humaneval", (Question("T/0", "", ("Complete the code I provided.\n\ndef f():",)),))
    for name in HUB:
        load_task(f"hub:{name}", "nowhere", 1)
    assert ("openai/gsm8k", "main/test") in asked
    assert load_task("hub:qa", "nowhere", 1).name == "qa"
    assert asked[-1] == ("google-research-datasets/nq_open", "validation")
    with pytest.raises(ValueError, match="task 'hub:chat': the tasks known on the hub are mt_bench, humaneval, gsm8k,"):
        load_task("hub:chat", "nowhere")
    with pytest.raises(ValueError, match=r"task 'owner/talk\.jsonl' is neither a file nor a name"):
        load_task("owner/talk.jsonl", "nowhere")


def test_a_row_of_a_dataset_is_named_by_its_number(monkeypatch):
    monkeypatch.setattr(tasks, "hub_rows", lambda name, part: [{"prompt": "a"}, {"answer": "b"}])
    with pytest.raises(ValueError, match=r"owner/talk, row 2: it has none of turns, .* \(found answer\)"):
        load_task("owner/talk", "nowhere")
