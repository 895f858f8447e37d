"""The commands of the pages that measure run one after the other, as they are but for their size."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from eagle_jax.assets import bundled
from tests.docs.test_readme import REPOSITORY, commands

pytestmark = pytest.mark.slow  # pages and programs for TPU: make test-all

SHORT = "--limit 1 --max-new-tokens 8"
TREES = "--depths 2 --top-ks 2 --nodes 4 --candidates 1 --repeats 5"
# Added behind a page's own arguments (the last one given counts), so that a run takes seconds to minutes.
SMALLER = {
    "infer.bench": f"{SHORT} --repeats 1 --no-transformers --no-golden --batches 1",
    "infer.acceptance": SHORT,
    "infer.papers": f"{SHORT} --only ablation,untempered --tasks gsm8k",
    "infer.tune": f"{SHORT} {TREES} --methods eagle3 --batches 1 --temperatures 0",
    "train.demo.data": "",
    "train.regenerate": "--limit 16 --max-new-tokens 8 --batch 8",
    "train.head": "--steps 2 --unroll 1 --length 96 --warmup 1 --eval-every 0 --eval-prompts 1 --eval-tokens 8",
    "train.evaluate": "--prompts 1 --max-new-tokens 8",
}
ONE_TASK = {
    "benchmarks.md": ("infer.acceptance",),
}
"""Pages, and their programs that ask all tasks of the papers: many times over, which would take hours."""
TASKS = ("gsm8k", "humaneval", "mt_bench", "alpaca", "nq", "qa", "cnn_dm", "sum")


def commands_of(page: str) -> list[str]:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    shell = re.findall(r"^```bash\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [line for block in shell for line in commands(block) if line.startswith("python -m ")]


@pytest.fixture
def folder(tmp_path):
    """Where someone works: with the papers' files, of which every task has six questions, and prompts of their own."""
    os.symlink(REPOSITORY / "docs", tmp_path / "docs")
    rows = [{"question_id": n, "category": "any", "turns": [f"What is {n} + {n}?"]} for n in range(6)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in TASKS:
        article = " It was a day in May, and there was much to tell." * 50 if name in ("sum", "cnn_dm") else ""
        (tmp_path / "FOLDER" / name).mkdir(parents=True)
        (tmp_path / "FOLDER" / name / "question.jsonl").write_text(text.replace("?", f"?{article}"))
    (tmp_path / "my.jsonl").write_text(text)
    # What the trainers' data program reads, enough of it that two percent are some.
    (tmp_path / "FOLDER" / "gpteacher").mkdir()
    pairs = [(f"What is {n} + {n}?", f"It is {2 * n}.") for n in range(400)]
    lines = (json.dumps({"question": question, "answer": answer}) for question, answer in pairs)
    (tmp_path / "FOLDER" / "gsm8k" / "train.jsonl").write_text("\n".join(lines))
    teacher = [{"instruction": question, "input": "", "response": answer} for question, answer in pairs]
    (tmp_path / "FOLDER" / "gpteacher" / "instruct.json").write_text(json.dumps(teacher))
    os.symlink(REPOSITORY / "configs", tmp_path / "configs")
    return tmp_path


def run(command: str, folder, page: str) -> dict:
    """The last line of what it prints; paths are those of the bundled pair, and what it writes stays in the folder."""
    words = shlex.split(command)[1:]
    for place, word in enumerate(words):
        if word == "PATH":
            words[place] = str(bundled(words[place - 1].removeprefix("--")))
    more = SMALLER[words[1]].split()
    if words[1] in ONE_TASK.get(page, ()):
        more += ["--tasks", "gsm8k"]
    if words[1] == "infer.acceptance" and "--chains" in words and words[words.index("--chains") + 1]:
        more += ["--chains", "2"]
    if "--out" in words and words[words.index("--out") + 1].startswith("docs/"):
        more += ["--out", "measured.yaml"]
    if "--check" in words and words[words.index("--check") + 1].startswith("docs/"):
        more += ["--check", "measured.yaml"]
    done = subprocess.run(
        [sys.executable, *words, *more], cwd=folder, capture_output=True, text=True, check=False, timeout=900,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "EAGLE_JAX_TASKS": str(folder / "FOLDER")},
    )  # fmt: skip
    # Of a profile that was tuned in a second a check may well say that it does not hold: that is status 1.
    assert done.returncode == 0 or (done.returncode == 1 and "--check" in words), done.stderr
    if words[1] == "train.demo.data":  # writes files, and tells them in its log alone
        return {"log": done.stderr}
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("page", ["benchmarks.md", "tuning.md", "measurements.md", "evidence.md"])
def test_commands_of_a_page_run_in_order(page, folder):
    found = commands_of(page)
    assert len(found) >= 2
    for command in found:
        assert run(command, folder, page), command
    made = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".json", ".md", ".yaml")}
    expected = {"benchmarks.md": "runs/report/report.md", "tuning.md": "profile.yaml",
                "measurements.md": "runs/best/result.json",
                "evidence.md": "runs/evidence/eagle3/head/config.json"}  # fmt: skip
    assert expected[page] in made
