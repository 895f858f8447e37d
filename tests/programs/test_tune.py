"""Tuning and checking a profile: replayed cycles against the engine's own, arithmetic, the choice, whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
import yaml

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.runtime.profile import Entry, ProfileFile, fingerprint
from infer import tune
from infer.common.methods import Sources
from infer.tuning import replay, search, trials
from infer.tuning.costs import Costs, extremes
from infer.tuning.trials import Prompt, Score, Setting
from tests.models import random_prompts, tiny_head, tiny_target

WIDE = TreeConfig(depth=4, top_k=3, num_nodes=30)  # every candidate is a node
KEYS = jax.random.split(jax.random.key(3), 4)
PROMPTS = [Prompt(tokens, key) for tokens, key in zip(random_prompts([5, 9, 3, 7], 12), KEYS, strict=True)]


@pytest.mark.parametrize(
    ("temperature", "trees"), [(0.0, (TreeConfig(4, 3, 6),)), (1.0, (TreeConfig(2, 3, 5), TreeConfig.chain(2)))]
)
def test_replayed_cycles_are_those_of_the_engine(temperature, trees):
    setting, target = Setting(4, temperature, 24), tiny_target()
    drafts = replay.record(target, tiny_head("eagle1", WIDE), PROMPTS, setting)
    given = trials.arguments(PROMPTS, setting)
    assert drafts.cycles(None) == [23] * 4
    for tree in trees:
        cycles = eagle_jax.generate(target, tiny_head("eagle1", tree), **given).cycles.tolist()
        assert drafts.cycles(tree) == cycles
        assert sum(cycles) < 4 * 23  # something was accepted


def test_lookups_are_replayed_from_the_longest():
    target, setting = tiny_target(vocab=4), Setting(2, 0.0, 24)
    prompts = [Prompt(tokens, key) for tokens, key in zip(random_prompts([20, 30], 4), KEYS, strict=False)]
    drafts = replay.record(target, eagle_jax.prompt_lookup(target, length=6), prompts, setting)
    given = trials.arguments(prompts, setting)
    short = eagle_jax.generate(target, eagle_jax.prompt_lookup(target, length=2), **given)
    assert drafts.cycles(TreeConfig.chain(2)) == short.cycles.tolist()
    assert max(short.cycles) < 23
    one = replay.record(target, eagle_jax.prompt_lookup(target, length=6), prompts, setting._replace(max_new_tokens=1))
    assert one.cycles(TreeConfig.chain(2)) == [0, 0]


def test_costs_between_what_was_measured():
    drafts = {"a": [(1, 1, 0.1), (5, 1, 0.5), (1, 3, 0.3), (5, 3, 1.5)], "one": [(4, 1, 0.2)], "noise": [(4, 1, -1.0)]}
    costs = Costs([1, 4, 8], [1.0, 4.0, 6.0], drafts)
    assert [costs.at_rows(rows) for rows in (1, 2, 4, 6, 8)] == [1, 2, 4, 5, 6]
    assert costs.cycle("a", TreeConfig.chain(3)) == pytest.approx(4 + 0.3)
    assert costs.cycle("a", TreeConfig(3, 2, 5)) == pytest.approx(5 + 0.6)
    assert costs.cycle("one", TreeConfig.chain(4)) == pytest.approx(4.5 + 0.2)
    assert costs.cycle("noise", TreeConfig.chain(4)) == 4.5  # drafting never costs less than nothing


def test_the_grid_holds_only_trees_that_can_be():
    trees = search.Grid([1, 3], [1, 2], [1, 2, 4, 50]).trees(None)
    assert trees == [TreeConfig.chain(1), TreeConfig.chain(3), TreeConfig(1, 2, 2), TreeConfig(3, 2, 4)]
    assert search.Grid([2, 3], [3], [4]).trees(2) == [TreeConfig(2, 3, 4)]
    assert extremes([*trees, TreeConfig(3, 2, 5), TreeConfig(3, 2, 6)]) == [*trees[:3], TreeConfig(3, 2, 5)]


def five(*values: float) -> tuple[float, ...]:
    return values * 5 if len(values) == 1 else values


@pytest.mark.parametrize(
    ("ratios", "safe"),
    [
        ({"a": (1.5, 1.52, 1.48, 1.5, 1.5), "b": (1.1, 1.12, 1.11, 1.11, 1.11)}, True),
        ({"a": five(2.5), "b": (0.96, 0.97, 0.98, 0.97, 0.96)}, False),  # slower on one task
        ({"a": five(2.0), "b": (1.02, 1.2, 0.9, 1.2, 0.85)}, False),  # within the spread
        ({"a": five(1.5), "b": (0.985, 0.99, 0.985, 0.99, 0.985)}, True),
        ({"a": (1.01, 1.0, 1.0, 1.0, 1.0), "b": (1.0, 0.99, 1.0, 1.0, 1.0)}, False),  # gains nothing
        ({"a": (0.5, 2.0, 2.0, 2.0, 2.0)}, True),  # one slow moment does not decide
    ],
)
def test_what_is_safely_faster(ratios, safe):
    assert Score(ratios).safe is safe


def test_the_best_of_the_safe_is_chosen():
    steady, slow, best = Score({"a": five(1.3)}), Score({"a": five(0.9)}), Score({"a": five(1.6)})
    assert trials.choose({"x": slow, "y": steady, "z": best}) == "z"
    assert trials.choose({"x": slow}) == trials.choose({}) == "vanilla"


def test_the_shortlist_has_the_best_of_every_method_that_may_win():
    predicted = {"a@1": 2.0, "a@2": 1.9, "a@3": 1.95, "b@1": 1.85, "c@1": 1.2}
    scores = {label: Score({"t": (value,)}) for label, value in predicted.items()}
    assert trials.shortlist(scores, 3) == ["a@1", "b@1", "a@3"]
    assert trials.shortlist(scores, 9) == ["a@1", "b@1", "a@3", "a@2", "c@1"]
    for label, ratios in {"a@1": (3.4, 0.6), "a@2": (2.7, 1.1), "a@3": (3.2, 0.7), "b@1": (3.0, 0.7)}.items():
        scores[label] = Score({"t": ratios[:1], "u": ratios[1:]})
    assert trials.shortlist(scores, 3) == ["a@1", "b@1", "a@2"]  # that of the best worst task before the next best


@pytest.fixture
def quick(pair, monkeypatch, tmp_path):
    """Arguments of a short run on the small pair, which a profile takes for the bundled one too."""
    monkeypatch.setattr(tune, "use_compilation_cache", lambda: None)
    demo = eagle_jax.load_demo
    monkeypatch.setattr(
        "eagle_jax.runtime.profile.load_drafter", lambda path, target: demo(str(path).split("/")[-1])[1]
    )
    for name, texts in {"talk": ["abc", "de"], "sums": ["1+1=2 1+1="], "long": ["x" * 3000]}.items():
        lines = [json.dumps({"question_id": number, "turns": [text]}) for number, text in enumerate(texts)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return dict(
        methods="eagle3", tasks="talk", data=tmp_path, limit=2, max_new_tokens=6, temperatures="0", depths="1",
        top_ks="1", nodes="2", candidates=1, repeats=5, out=tmp_path / "p.yaml",
    )  # fmt: skip


def last(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def written(args: dict, target, *entries: Entry) -> dict:
    """Arguments of a check of a profile with these entries."""
    file = ProfileFile("eagle_jax.profile/1", "x", fingerprint(target), "float32", "here", entries)
    args["out"].write_text(file.to_yaml())
    return args | {"check": args["out"]}


def test_tune_and_check(quick, capsys):
    assert tune.main(tune.Args(**quick)) == 0
    (choice,) = last(capsys)["choices"]
    (row,) = json.loads(quick["out"].with_name("p_report.json").read_text())["settings"]
    assert row["chosen"] == choice["chosen"]
    found = row["candidates"]["eagle3@chain1"]
    assert found["measured"] > 0 and row["predicted"] == {"eagle3@chain1": found["predicted"]}
    assert row["identical"] == "2/2"
    assert [measured[:2] for measured in row["draft_over_plain"]["eagle3"]] == [[1, 1]]
    assert row["pass_over_plain"].keys() == {"1", "2"}
    (entry,) = yaml.safe_load(quick["out"].read_text())["entries"]
    assert (entry["batch"], entry["temperature"], entry["method"]) == (1, 0.0, row["chosen"].partition("@")[0])

    status = tune.main(tune.Args(**quick | {"check": quick["out"]}))
    checked = last(capsys)
    (one,) = checked["settings"]
    assert one["identical"] == "2/2" and one["auto"] == [f"{entry['method']} (entry of batch 1, temperature 0)"]
    assert status == (0 if checked["holds"] else 1)


@pytest.mark.slow
def test_every_kind_of_method_batch_and_temperature(quick, capsys):
    methods = "eagle2,eagle3@static,pld@2x2,lookahead@2x2x2"  # static trees and lookahead have no prediction
    given = {
        "methods": methods,
        "tasks": "talk,sums",
        "batches": "2",
        "temperatures": "0,1",
        "depths": "2",
        "top_ks": "2",
    }
    assert tune.main(tune.Args(**quick | given | {"candidates": 4})) == 0
    rows = json.loads(quick["out"].with_name("p_report.json").read_text())["settings"]
    assert [(row["batch"], row["temperature"]) for row in rows] == [(2, 0.0), (2, 1.0)]
    for row in rows:
        assert set(row["candidates"]) == {"eagle2@2x2x2", "eagle3@static", "pld@2x2", "lookahead@2x2x2"}
        identical, compared = row["identical"].split("/")
        assert identical == compared
    assert len(yaml.safe_load(quick["out"].read_text())["entries"]) == 2


def test_the_choice_is_the_best_of_what_was_measured(quick, pair, monkeypatch):
    """Whatever the machine: a trial in which one tree is fast and another only on some tasks."""
    fast = {"eagle3@1x2x2": (1.5, 1.2), "eagle3@2x2x2": (2.5, 0.9)}

    def compete(target, methods, samples, setting, repeats):
        scores = {label: Score({"a": five(fast[label][0]), "b": five(fast[label][1])}) for label in methods}
        return trials.Trial(scores, 100.0, 1, 1)

    monkeypatch.setattr(search, "compete", compete)
    predicted = {label: Score({"a": (2.0,)}) for label in fast}
    monkeypatch.setattr(search.Tuner, "predict", lambda *args: (predicted, Costs([1, 3], [0.01, 0.02], {})))
    tuner = search.Tuner(search.Grid([1, 2], [2], [2]), pair, Sources(), ["eagle3"])
    tuned = tuner.tune({}, Setting(1, 0.0, 6), 2)
    tree = TreeConfig(1, 2, 2)
    assert tuned.entry == Entry(1, 0.0, "eagle3", "bundled", tree, predicted=2.0, measured=1.35, worst=1.2)
    assert tuned.report["pass_over_plain"] == {1: 1.0, 3: 2.0}
    fast["eagle3@1x2x2"] = (0.8, 0.9)
    assert tuner.tune({}, Setting(1, 0.0, 6), 2).entry == Entry(1, 0.0)


def test_short_and_long_prompts_are_tuned_apart(quick, monkeypatch, capsys):
    """Each by its own prompts; a check says what "auto" takes for which."""
    asked = []

    def compete(target, methods, samples, setting, repeats, **options):
        asked.append({task: [len(prompt.tokens) for prompt in prompts] for task, prompts in samples.items()})
        scores = {label: Score(dict.fromkeys(samples, five(2.0 if "talk" in samples else 0.5))) for label in methods}
        return trials.Trial(scores, 100.0, 1, 1)

    predicted = {"pld@2x2": Score({"a": (2.0,)})}, Costs([1], [0.01], {})
    monkeypatch.setattr(search.Tuner, "predict", lambda *args: predicted)
    monkeypatch.setattr(search, "compete", compete)
    monkeypatch.setattr(tune, "compete", compete)
    given = quick | {"tasks": "talk,sums", "prompts": "4", "methods": "pld@2x2"}
    assert tune.main(tune.Args(**given)) == 0
    assert asked == [{"talk": [3, 2]}, {"sums": [10]}]
    entries = yaml.safe_load(quick["out"].read_text())["entries"]
    assert [(entry.get("prompt"), entry["method"]) for entry in entries] == [(4, "pld"), (None, "vanilla")]
    tune.main(tune.Args(**given | {"check": quick["out"]}))
    (row,) = last(capsys)["settings"]
    assert row["auto"] == ["pld (entry of batch 1, temperature 0, prompts to 4)",
                           "vanilla (entry of batch 1, temperature 0)"]  # fmt: skip


@pytest.mark.parametrize(("worst", "holds"), [(0.96, True), (0.94, False)])
def test_the_status_says_whether_a_profile_holds(quick, pair, monkeypatch, capsys, worst, holds):
    """Five percent slower than plain decoding on a task is too much; a setting between two entries names its own."""
    trial = trials.Trial({tune.AUTO: Score({"a": five(1.3), "b": five(worst)})}, 100.0, 2, 2)
    monkeypatch.setattr(tune, "compete", lambda *args, **options: trial)
    chain = Entry(2, 1.0, "eagle3", "bundled", TreeConfig.chain(1))
    args = written(quick, pair, Entry(1, 0.0), chain) | {"temperatures": "0.5,2", "batches": "2"}
    assert tune.main(tune.Args(**args)) == (0 if holds else 1)
    found = last(capsys)
    assert (found["holds"], found["worst"]) == (holds, worst)
    expected = [["eagle3 (entry of batch 2, temperature 1)"], ["vanilla (no entry)"]]
    assert [row["auto"] for row in found["settings"]] == expected


def test_questions_that_are_skipped_are_not_asked(quick):
    for skip, text in ((0, "abc"), (1, "de")):
        (task,) = tune.load_questions(tune.Args(**quick | {"limit": 1, "skip": skip}))
        assert [question.turns[0] for question in task.questions] == [text]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"skip": -1}, "--skip must be at least 0, got -1"),
        ({"skip": 1}, "must be at most the 2 questions of task talk, got 3. Lower one of them"),
        ({"batches": "1,3"}, "--batches must be at most --limit 2, got 3"),
        ({"repeats": 4}, "--repeats must be at least 5, got 4"),
        ({"candidates": 0}, "--candidates must be at least 1, got 0"),
        ({"temperatures": "-1"}, "--temperatures must be numbers of at least 0, got '-1'"),
        ({"top_ks": "0,2"}, "--top-ks must be whole numbers of at least 1, got '0,2'"),
        ({"methods": "eagle9"}, "method must be one of .* got 'eagle9'"),
        ({"methods": "sps", "target": "a/b"}, "--draft-model must be given for sps"),
        ({"methods": "vanilla"}, "must leave a choice, got none"),
        ({"methods": "own:json:loads"}, "must name methods of the library, got own:json:loads"),
        ({"top_ks": "2", "nodes": "50"}, "must leave a choice, got none"),
        ({"methods": "eagle3@chain2/rejection"}, "eagle3@chain2/rejection: verification must be deterministic"),
        ({"tasks": "chats"}, "task must be bundled .* got 'chats'"),
        ({"tasks": "long"}, "must have prompts of at most .* got none in long"),
        ({"tasks": "talk,sums", "prompts": "2,20"}, "got none of more than 20 tokens. The sample has prompts of 2 to"),
        ({"tasks": "talk,sums", "prompts": "1"}, "got none of 1 to 1 tokens"),
        ({"prompts": "0"}, "--prompts '0' must be whole"),
        ({"check": Path("none.yaml")}, r"^--check none\.yaml: "),
        ({"dtype": "floot"}, "--dtype must be one of float32, .* got floot"),
    ],
)
def test_what_is_refused(quick, given, message):
    with pytest.raises(ValueError, match=message):
        tune.main(tune.Args(**quick | given))
    assert not quick["out"].exists()
