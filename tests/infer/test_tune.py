"""Tuning and checking a profile, on a pair small enough to run it in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import eagle_jax
from eagle_jax.runtime.profile import Entry, ProfileFile, fingerprint
from infer import tune
from infer.tuning import choice, search, trials
from infer.tuning.replay import PassCosts


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
    (row,) = report["settings"]["float32"]
    assert short["report"] == str(quick["out"].with_name("p_report.json"))
    assert [one["chosen"] for one in short["choices"]] == [row["chosen"]]
    assert row["searched"] == 2
    ((label, found),) = row["candidates"].items()
    assert label in ("eagle3@1x2x2", "eagle3@2x2x2")
    assert found["predicted"] > 0 and found["measured"] > 0
    assert found["error"] == pytest.approx(found["predicted"] / found["measured"] - 1, abs=0.02)
    assert row["identical"] in ("2/2", "4/4")  # faster by less than the spread is measured again
    assert set(row["predicted"]) == {"eagle3@1x2x2", "eagle3@2x2x2"} and row["predicted"][label] == found["predicted"]
    assert {(one["depth"], one["top_k"]) for one in row["draft_over_plain"]["eagle3"]} == {(1, 2), (2, 2)}
    watched = row["acceptance"]["eagle3"]
    assert np.shape(watched["reached"]) == np.shape(watched["accepted"]) == (2, 2)
    assert np.all(np.array(watched["accepted"]) <= watched["reached"]) and watched["unknown"] == {"2": 0.0}
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
             "temperatures": "0,1", "candidates": 4, "repeats": 1, "search": "exhaustive"}  # fmt: skip
    assert tune.main(tune.Args(**quick | given)) == 0
    printed = capsys.readouterr().out
    rows = reported(quick)["settings"]["float32"]
    assert [(row["batch"], row["temperature"]) for row in rows] == [(2, 0.0), (2, 1.0)]
    for row in rows:
        assert set(row["candidates"]) == {"eagle2@2x2x2", "eagle3@static", "pld@2x2", "lookahead@2x2x2"}
        identical, compared = row["identical"].split("/")
        assert identical == compared
        assert row["exhaustive"]["trees"] == 4
        assert 0 < row["exhaustive"]["choice_over_best"] <= 1
    assert "4 settings searched" in printed
    assert len(yaml.safe_load(quick["out"].read_text())["entries"]) == 2


@pytest.mark.slow
def test_a_profile_is_checked_against_every_tree(quick, pair, capsys):
    quick["out"].write_text(profile_of(pair, Entry(1, 0.0)))
    given = {"check": quick["out"], "temperatures": "0,1.5", "depths": "1", "search": "exhaustive"}
    tune.main(tune.Args(**quick | given))
    rows = last(capsys)["settings"]
    assert [row["auto"] for row in rows] == ["vanilla", "vanilla"]  # 1.5 was not tuned for
    assert all(row["best"] in ("auto", "vanilla", "eagle3@1x2x2") and row["over_best"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("speeds", "over_best", "holds"),
    [((1.3, 0.96), 1.0, True), ((1.3, 0.94), 1.0, False), ((1.3, 1.2), 0.96, True), ((1.3, 1.2), 0.94, False)],
)
def test_the_status_says_whether_a_profile_holds(quick, pair, monkeypatch, capsys, speeds, over_best, holds):
    """Five percent behind plain decoding on a task, or behind the best of a search, is too much."""

    def compete(target, methods, samples, setting, repeats, **options):
        score = search.Score({"a": (speeds[0],) * 5, "b": (speeds[1],) * 5})
        return search.Trial(dict.fromkeys(methods, score), 100.0, 2, 2)

    found = {"best": "eagle3@1x2x2", "choice_over_best": over_best, "interval": [0.9, 1.1], "rounds": [],
             "fastest": "eagle3@1x2x2", "fastest_speedup": 2.0, "fastest_worst": 1.0}  # fmt: skip
    monkeypatch.setattr(tune, "compete", compete)
    monkeypatch.setattr(tune, "samples_of", lambda *args: {})
    monkeypatch.setattr(search.Tuner, "exhaust", lambda *args: (None, None, found))
    quick["out"].write_text(profile_of(pair, Entry(1, 0.0)))
    status = tune.main(tune.Args(**quick | {"check": quick["out"], "search": "exhaustive"}))
    said = last(capsys)
    assert status == (0 if holds else 1)
    assert said["holds"] is holds and said["worst"] == speeds[1]


def test_the_choice_is_the_best_of_what_was_measured(quick, pair, monkeypatch):
    """Whatever the machine: a trial in which one tree is fast and one only on some tasks."""
    fast = {"eagle3@1x2x2": (1.5, 1.2), "eagle3@2x2x2": (2.5, 0.9)}
    calls = []

    def compete(target, methods, samples, setting, repeats, **options):
        calls.append((sorted(methods), repeats))
        scores = {label: search.Score({"a": (fast[label][0],) * 5, "b": (fast[label][1],) * 5}) for label in methods}
        return search.Trial(scores, 100.0, 1, 1)

    monkeypatch.setattr(search, "compete", compete)
    predicted = {label: search.Score({"a": (2.0,), "b": (1.0 + at,)}) for at, label in enumerate(fast)}
    costs = search.Costs(PassCosts((1, 3), (0.01, 0.02)), {}, {})
    monkeypatch.setattr(search.Tuner, "predict", lambda self, setting: (predicted, costs))
    args = tune.Args(**quick | {"candidates": 2})
    tuner = search.Tuner(tune.grid_of(args), pair, search.Sources(), ["eagle3"], {})
    tuned = tuner.tune(search.Setting(1, 0.0, 6))
    assert tuned.report["chosen"] == "eagle3@1x2x2"
    assert tuned.entry == search.Entry(
        1, 0.0, "eagle3", "bundled", eagle_jax.TreeConfig(1, 2, 2), predicted=1.5, measured=1.35, worst=1.2
    )
    assert tuned.report["candidates"]["eagle3@2x2x2"]["error"] == round(2.0 / 1.7 - 1, 3)
    assert tuned.report["pass_over_plain"] == {1: 1.0, 3: 2.0}
    fast["eagle3@1x2x2"] = (0.8, 0.9)
    calls.clear()
    tuned = tuner.tune(search.Setting(1, 0.0, 6))
    assert tuned.entry == search.Entry(1, 0.0)
    assert tuned.report["chosen"] == "vanilla"
    assert len(calls) == 1  # nothing was nearly faster
    monkeypatch.setitem(fast, "eagle3@2x2x2", (1.2, 1.01))
    monkeypatch.setattr(search.Score, "safe", property(lambda score: len(score.ratios["a"]) > 5))
    assert tuner.tune(search.Setting(1, 0.0, 6)).report["chosen"] == "eagle3@2x2x2"
    assert calls[-1] == (["eagle3@2x2x2"], 9)  # alone, three times as often


def test_a_choice_takes_five_repetitions(quick, pair, monkeypatch):
    """One repetition has no spread: what it says is faster is measured again before it is chosen."""
    calls = []

    def compete(target, methods, samples, setting, repeats, **options):
        calls.append(repeats)
        value = 2.0 if repeats == 1 else later
        return search.Trial({label: search.Score({"a": (value,) * repeats}) for label in methods}, 100.0, 1, 1)

    monkeypatch.setattr(search, "compete", compete)
    costs = search.Costs(PassCosts((1, 3), (0.01, 0.02)), {}, {})
    monkeypatch.setattr(
        search.Tuner, "predict", lambda self, setting: ({"eagle3@1x2x2": search.Score({"a": (2.0,)})}, costs)
    )
    tuner = search.Tuner(tune.grid_of(tune.Args(**quick | {"repeats": 1})), pair, search.Sources(), ["eagle3"], {})
    later = 1.5
    assert tuner.tune(search.Setting(1, 0.0, 6)).report["chosen"] == "eagle3@1x2x2"
    assert calls == [1, 5]
    later = 0.5
    assert tuner.tune(search.Setting(1, 0.0, 6)).report["chosen"] == "vanilla"
    assert not choice.safe(search.Score({"a": (2.0, 2.0, 2.0, 2.0)}))
    assert choice.safe(search.Score({"a": (2.0, 2.0, 2.0, 2.0, 2.0)}))


def test_a_tree_under_two_names_is_searched_once(quick, pair):
    """One bundled head is two methods."""
    grid = tune.grid_of(tune.Args(**quick))
    tuner = search.Tuner(grid, pair, search.Sources(), ["eagle2", "eagle1@2x2x2", "eagle1", "hass@1x2x2"], {})
    assert list(tuner.drafters) == ["eagle2@1x2x2", "eagle2@2x2x2", "eagle1@static", "hass@1x2x2"]


def test_an_exhaustive_search_drops_nothing_that_it_has_not_measured(quick, pair, monkeypatch):
    """All with a prompt of every task, the best third with three times as many, the last with all and the choice."""
    calls = []

    def compete(target, methods, samples, setting, repeats, **options):
        calls.append((set(methods), {task: sample.prompts for task, sample in samples.items()}, repeats))
        values = {label: 1 + rank[label] / 100 for label in methods}
        return search.Trial(
            {label: search.Score({"a": (value,) * repeats}) for label, value in values.items()}, 1.0, 1, 1
        )

    monkeypatch.setattr(search, "compete", compete)
    given = {"depths": "1,2,3,4,5,6,7,8", "top_ks": "1,2", "nodes": "8", "candidates": 2, "repeats": 6}
    samples = {"a": trials.Sample([[n] for n in range(5)], jax.random.split(jax.random.key(0), 5))}
    tuner = search.Tuner(tune.grid_of(tune.Args(**quick | given)), pair, search.Sources(), ["eagle3"], samples)
    names = list(tuner.drafters)
    tuner.drafters[search.AUTO] = tuner.drafters[names[0]]
    rank = {name: at for at, name in enumerate(names)} | {search.AUTO: 0}
    empty = search.Trial({}, 1.0, 0, 0)
    _, _, found = tuner.exhaust(search.AUTO, empty, search.Setting(1, 0.0, 6))
    *first, second, final = calls
    assert len(names) == found["trees"] == 14
    assert set().union(*(methods for methods, _, _ in first)) == set(names)
    assert all(prompts == {"a": [[0]]} and repeats == 3 for _, prompts, repeats in first)
    assert second == (set(names[-4:]), {"a": [[0], [1], [2]]}, 3)
    assert final == ({search.AUTO, *names[-2:]}, {"a": samples["a"].prompts}, 6)
    assert found["rounds"] == [{"trees": 14, "prompts": 1}, {"trees": 4, "prompts": 3}]
    assert (found["best"], found["fastest"], found["fastest_speedup"]) == (names[-1], names[-1], 1.13)
    assert found["choice_over_best"] == round(1 / 1.13, 3)
    assert found["interval"] == [round(1 / 1.13, 3)] * 2  # every repetition the same


def test_the_interval_of_a_choice_is_students_t_over_repetitions():
    """Of what two methods have in common, a slow moment of the machine, nothing is left."""
    own = search.Score({"a": (2.0, 4.0, 2.2), "b": (4.0, 8.0, 4.4)})
    other = search.Score({"a": (2.0, 4.0, 2.0), "b": (4.0, 8.0, 4.0)})
    # 1, 1, 1.1: a standard error of 1/30, and t of two degrees of freedom is 4.3027
    assert choice.spread(own, other) == pytest.approx(4.3027 / 30, rel=1e-4)
    assert choice.spread(own, own) == 0


def test_questions_that_are_skipped_are_not_asked(quick, pair, tasks):
    args = {name: tune.Args(**quick | {"limit": 1, "skip": skip}) for name, skip in (("tuned", 0), ("held out", 1))}
    texts = {name: [question.turns[0] for question in tune.asked(one)[0].questions] for name, one in args.items()}
    assert texts == {"tuned": ["abc"], "held out": ["de"]}
    (tasks / "three.jsonl").write_text('{"turns": ["a"]}\n{"turns": ["b"]}\n', encoding="utf-8")
    check = {"check": quick["out"], "tasks": "talk,three", "limit": 1, "skip": 2}
    quick["out"].write_text(profile_of(pair, Entry(1, 0.0)))
    with pytest.raises(ValueError, match="task talk has 2 questions: --skip 2 --limit 1 takes 3"):
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
    assert 'No entry for batch 2 or more at temperature 2 or more: "auto" decodes plainly there.' in printed


def test_short_and_long_prompts_are_tuned_apart(quick, pair, monkeypatch, capsys):
    """Each by its own prompts; a check says what "auto" takes for which."""
    asked = []

    def compete(target, methods, samples, setting, repeats, **options):
        asked.append({task: list(map(len, sample.prompts)) for task, sample in samples.items()})
        gain = 2.0 if "talk" in samples else 0.5
        scores = {label: search.Score(dict.fromkeys(samples, (gain,) * repeats)) for label in methods}
        return search.Trial(scores, 100.0, 1, 1)

    monkeypatch.setattr(search, "compete", compete)
    given = {"tasks": "talk,sums", "prompts": "4", "depths": "1", "repeats": 5}
    assert tune.main(tune.Args(**quick | given)) == 0
    assert asked == [{"talk": [3, 2]}, {"sums": [10]}]
    entries = yaml.safe_load(quick["out"].read_text())["entries"]
    assert [(entry.get("prompt"), entry["method"]) for entry in entries] == [(4, "eagle3"), (None, "vanilla")]
    printed = capsys.readouterr().out
    assert "Batch 1, temperature 0, 2 prompts of 2 to 3 tokens: 1 settings" in printed
    monkeypatch.setattr(tune, "compete", lambda *args, **options: search.Trial(
        {search.AUTO: search.Score({"talk": (2.0,), "sums": (1.0,)})}, 1.0, 1, 1))  # fmt: skip
    tune.main(tune.Args(**quick | given | {"check": quick["out"]}))
    (row,) = last(capsys)["settings"]
    assert (row["auto"], [place["prompt"] for place in row["entries"]]) == ("eagle3, vanilla", [4, None])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [("2,20", "no sample prompt has more than 20 tokens, they have 2 to 10"), ("0", "--prompts '0' must be whole"),
     ("1", "no sample prompt has 1 to 1 tokens")],
)  # fmt: skip
def test_lengths_that_no_prompt_has_are_refused(quick, prompts, message):
    with pytest.raises(ValueError, match=message):
        tune.main(tune.Args(**quick | {"tasks": "talk,sums", "prompts": prompts}))


@pytest.mark.parametrize("faster", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_of_two_dtypes_the_faster_one_is_written(quick, pair, monkeypatch, faster):
    """Both are watched and predicted; only the clock of the last measurement is fixed."""
    demo = eagle_jax.load_demo
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), pair.params)
    targets = {"float32": pair, "bfloat16": eagle_jax.Target.from_params(pair.config, half)}

    def load_demo(head="hass", dtype="float32"):
        assert quick["out"].is_file() == (dtype == "bfloat16")  # what the first dtype gave is kept before the second
        _, drafter, tokenizer = demo(head)
        params = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.dtype == "float32" else leaf, drafter.params)
        target = targets[dtype]
        return target, eagle_jax.DraftHead.from_params(drafter.config, params, target, drafter.tree), tokenizer

    def compete(target, methods, samples, setting, repeats, **options):
        # The slower target gains more from drafts, and still has fewer tokens per second.
        plain, gain = (100.0, 1.5) if target.dtype == faster else (60.0, 2.0)
        return search.Trial({label: search.Score({"a": (gain,) * repeats}) for label in methods}, plain, 1, 1)

    monkeypatch.setattr(eagle_jax, "load_demo", load_demo)
    monkeypatch.setattr(search, "compete", compete)
    assert tune.main(tune.Args(**quick | {"dtypes": "float32,bfloat16", "depths": "1"})) == 0
    written = yaml.safe_load(quick["out"].read_text())
    assert (written["dtype"], written["fingerprint"]) == (faster, fingerprint(targets[faster]))
    assert [entry["measured"] for entry in written["entries"]] == [1.5]
    assert set(reported(quick)["settings"]) == {"float32", "bfloat16"}


def test_a_log_is_told_how_far_it_is_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(trials, "_noted", [-trials.EVERY])
    for word in ("first", "second"):
        trials.note(word)
    assert capsys.readouterr().err == "first\n"
    monkeypatch.setattr(trials, "EVERY", 0.0)
    trials.note("third")
    assert capsys.readouterr().err == "third\n"


def test_lookups_of_several_ngrams_are_watched_apart(quick, pair, monkeypatch):
    args = tune.Args(**quick | {"lengths": "1,3", "ngrams": "1,2"})
    tuner = search.Tuner(tune.grid_of(args), pair, search.Sources(), ["pld", "pld@2x2", "pld@2x2/latest"], {})
    assert tuner.replayed() == {
        "pld1": ["pld@1x1", "pld@3x1"],
        "pld2": ["pld@1x2", "pld@3x2", "pld@2x2"],
        "pld2/latestTrue": ["pld@2x2/latest"],
    }
    seen = {}
    monkeypatch.setattr(search, "record", lambda target, drafter, sample, setting: seen.setdefault("it", drafter))
    tuner.samples = {"a": None}
    tuner.replays("pld2", tuner.replayed()["pld2"], search.Setting(1, 0.0, 6))
    assert seen["it"] is tuner.drafters["pld@3x2"]


def test_the_shortlist_has_the_best_of_every_method_that_may_win():
    predicted = {"a@1": 2.0, "a@2": 1.9, "a@3": 1.95, "b@1": 1.85, "c@1": 1.2}
    scores = {label: search.Score({"t": (value,)}) for label, value in predicted.items()}
    assert choice.shortlist(scores, 3) == ["a@1", "b@1", "a@3"]
    assert choice.shortlist(scores, 1) == ["a@1"]
    assert choice.shortlist(scores, 9) == ["a@1", "b@1", "a@3", "a@2", "c@1"]
    scores["a@2"] = search.Score({"t": (2.7,), "u": (1.1,)})
    scores["a@1"], scores["a@3"] = search.Score({"t": (3.4,), "u": (0.6,)}), search.Score({"t": (3.2,), "u": (0.7,)})
    scores["b@1"] = search.Score({"t": (3.0,), "u": (0.7,)})
    assert choice.shortlist(scores, 3) == ["a@1", "b@1", "a@2"]  # that of the best worst task before the next best


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"skip": -1}, "--skip -1 must not be negative"),
        ({"skip": 1}, "task talk has 2 questions: --skip 1 --limit 2 takes 3; lower one of them"),
        ({"ngrams": "0"}, "--ngrams '0' must be whole numbers of at least 1"),
        ({"batches": "1,3"}, "--batches 1,3: a batch of 3 takes as many prompts of every task; raise --limit 2"),
        ({"repeats": 0}, "--repeats 0 must be at least 1"),
        ({"batches": "0,1"}, "--batches '0,1' must be whole numbers of at least 1"),
        ({"batches": "one"}, "--batches 'one' must be whole numbers"),
        ({"temperatures": " "}, "--temperatures is empty"),
        ({"top_ks": "0,2"}, "--top-ks '0,2' must be whole numbers of at least 1"),
        ({"batches": ",".join(map(str, range(1, 32)))}, "31 settings: a profile has 30 at most"),
        ({"methods": "eagle9"}, "unknown method 'eagle9'"),
        ({"methods": "sps", "target": "a/b"}, "sps with --target needs --draft-model PATH"),
        ({"methods": "vanilla"}, "leave nothing to choose from"),
        ({"nodes": "50"}, "leave nothing to choose from"),
        ({"methods": "eagle3@chain2/rejection"}, "eagle3@chain2/rejection: verification='rejection' makes the text"),
        ({"tasks": "chats"}, "neither a file nor a name"),
        ({"tasks": "long"}, "task long: every prompt is too long"),
        (
            {"check": Path("none.yaml")},
            r"^--check none\.yaml: no such profile: python -m infer\.tune ",
        ),
        ({"dtypes": "float32,floot"}, "--dtypes floot must be one of float32, bfloat16"),
    ],
)
def test_what_is_refused(quick, given, message):
    with pytest.raises(ValueError, match=message):
        tune.main(tune.Args(**quick | given))
    assert not quick["out"].exists()
