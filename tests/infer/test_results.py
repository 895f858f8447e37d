"""Result files: written whole, read strictly, merged."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest

from infer.common import results
from infer.common.drafts import PLAIN
from infer.common.results import Category, Cell, Group, Result, SpecBench


def cell(**changes) -> Cell:
    """A cell of two repetitions, by hand."""
    speeds = SpecBench(2.5, 20.0, 2.0)
    made = Cell(
        method="eagle3", label="eagle3@6x10x59", task="gsm8k", temperature=0.0, batch=1,
        questions=1, replies=2, tokens=42, passes=20, cycles=20, seconds=[2.0, 2.1], prefill_seconds=[0.5, 0.5],
        tok_s=20.5, tok_s_range=[20.0, 21.0], decode_tok_s=26.0, speedup=2.0, speedup_range=[1.9, 2.1],
        decode_speedup=2.2, tau=2.0, accepted=[5, 10, 5], ms_per_pass=75.0, identical=2, compared=2,
        spec_bench=speeds, categories={"math": Category(2.0, 2.0, speeds)}, draft=PLAIN,
        by_question={"question": ["1"], "call": [0], "replies": [2], "tokens": [42], "cycles": [20],
                     "seconds": [[2.0], [2.1]], "plain_tokens": [42], "plain_seconds": [[4.0], [4.2]]},
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def result(*cells: Cell, **changes) -> Result:
    made = Result("a machine", "abc1234", {"limit": 1, "repeats": 2}, list(cells), {"golden": {"identical": "8/8"}})
    return dataclasses.replace(made, **changes)


def test_what_is_written_is_read_back(tmp_path):
    told = result(cell(), cell(label="transformers", passes=None, cycles=None, tau=None, accepted=None))
    results.write(told, tmp_path / "runs" / "result.json")
    assert results.read(tmp_path / "runs" / "result.json") == told
    assert told.groups == [Group("gsm8k", 0.0, 1)]
    assert told.labels == ["eagle3@6x10x59", "transformers"]
    assert told.cell("transformers", told.groups[0]) is told.cells[1]
    assert told.cell("transformers", Group("gsm8k", 1.0, 1)) is None


def drop(content):
    del content["cells"][0]["tau"]


def rename(content):
    content["cells"][0]["taus"] = 1


def misspell(content):
    content["cells"][0]["accepted"] = [1, "2"]


def hollow(content):
    del content["cells"][0]["categories"]["math"]["spec_bench"]["tok_s"]


def double(content):
    content["cells"].append(copy.deepcopy(content["cells"][0]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda content: content.update(schema="eagle_jax.tune/1"),
            "is of schema 'eagle_jax.tune/1', expected 'eagle_jax.bench",
        ),
        (
            lambda content: content.pop("schema"),
            "is without a schema, expected 'eagle_jax.bench/3': give a result.json",
        ),
        (lambda content: content.pop("settings"), "settings is missing or of another kind"),
        (drop, r"result\.json, cell 0 lacks tau"),
        (rename, "cell 0 has an unknown field 'taus'; there is 'tau'"),
        (misspell, r"cell 0: accepted is \[1, '2'\], expected a list of counts or null"),
        (hollow, "cell 0, category math, spec_bench lacks tok_s"),
        (lambda content: content["cells"][0].update(draft={"kind": "bush"}), "cell 0: draft is {'kind': 'bush'}, expe"),
        (lambda content: content["cells"][0]["draft"].pop("rule"), "cell 0: draft lacks or has unknown rule"),
        (lambda content: content["cells"][0]["by_question"].pop("cycles"), "by_question must have question, call"),
        (
            lambda content: content["cells"][0]["by_question"].update(seconds=[]),
            r"seconds is \[\], expected one",
        ),
        (lambda content: content["cells"][0]["by_question"].update(seconds=[[0.0]]), "seconds is"),
        (lambda content: content["cells"][0]["by_question"].update(plain_seconds=[[1.0]] * 9), "other repetitions of"),
        (lambda content: content["cells"][0]["by_question"].update(tokens=[1, 2]), r"tokens is \[1, 2\], expected one"),
        (double, "eagle3@6x10x59 is there twice for gsm8k at temperature 0, batch 1"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path, damage, message):
    content = json.loads(json.dumps(result(cell()).as_json()))
    damage(content)
    (tmp_path / "result.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        results.read(tmp_path / "result.json")


def test_what_is_no_json_is_refused(tmp_path):
    (tmp_path / "table.md").write_text("| task |", encoding="utf-8")
    with pytest.raises(ValueError, match=r"table\.md is no JSON file"):
        results.read(tmp_path / "table.md")
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="holds a JSON list: give"):
        results.read(tmp_path / "list.json")


def test_merged():
    one, two = result(cell()), result(cell(batch=4), settings={"limit": 1, "repeats": 3}, revision="def5678")
    told = results.merge([one, two])
    assert told.cells == [*one.cells, *two.cells]
    assert told.settings == {"limit": 1}
    assert told.revision == "abc1234, def5678"
    with pytest.raises(ValueError, match="measured twice for gsm8k at temperature 0, batch 1"):
        results.merge([one, one])
    with pytest.raises(ValueError, match="several machines do not belong in one table: a machine; another"):
        results.merge([one, dataclasses.replace(two, machine="another")])
    with pytest.raises(ValueError, match="no result is given"):
        results.merge([])
