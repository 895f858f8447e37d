"""Result files that a report takes: merged, told apart, refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from infer.common import recorded, results
from infer.common.calls import DRAWS
from infer.papers import report
from infer.papers.evidence import gather
from tests.infer.result_files import (
    PLAIN,
    RECORDS,
    STUDY,
    TABLE_1,
    bench_cell,
    bench_file,
    draft_of,
    made,
    part,
    record_cell,
    record_file,
)


def test_the_same_files_give_the_same_bytes(tmp_path):
    files = bench_file(tmp_path / "b.json", TABLE_1), record_file(tmp_path / "a.json", RECORDS)
    seen = []
    for _ in range(2):
        made(tmp_path, *files)
        seen.append({path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()})
    assert seen[0] == seen[1]
    assert len(seen[0]) > 4


def test_figures_of_an_older_report_go_and_other_files_stay(tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("n_alpha.png", "speedup_t0.7.png", "own.png"):
        (tmp_path / "out" / name).write_bytes(b"old")
    made(tmp_path, bench_file(tmp_path / "b.json", TABLE_1))
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"speedup_t0.png", "own.png"}


def test_files_of_one_kind_merge(tmp_path, capsys):
    a = bench_file(tmp_path / "1.json", TABLE_1[:3])
    b = bench_file(tmp_path / "2.json", TABLE_1[2:])  # one cell is in both, with the same numbers
    one = made(tmp_path, bench_file(tmp_path / "b.json", TABLE_1))
    two = made(tmp_path, a, b)
    assert part(one, "Speedup and tau at temperature 0") == part(two, "Speedup and tau at temperature 0")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["figures"] == ["speedup_t0.png"]
    assert "n-alpha" in last["missing"]


def test_every_file_has_plain_decoding_of_its_own(tmp_path):
    """What is shown is one run's: that of the most batch sizes, so that a line over batch sizes is one run's, too."""
    fast = [dataclasses.replace(PLAIN[0], batch=batch, tok_s=200.0 * batch) for batch in (1, 4)]
    files = [bench_file(tmp_path / f"{name}.json", cells) for name, cells in (("a", TABLE_1), ("b", fast))]
    text = part(made(tmp_path, *files), "Throughput against batch size")
    assert "| plain decoding | 200, 1.00x | 800, 1.00x |" in text.splitlines()


def test_what_is_refused(tmp_path):
    bench, record = bench_file(tmp_path / "b.json", TABLE_1), record_file(tmp_path / "a.json", RECORDS)

    def refused(match: str, *files: Path) -> None:
        with pytest.raises(ValueError, match=match):
            made(tmp_path, *files)
        assert not (tmp_path / "out").exists()

    other = bench_file(tmp_path / "other.json", [bench_cell("eagle3", "gsm8k", 2.5, 5.0)])
    refused(
        r"b\.json and .*other\.json both have eagle3, gsm8k at temperature 0, batch 1, with other numbers", bench, other
    )
    other = record_file(tmp_path / "other.json", [record_cell("eagle3", "gsm8k", noise=(0, 0, 0, 0, 1))])
    refused(r"a\.json and .*other\.json both have eagle3 on gsm8k at temperature 0, with other numbers", record, other)
    other = bench_file(tmp_path / "other.json", [], "a desktop")
    refused(r"b\.json was measured on a laptop, .*other\.json on a desktop: speeds of several machines", bench, other)
    other = record_file(tmp_path / "other.json", [], target="some/model")
    refused(r"b\.json was measured with target None, .*other\.json with 'some/model'", bench, other)
    short = bench_file(tmp_path / "short.json", TABLE_1, max_new_tokens=16)
    long = bench_file(tmp_path / "long.json", [bench_cell("eagle3", "gsm8k", 2.5, 5.0)], max_new_tokens=64)
    refused(r"short\.json was measured with max_new_tokens 16, .*long\.json with 64", short, long)
    other = bench_file(
        tmp_path / "other.json", [bench_cell("eagle3", "nq", 2.5, 5.0, draft=draft_of("eagle3", nodes=9))]
    )
    refused(
        r"eagle3 is not the same in .*b\.json \(nodes 7\) and .*other\.json \(nodes 9\): name the setting", bench, other
    )
    taught = draft_of("eagle3", weights="runs/other")
    other = record_file(tmp_path / "other.json", [record_cell("eagle3", "nq", draft=taught)])
    refused(r"eagle3 is not the same in .*\(weights 'bundled eagle3'\) and .*\(weights 'runs/other'\)", bench, other)
    refused("are both results of train.demo.study", STUDY, STUDY)
    odd = tmp_path / "odd.json"
    for text, match in {
        '{"schema": "eagle_jax.tune/1"}': r"odd\.json is of schema 'eagle_jax\.tune/1', expected 'eagle_jax\.ben",
        '{"results": {}}': r"odd\.json is without a schema, expected 'eagle_jax\.bench/3'.*: measure anew",
        '{"runs": {"a": 1}, "replies": {}}': r"odd\.json is without a schema",
        "[]": r"odd\.json holds a JSON list",
        '{"schema": ': r"odd\.json is no JSON file",
    }.items():
        odd.write_text(text, encoding="utf-8")
        refused(match, bench, odd)
    refused("no result file is given")
    refused(r"nowhere\.json is no file: give a result\.json", tmp_path / "nowhere.json")
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ValueError, match="is a file: give a directory"):
        report.main(report.Args((bench,), tmp_path / "out"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda cell: cell.pop("tau"), "cell 0 lacks tau"),
        (lambda cell: cell.update(taus=1), "cell 0 has an unknown field 'taus'"),
        (lambda cell: cell.update(cycles=-1), "cell 0: cycles is -1, expected a count"),
        (lambda cell: cell["positions"].pop("reached"), "cell 0, positions lacks reached"),
        (lambda cell: cell["positions"].update(accepted=[[99, 0], [0, 0]]), "positions: more accepted than reached"),
        (lambda cell: cell["positions"].update(reached=[[99, 0]]), "positions: its lists differ in length"),
        (lambda cell: cell["chains"][0].update(tested=["x"]), r"chains: tested is \['x'\]"),
        (lambda cell: cell["chains"][1].update(accepted=[6, 7]), "chains: more accepted than tested"),
        (lambda cell: cell["chains"][1].update(length=3), "chains: 2 positions of a chain of 3"),
        (lambda cell: cell["calibration"].update(accepted=[2, 7]), "calibration: more accepted than count"),
        (lambda cell: cell["calibration"].update(confidence=[0.25, None]), "calibration: a bin with nodes has no"),
        (lambda cell: cell["calibration"].update(count=[1]), "calibration: its lists differ in length"),
        (lambda cell: cell.update(uncalibrated="why"), "uncalibrated, must be null"),
        (lambda cell: cell["draft"].update(kind="bush"), "draft is .*'bush'.* expected an object with a kind of none"),
        (lambda cell: cell["draft"].update(kind=["chain"]), "draft is .* expected an object with a kind of none"),
        (lambda cell: cell["draft"].update(rows="8"), "draft has rows '8', which no benchmark writes"),
        (lambda cell: cell["draft"].update(top_p="a"), "draft has top_p 'a'"),
        (lambda cell: cell["draft"].pop("depth"), "draft lacks or has unknown depth"),
        (lambda cell: cell["by_question"].pop("cycles"), "by_question must have question, tokens, cycles"),
        (lambda cell: cell["by_question"]["tokens"].pop(), "by_question, tokens is .* expected one count per question"),
        (lambda cell: cell["by_question"].update(question=["q"] * 5), "by_question names a question twice"),
        (lambda cell: cell["by_question"].update(cycles=[1600, 1600, 1600, 1600, -1]), "by_question, cycles is"),
        (lambda cell: cell["by_question"].update(cycles=[1] * 5), "by_question, cycles adds up to 5 and not 8000"),
        (lambda cell: cell["by_question"]["siblings_reached"].pop(), "by_question, siblings_reached is"),
        (lambda cell: cell["by_question"]["bins_count"][0].pop(), "by_question, bins_count is"),
        (lambda cell: cell["chains"][0]["by_question"].pop("tested"), "chains: by_question must have"),
    ],
)
def test_a_broken_recording_is_refused_by_name(tmp_path, change, match):
    path = record_file(tmp_path / "a.json", [RECORDS[0]])
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content["cells"][0])
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=match + ".*: leave the file out, or measure it anew") as error:
        recorded.read(path)
    assert str(path) in str(error.value)


def test_a_recording_twice_or_of_another_program_is_refused(tmp_path):
    with pytest.raises(ValueError, match="eagle3 on gsm8k at temperature 0 is there twice"):
        recorded.read(record_file(tmp_path / "a.json", [RECORDS[0], RECORDS[0]]))
    with pytest.raises(ValueError, match=r"is of schema 'eagle_jax\.bench/3', expected 'eagle_jax\.acceptance/2'"):
        recorded.read(bench_file(tmp_path / "b.json", TABLE_1))


def test_questions_that_shared_their_noise_are_told(tmp_path):
    """Files of before every question had a key of its own: their intervals above temperature 0 say less."""
    cells = [bench_cell("vanilla", "gsm8k", 1.0, 1.0), bench_cell("eagle3", "gsm8k", 2.0, 3.0)]
    hot = [dataclasses.replace(cell, temperature=1.0) for cell in cells]
    old, cold = bench_file(tmp_path / "old.json", hot), bench_file(tmp_path / "cold.json", cells)
    told = part(made(tmp_path, old, cold), "The papers' claims")
    assert "Of old.json the draws above temperature 0 were not apart" in told and "cold.json" not in told
    new = results.read(old)
    results.write(dataclasses.replace(new, more={"draws": DRAWS}), old)
    assert "not apart" not in made(tmp_path, old, cold)


def test_a_recording_without_chains_gives_way_to_one_with_them(tmp_path):
    cell = record_cell("eagle3", "gsm8k")
    bare = dataclasses.replace(cell, chains=[])
    for number, pair in enumerate(((bare, cell), (cell, bare))):
        files = [record_file(tmp_path / f"{number}{at}.json", [one]) for at, one in enumerate(pair)]
        assert gather(files).cells == [cell]
    other = record_file(tmp_path / "other.json", [dataclasses.replace(bare, replies=4)])
    with pytest.raises(ValueError, match="both have eagle3"):
        gather([record_file(tmp_path / "cell.json", [cell]), other])
