"""Counts of what was said before, against counts by hand; and that docs/results.md shows what was counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.common.programs import arguments
from infer.papers import repetition
from infer.papers.evidence import table
from infer.papers.repetition import ends_in_loop, said_before

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_what_was_said_before():
    prompt, reply = [1, 2, 3, 4, 5], [9, 2, 3, 4, 9, 2, 3, 4]
    # 2 3 4 stood in the prompt; 9 2 3 and 2 3 4 in the reply, the second time.
    assert said_before(prompt, reply, 3) == (2, 1)
    assert said_before(prompt, reply, 1) == (4, 3)
    assert said_before([], [1, 1, 1, 1], 2) == (2, 0)
    assert said_before([7, 8], [7, 8], 2) == (0, 1)
    assert said_before([], [1, 2], 4) == (0, 0)


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
def test_every_place_by_search(prompt, reply, ngram):
    text, repeated, copied = [*prompt, *reply], 0, 0
    for end in range(len(prompt) + 1, len(text) + 1):
        places = [at for at in range(ngram, end) if end >= ngram and text[at - ngram : at] == text[end - ngram : end]]
        inside = [at for at in places if at > len(prompt)]
        repeated += bool(inside)
        copied += bool(places) and not inside
    assert said_before(prompt, reply, ngram) == (repeated, copied)


@pytest.mark.parametrize(
    ("reply", "loops"),
    [
        ([*range(50), *[7, 8, 9] * 8], True),
        ([*range(50), *[7, 8, 9] * 7], False),  # 21 tokens
        ([*range(100, 112), *range(12), *range(12), *range(12)], True),
        ([*range(13), *range(13)], False),  # twice
        ([*range(100, 134), *range(13), *range(13)], False),  # twice, behind a long beginning
        ([5] * 24, True),
        ([5] * 23, False),
        ([*[7, 8, 9] * 20, 1], False),  # it got out
        ([], False),
    ],
)
def test_the_end_of_a_reply_is_a_loop(reply, loops):
    assert ends_in_loop(reply) is loops


def test_the_program_on_the_pair(pair, capsys):
    report = repetition.main(repetition.Args(tasks="chat", limit=1, max_new_tokens=8, batch=1))
    printed = capsys.readouterr().out.strip().splitlines()
    assert json.loads(printed[-1]) == report
    settings = [(cell["task"], cell["temperature"]) for cell in report["cells"]]
    assert settings == [("chat", 0.0), ("chat", 1.0)]
    assert all(0 < cell["tokens"] <= 8 * cell["replies"] for cell in report["cells"])
    with pytest.raises(ValueError, match="--ngram 0 must be at least 1"):
        repetition.main(repetition.Args(ngram=0))


def test_the_page_shows_what_was_counted():
    kept = json.loads((DOCS / "measured" / "repetition.json").read_text(encoding="utf-8"))
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    assert table(repetition.HEAD, repetition.rows(kept["cells"]), left=1) in page
    cells = {(cell["task"], cell["temperature"]): cell for cell in kept["cells"]}
    shares = [cells[task, 0.0]["repeated"] / cells[task, 0.0]["tokens"] for task in ("mt_bench", "nq")]
    assert all(abs(share - 2 / 3) < 0.05 for share in shares)
    loops, replies = (cells["mt_bench", 0.0][name] for name in ("loops", "replies"))
    assert f"{loops} of {replies} replies on MT-bench end in a loop" in " ".join(page.split())
    assert not any(cell["loops"] for cell in kept["cells"] if cell["temperature"])
    (command,) = [line for line in page.splitlines() if line.startswith("python -m infer.papers.repetition")]
    said = arguments(repetition.Args, None, command.split()[3:])
    found = kept["settings"] | {"data": said.data}
    assert {name: getattr(said, name) for name in found} == found
