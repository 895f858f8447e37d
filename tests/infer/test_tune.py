"""Tuning and checking a profile, on a pair small enough to run it in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
import yaml

import eagle_jax
from eagle_jax.runtime.profile import Entry, ProfileFile, fingerprint
from infer import tune
from infer.tuning import choice, costs, search, trials


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, texts in {"talk": ["abc", "de"], "sums": ["1+1=2 1+1="], "long": ["x" * 3000]}.items():
        lines = [json.dumps({"question_id": number, "turns": [text]}) for number, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def quick(pair, monkeypatch, tasks, tmp_path):
    """Arguments of a short run on the small pair, in whose place a profile finds its bundled heads too."""
    monkeypatch.setattr(tune, "use_compilation_cache", lambda: None)
    demo = eagle_jax.load_demo
    monkeypatch.setattr(
        "eagle_jax.runtime.profile.load_drafter", lambda path, target: demo(str(path).split("/")[-1])[1]
    )
    return dict(
        methods="eagle3", tasks="talk", data=tasks, limit=2, max_new_tokens=6, temperatures="0", depths="1,2",
        top_ks="2", nodes="2", widths="1,3", lengths="2", ngrams="2", candidates=1, repeats=3, turns=2,
        out=tmp_path / "p.yaml",
    )  # fmt: skip


def last(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def reported(args: dict) -> dict:
    """The file beside the profile."""
    return json.loads(args["out"].with_name("p_report.json").read_text())


def profile_of(target, *entries: Entry) -> str:
    return ProfileFile("eagle_jax.profile/1", "x", fingerprint(target), "float32", "here", entries).to_yaml()


def test_tune_and_check(quick, capsys):
    assert tune.main(tune.Args(**quick)) == 0
    report, short = reported(quick), last(capsys)
    (row,) = report["settings"]
    assert short["report"] == str(quick["out"].with_name("p_report.json"))
    assert [one["chosen"] for one in short["choices"]] == [row["chosen"]]
    ((label, found),) = row["candidates"].items()
    assert label in ("eagle3@1x2x2", "eagle3@2x2x2")
    assert found["predicted"] > 0 and found["measured"] > 0
    assert row["identical"] in ("2/2", "4/4")  # faster by less than the spread is measured again
    assert set(row["predicted"]) == {"eagle3@1x2x2", "eagle3@2x2x2"} and row["predicted"][label] == found["predicted"]
    assert {(one["depth"], one["top_k"]) for one in row["draft_over_plain"]["eagle3"]} == {(1, 2), (2, 2)}
    (depths,) = row["acceptance"]["eagle3"].values()
    assert len(depths) == 2 and 1 >= depths[0] >= depths[1] >= 0
    text = quick["out"].read_text()
    assert text.count("\n") <= 40
    (entry,) = yaml.safe_load(text)["entries"]
    assert (entry["batch"], entry["temperature"]) == (1, 0.0)
    assert (entry["method"] == "vanilla") == (row["chosen"] == "vanilla")

    status = tune.main(tune.Args(**quick | {"check": quick["out"]}))
    checked = last(capsys)
    (one,) = checked["settings"]
    assert one["identical"] == "2/2" and one["auto"] == entry["method"]
    assert checked["worst"] == one["worst"]
    assert status == (0 if checked["holds"] else 1)


@pytest.mark.slow
def test_every_method_batch_and_temperature(quick, capsys):
    given = {"methods": "eagle2,eagle3@static,pld,lookahead@2x2x2", "tasks": "talk,sums", "batches": "2", "depths": "2",
             "temperatures": "0,1", "candidates": 4, "repeats": 1}  # fmt: skip
    assert tune.main(tune.Args(**quick | given)) == 0
    printed = capsys.readouterr().out
    rows = reported(quick)["settings"]
    assert [(row["batch"], row["temperature"]) for row in rows] == [(2, 0.0), (2, 1.0)]
    for row in rows:
        assert set(row["candidates"]) == {"eagle2@2x2x2", "eagle3@static", "pld@2x2", "lookahead@2x2x2"}
        identical, compared = row["identical"].split("/")
        assert identical == compared
    assert "4 settings searched" in printed
    assert len(yaml.safe_load(quick["out"].read_text())["entries"]) == 2


@pytest.mark.parametrize(("worst", "holds"), [(0.96, True), (0.94, False)])
def test_the_status_says_whether_a_profile_holds(quick, pair, monkeypatch, capsys, worst, holds):
    """Five percent slower than plain decoding on a task is too much."""

    def compete(target, methods, samples, setting, repeats, **options):
        score = choice.Score({"a": (1.3,) * 5, "b": (worst,) * 5})
        return trials.Trial(dict.fromkeys(methods, score), 100.0, 2, 2)

    monkeypatch.setattr(tune, "compete", compete)
    monkeypatch.setattr(tune, "samples_of", lambda *args: {})
    quick["out"].write_text(profile_of(pair, Entry(1, 0.0)))
    status = tune.main(tune.Args(**quick | {"check": quick["out"]}))
    said = last(capsys)
    assert status == (0 if holds else 1)
    assert said["holds"] is holds and said["worst"] == worst


def test_the_choice_is_the_best_of_what_was_measured(quick, pair, monkeypatch):
    """Whatever the machine: a trial in which one tree is fast and one only on some tasks."""
    fast = {"eagle3@1x2x2": (1.5, 1.2), "eagle3@2x2x2": (2.5, 0.9)}
    calls = []

    def compete(target, methods, samples, setting, repeats, **options):
        calls.append((sorted(methods), repeats))
        scores = {label: choice.Score({"a": (fast[label][0],) * 5, "b": (fast[label][1],) * 5}) for label in methods}
        return trials.Trial(scores, 100.0, 1, 1)

    monkeypatch.setattr(search, "compete", compete)
    predicted = {label: choice.Score({"a": (2.0,), "b": (1.0 + at,)}) for at, label in enumerate(fast)}
    measured = costs.Costs(costs.PassCosts((1, 3), (0.01, 0.02)), {}, {})
    monkeypatch.setattr(search.Tuner, "predict", lambda self, samples, setting: (predicted, measured))
    args = tune.Args(**quick | {"candidates": 2})
    tuner = search.Tuner(tune.grid_of(args), pair, search.Sources(), ["eagle3"])
    tuned = tuner.tune({}, trials.Setting(1, 0.0, 6))
    assert tuned.report["chosen"] == "eagle3@1x2x2"
    assert tuned.entry == search.Entry(
        1, 0.0, "eagle3", "bundled", eagle_jax.TreeConfig(1, 2, 2), predicted=1.5, measured=1.35, worst=1.2
    )
    assert tuned.report["pass_over_plain"] == {1: 1.0, 3: 2.0}
    fast["eagle3@1x2x2"] = (0.8, 0.9)
    calls.clear()
    tuned = tuner.tune({}, trials.Setting(1, 0.0, 6))
    assert tuned.entry == search.Entry(1, 0.0)
    assert tuned.report["chosen"] == "vanilla"
    assert len(calls) == 1  # nothing was nearly faster
    monkeypatch.setitem(fast, "eagle3@2x2x2", (1.2, 1.01))
    monkeypatch.setattr(choice.Score, "safe", property(lambda score: len(score.ratios["a"]) > 5))
    assert tuner.tune({}, trials.Setting(1, 0.0, 6)).report["chosen"] == "eagle3@2x2x2"
    assert calls[-1] == (["eagle3@2x2x2"], 9)  # alone, three times as often


def test_a_choice_takes_five_repetitions(quick, pair, monkeypatch):
    """One repetition has no spread: what it says is faster is measured again before it is chosen."""
    calls = []

    def compete(target, methods, samples, setting, repeats, **options):
        calls.append(repeats)
        value = 2.0 if repeats == 1 else later
        return trials.Trial({label: choice.Score({"a": (value,) * repeats}) for label in methods}, 100.0, 1, 1)

    monkeypatch.setattr(search, "compete", compete)
    measured = costs.Costs(costs.PassCosts((1, 3), (0.01, 0.02)), {}, {})
    monkeypatch.setattr(
        search.Tuner, "predict", lambda *args: ({"eagle3@1x2x2": choice.Score({"a": (2.0,)})}, measured)
    )
    tuner = search.Tuner(tune.grid_of(tune.Args(**quick | {"repeats": 1})), pair, search.Sources(), ["eagle3"])
    later = 1.5
    assert tuner.tune({}, trials.Setting(1, 0.0, 6)).report["chosen"] == "eagle3@1x2x2"
    assert calls == [1, 5]
    later = 0.5
    assert tuner.tune({}, trials.Setting(1, 0.0, 6)).report["chosen"] == "vanilla"


def test_a_tree_under_two_names_is_searched_once(quick, pair):
    """One bundled head is two methods."""
    grid = tune.grid_of(tune.Args(**quick))
    tuner = search.Tuner(grid, pair, search.Sources(), ["eagle2", "eagle1@2x2x2", "eagle1", "hass@1x2x2"])
    assert list(tuner.drafters) == ["eagle2@1x2x2", "eagle2@2x2x2", "eagle1@static", "hass@1x2x2"]


def test_questions_that_are_skipped_are_not_asked(quick, pair, tasks):
    args = {name: tune.Args(**quick | {"limit": 1, "skip": skip}) for name, skip in (("tuned", 0), ("held out", 1))}
    texts = {
        name: [question.turns[0] for question in tune.load_questions(one)[0].questions] for name, one in args.items()
    }
    assert texts == {"tuned": ["abc"], "held out": ["de"]}
    (tasks / "three.jsonl").write_text('{"turns": ["a"]}\n{"turns": ["b"]}\n', encoding="utf-8")
    check = {"check": quick["out"], "tasks": "talk,three", "limit": 1, "skip": 2}
    quick["out"].write_text(profile_of(pair, Entry(1, 0.0)))
    with pytest.raises(ValueError, match="must be at most the 2 questions of task talk, got 3"):
        tune.main(tune.Args(**quick | check))


def test_a_check_between_the_entries_says_which_is_used(quick, pair, capsys):
    chain = eagle_jax.TreeConfig.chain(1)
    quick["out"].write_text(profile_of(pair, Entry(1, 0.0), Entry(2, 1.0, "eagle3", "bundled", chain)))
    tune.main(tune.Args(**quick | {"check": quick["out"], "temperatures": "0.5,0,2", "batches": "2", "limit": 2}))
    printed = capsys.readouterr().out
    between, greedy, beyond = json.loads(printed.splitlines()[-1])["settings"]
    used = [{"batch": 2, "temperature": 1.0, "prompt": None}]
    assert (between["auto"], between["entries"]) == ("eagle3", used)
    assert (greedy["auto"], greedy["entries"]) == ("eagle3", used)
    assert (beyond["auto"], beyond["entries"]) == ("vanilla", [None])
    assert "| 2 | 0.5 | eagle3 (entry of batch 2, temperature 1) |" in printed
    assert "| 2 | 2 | vanilla (no entry) |" in printed


def test_short_and_long_prompts_are_tuned_apart(quick, pair, monkeypatch, capsys):
    """Each by its own prompts; a check says what "auto" takes for which."""
    asked = []

    def compete(target, methods, samples, setting, repeats, **options):
        asked.append({task: list(map(len, sample.prompts)) for task, sample in samples.items()})
        gain = 2.0 if "talk" in samples else 0.5
        scores = {label: choice.Score(dict.fromkeys(samples, (gain,) * repeats)) for label in methods}
        return trials.Trial(scores, 100.0, 1, 1)

    monkeypatch.setattr(search, "compete", compete)
    given = {"tasks": "talk,sums", "prompts": "4", "depths": "1", "repeats": 5}
    assert tune.main(tune.Args(**quick | given)) == 0
    assert asked == [{"talk": [3, 2]}, {"sums": [10]}]
    entries = yaml.safe_load(quick["out"].read_text())["entries"]
    assert [(entry.get("prompt"), entry["method"]) for entry in entries] == [(4, "eagle3"), (None, "vanilla")]
    printed = capsys.readouterr().out
    assert "Batch 1, temperature 0, 2 prompts of 2 to 3 tokens: 1 settings" in printed
    monkeypatch.setattr(tune, "compete", lambda *args, **options: trials.Trial(
        {tune.AUTO: choice.Score({"talk": (2.0,), "sums": (1.0,)})}, 1.0, 1, 1))  # fmt: skip
    tune.main(tune.Args(**quick | given | {"check": quick["out"]}))
    (row,) = last(capsys)["settings"]
    assert (row["auto"], [place["prompt"] for place in row["entries"]]) == ("eagle3, vanilla", [4, None])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [("2,20", "got none of more than 20 tokens. The sample has prompts of 2 to 10"),
     ("0", "--prompts '0' must be whole"), ("1", "got none of 1 to 1 tokens")],
)  # fmt: skip
def test_lengths_that_no_prompt_has_are_refused(quick, prompts, message):
    with pytest.raises(ValueError, match=message):
        tune.main(tune.Args(**quick | {"tasks": "talk,sums", "prompts": prompts}))


def test_lookups_of_several_ngrams_are_watched_apart(quick, pair, monkeypatch):
    args = tune.Args(**quick | {"lengths": "1,3", "ngrams": "1,2"})
    tuner = search.Tuner(tune.grid_of(args), pair, search.Sources(), ["pld", "pld@2x2", "pld@2x2/latest"])
    assert tuner.replayed() == {
        "pld1": ["pld@1x1", "pld@3x1"],
        "pld2": ["pld@1x2", "pld@3x2", "pld@2x2"],
        "pld2/latestTrue": ["pld@2x2/latest"],
    }
    seen = {}
    monkeypatch.setattr(search, "record", lambda target, drafter, prompts, **options: seen.setdefault("it", drafter))
    monkeypatch.setattr(search.Replay, "joined", lambda parts: None)
    sample = trials.Sample([[1]], jax.random.split(jax.random.key(0), 1))
    tuner.replays("pld2", tuner.replayed()["pld2"], {"a": sample}, trials.Setting(1, 0.0, 6))
    assert seen["it"] is tuner.drafters["pld@3x2"]


def test_the_shortlist_has_the_best_of_every_method_that_may_win():
    predicted = {"a@1": 2.0, "a@2": 1.9, "a@3": 1.95, "b@1": 1.85, "c@1": 1.2}
    scores = {label: choice.Score({"t": (value,)}) for label, value in predicted.items()}
    assert choice.shortlist(scores, 3) == ["a@1", "b@1", "a@3"]
    assert choice.shortlist(scores, 1) == ["a@1"]
    assert choice.shortlist(scores, 9) == ["a@1", "b@1", "a@3", "a@2", "c@1"]
    scores["a@2"] = choice.Score({"t": (2.7,), "u": (1.1,)})
    scores["a@1"], scores["a@3"] = choice.Score({"t": (3.4,), "u": (0.6,)}), choice.Score({"t": (3.2,), "u": (0.7,)})
    scores["b@1"] = choice.Score({"t": (3.0,), "u": (0.7,)})
    assert choice.shortlist(scores, 3) == ["a@1", "b@1", "a@2"]  # that of the best worst task before the next best


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"skip": -1}, "--skip -1 must not be negative"),
        ({"skip": 1}, "must be at most the 2 questions of task talk, got 3. Lower one of them"),
        ({"ngrams": "0"}, "--ngrams '0' must be whole numbers of at least 1"),
        ({"batches": "1,3"}, "--batches must be at most --limit 2, got 3"),
        ({"repeats": 0}, "--repeats 0 must be at least 1"),
        ({"batches": "0,1"}, "--batches '0,1' must be whole numbers of at least 1"),
        ({"batches": "one"}, "--batches 'one' must be whole numbers"),
        ({"temperatures": " "}, "--temperatures is empty"),
        ({"top_ks": "0,2"}, "--top-ks '0,2' must be whole numbers of at least 1"),
        ({"batches": ",".join(map(str, range(1, 32)))}, "must be at most 30 settings, got 31"),
        ({"methods": "eagle9"}, "unknown method 'eagle9'"),
        ({"methods": "sps", "target": "a/b"}, "sps with --target needs --draft-model PATH"),
        ({"methods": "vanilla"}, "must leave a choice, got none"),
        ({"nodes": "50"}, "must leave a choice, got none"),
        (
            {"methods": "eagle3@chain2/rejection"},
            "eagle3@chain2/rejection: verification must be deterministic in a profile, got 'rejection'",
        ),
        ({"tasks": "chats"}, "neither a file nor a name"),
        ({"tasks": "long"}, "got none in long"),
        (
            {"check": Path("none.yaml")},
            r"^--check none\.yaml: no such profile: python -m infer\.tune ",
        ),
        ({"dtype": "floot"}, "--dtype floot must be one of float32, bfloat16"),
    ],
)
def test_what_is_refused(quick, given, message):
    with pytest.raises(ValueError, match=message):
        tune.main(tune.Args(**quick | given))
    assert not quick["out"].exists()
