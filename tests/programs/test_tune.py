"""Tests tuning and checking a profile: replay against the engine, arithmetic, the choice, whole runs."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core import CycleCost, adaptive
from eagle_jax.core.loop import drafted_cycle
from eagle_jax.runtime import generation
from eagle_jax.runtime.profile import Entry
from infer import tune
from infer.tuning import costs as costing
from infer.tuning import search, trials
from infer.tuning.costs import Costs, extremes
from infer.tuning.prediction import Drafts, record, unverified
from infer.tuning.trials import Prompt, Score, Setting, arguments, time_against_plain
from tests.models import TREES, random_prompts, tiny_head, tiny_target

Reply = namedtuple("Reply", "tokens")
CHAIN = TreeConfig.chain(5)
WIDE = TreeConfig(depth=2, top_k=3, num_nodes=12)  # every candidate is a node
KEYS = jax.random.split(jax.random.key(3), 4)
PROMPTS = [Prompt(tokens, key) for tokens, key in zip(random_prompts([5, 9, 3, 7], 12), KEYS, strict=True)]


@pytest.mark.parametrize(
    ("temperature", "tree"),
    [(0.0, TreeConfig(2, 3, 4)), pytest.param(1.0, TreeConfig.chain(2), marks=pytest.mark.slow)],
)
def test_replayed_cycles_are_those_of_the_engine(temperature, tree):
    setting, target = Setting(4, temperature, 24), tiny_target()
    drafts = record(target, tiny_head("eagle1", WIDE), PROMPTS, setting)
    cycles = eagle_jax.generate(target, tiny_head("eagle1", tree), **arguments(PROMPTS, setting)).cycles.tolist()
    assert drafts.cycles(None) == [23] * 4
    assert drafts.cycles(tree) == cycles
    assert sum(cycles) < 4 * 23  # something was accepted


@pytest.mark.slow
def test_lookups_are_replayed_from_the_longest():
    target, setting = tiny_target(vocab=4), Setting(2, 0.0, 24)
    prompts = [Prompt(tokens, key) for tokens, key in zip(random_prompts([20, 30], 4), KEYS, strict=False)]
    long, short = (eagle_jax.prompt_lookup(target, length=length) for length in (6, 2))
    cycles = eagle_jax.generate(target, short, **arguments(prompts, setting)).cycles.tolist()
    assert max(cycles) < 23
    assert record(target, long, prompts, setting).cycles(TreeConfig.chain(2)) == cycles


def test_replies_of_one_token_have_no_cycle():
    none = np.zeros((0, 3), int)
    drafts = Drafts(2, none[:, 0], none, none, none)
    assert drafts.cycles(TreeConfig.chain(2)) == [0, 0]


def test_costs_between_what_was_measured():
    drafts = {"a": [(1, 1, 0.1), (5, 1, 0.5), (1, 3, 0.3), (5, 3, 1.5)], "one": [(4, 1, 0.2)], "noise": [(4, 1, -1.0)]}
    costs = Costs([1, 4, 8], [1.0, 4.0, 6.0], drafts)
    assert [costs.at_rows(rows) for rows in (1, 2, 4, 6, 8)] == [1, 2, 4, 5, 6]
    assert costs.cycle("a", TreeConfig.chain(3)) == pytest.approx(4 + 0.3)
    assert costs.cycle("a", TreeConfig(3, 2, 5)) == pytest.approx(5 + 0.6)
    assert costs.cycle("one", TreeConfig.chain(4)) == pytest.approx(4.5 + 0.2)
    assert costs.cycle("noise", TreeConfig.chain(4)) == 4.5  # drafting never costs less than nothing
    assert costs.parts("a", TreeConfig(3, 2, 5)) == CycleCost((1, 2, 4, 6), (1.0, 2.0, 4.0, 5.0), 0.2)
    assert costs._replace(draw=0.3).parts("a", TreeConfig(3, 2, 5)).token == 0.3


def test_the_grid_holds_only_trees_that_can_be():
    grid = search.Grid([1, 3], [1, 2], [1, 2, 4, 50]).trees(None)
    assert list(grid) == ["chain1", "chain3", "1x2x2", "3x2x4"]
    trees = list(grid.values())
    assert trees == [TreeConfig.chain(1), TreeConfig.chain(3), TreeConfig(1, 2, 2), TreeConfig(3, 2, 4)]
    assert search.Grid([2, 3], [3], [4]).trees(2) == {"2x3x4": TreeConfig(2, 3, 4)}
    assert extremes([*trees, TreeConfig(3, 2, 5), TreeConfig(2, 2, 4)]) == [*trees[:3], TreeConfig(3, 2, 5)]
    assert extremes(trees[:1]) == trees[:1]


@pytest.mark.parametrize(
    ("ratios", "safe"),
    [
        ({"a": (1.5, 1.52, 1.48, 1.5, 1.5), "b": (1.1, 1.12, 1.11, 1.11, 1.11)}, True),
        ({"a": [2.5] * 5, "b": (0.96, 0.97, 0.98, 0.97, 0.96)}, False),  # slower on one task
        ({"a": [2.0] * 5, "b": (1.02, 1.2, 0.9, 1.2, 0.85)}, False),  # within the spread
        ({"a": [1.5] * 5, "b": (0.985, 0.99, 0.985, 0.99, 0.985)}, True),
        ({"a": (1.01, 1.0, 1.0, 1.0, 1.0), "b": (1.0, 0.99, 1.0, 1.0, 1.0)}, False),  # gains nothing
        ({"a": (0.5, 2.0, 2.0, 2.0, 2.0)}, True),  # one slow moment does not decide
    ],
)
def test_what_is_safely_faster(ratios, safe):
    assert Score(ratios).safe is safe


def test_the_best_of_every_method_that_may_win_is_measured_first():
    predicted = {"a@1": 2.0, "a@2": 1.9, "a@3": 1.95, "b@1": 1.85, "c@1": 1.2}
    scores = {label: Score({"t": [value]}) for label, value in predicted.items()}
    assert search.shortlist(scores, 3) == ["a@1", "b@1", "a@3"]
    scores["a@1"] = Score({"t": [3.4], "u": [0.6]})  # loses too much on a task to be chosen
    assert search.shortlist(scores, 9) == ["a@3", "b@1", "a@2", "c@1", "a@1"]


@pytest.mark.slow
def test_all_prompts_share_one_program():
    """Compiling takes most of the time: prompts of several buckets are padded alike, and recorded with one root."""
    target, setting = tiny_target(), Setting(1, 0.0, 6)
    short, long = (Prompt(tokens, key) for tokens, key in zip(random_prompts([5, 50], 12), KEYS, strict=False))
    head = tiny_head("eagle1", WIDE)
    programs = generation.generate_program._cache_size(), generation.step_program._cache_size()
    scores, identical = time_against_plain(target, {"eagle1": head}, {"a": [short], "b": [long]}, setting, 5)
    assert identical == "2/2" and scores["eagle1"].ratios.keys() == {"a", "b"}
    record(target, head, [short, long], setting)
    assert generation.generate_program._cache_size() == programs[0] + 2
    assert generation.step_program._cache_size() == programs[1] + 1


def test_a_setting_is_timed_with_its_costs(monkeypatch):
    used, target, cost = [], tiny_target(), CycleCost((1, 3), (1.0, 1.5))

    def run(request, payoff):
        used.append((str(request.engine.cycle_cost), payoff and float(payoff.gained / payoff.spent)))
        return Reply([[1]])

    monkeypatch.setattr(trials, "run_request", run)
    methods = dict.fromkeys(("pld@2", "other"), eagle_jax.prompt_lookup(target, length=2))
    known = {"costs": {"pld@2": cost}, "expected": {"pld@2": 1.5}}
    time_against_plain(target, methods, {"a": PROMPTS[:1]}, Setting(1, 0.0, 6), 5, **known)
    assert sorted(used, key=str) == [(str(cost), 1.5)] * 6 + [("None", None)] * 12  # once untimed, then five times


def test_the_target_does_not_verify_recorded_drafts():
    """Its pass over a wide tree would take most of the time of a recording."""
    shadow = unverified(tiny_head("eagle1", WIDE).drafter)
    assert (shadow.depth, shadow.num_nodes) == (0, 0)


def test_fewer_prompts_are_measured_where_time_is_short():
    samples = {"a": PROMPTS, "b": PROMPTS[:1]}
    found = {share: search.affordable(samples, 2, share) for share in (9, 0.5, 0)}
    lengths = {share: [len(prompts) for prompts in part.values()] for share, part in found.items()}
    assert lengths == {9: [4, 1], 0.5: [2, 1], 0: [2, 1]}


def test_ctrl_c_tells_what_is_written(quick, pair, monkeypatch, capsys):
    answers = [(Entry(1, 0.0), {}), KeyboardInterrupt, KeyboardInterrupt]

    def tune_request(*args):
        answer = answers.pop(0)
        if answer is KeyboardInterrupt:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(tune, "tune_request", tune_request)
    monkeypatch.setattr(tune, "record_drafts", lambda *args: {})
    monkeypatch.setattr(tune, "show", lambda *args: None)
    given = tune.Args(**quick | {"temperatures": "0,1"})
    with pytest.raises(KeyboardInterrupt):
        tune.main(given)
    assert f"{quick['out']} has 1 of 2 settings" in capsys.readouterr().err
    before = quick["out"].read_text()
    assert len(yaml.safe_load(before)["entries"]) == 1
    with pytest.raises(KeyboardInterrupt):
        tune.main(given)
    assert f"{quick['out']} is unchanged" in capsys.readouterr().err
    assert quick["out"].read_text() == before


@pytest.fixture
def quick(pair, tasks, tmp_path):
    """Returns arguments of a short run on the small pair."""
    (tasks / "sums.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["1+1=2 1+1="]}), encoding="utf-8")
    return dict(
        methods="pld", tasks="talk", data=tasks, limit=2, max_new_tokens=6, temperatures="0", depths="1",
        top_ks="1", nodes="2", candidates=1, repeats=5, out=tmp_path / "p.yaml",
    )  # fmt: skip


def last(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_tune_and_check(quick, capsys):
    assert tune.main(tune.Args(**quick)) == 0
    printed = capsys.readouterr()
    (choice,) = json.loads(printed.out.splitlines()[-1])["choices"]
    steps = (
        "setting 1 of 1",
        "recording: compiling pld",
        "costs: compiling 2 of 4",
        "talk, batch 2 of 2",
        "measured talk",
    )
    for step in steps:
        assert step in printed.err and step not in printed.out
    (row,) = json.loads(quick["out"].with_name("p_report.json").read_text())["settings"]
    assert (row["chosen"], row["identical"]) == (choice["chosen"], "2/2")
    found = row["candidates"]["pld@1"]
    assert found["measured"] > 0 and row["predicted"] == {"pld@1": found["predicted"]}
    assert row["pass_over_plain"].keys() == {"1", "2"}
    (entry,) = yaml.safe_load(quick["out"].read_text())["entries"]
    assert (entry["batch"], entry["temperature"], entry["method"]) == (1, 0.0, choice["method"])
    status = tune.main(tune.Args(**quick | {"check": quick["out"]}))
    checked = last(capsys)
    (one,) = checked["settings"]
    assert one["identical"] == "2/2" and one["auto"] == [f"{entry['method']} (entry of batch 1, temperature 0)"]
    assert status == (0 if checked["holds"] else 1)


@pytest.mark.slow
def test_every_kind_of_method_batch_and_temperature(quick):
    given = {"methods": "eagle2,pld,eagle3@static,lookahead@2x2x2", "tasks": "talk,sums", "batches": "2"}
    given |= {"temperatures": "0,1", "depths": "2", "top_ks": "2", "candidates": 4}
    assert tune.main(tune.Args(**quick | given)) == 0
    rows = json.loads(quick["out"].with_name("p_report.json").read_text())["settings"]
    assert [(row["batch"], row["temperature"]) for row in rows] == [(2, 0.0), (2, 1.0)]
    for row in rows:
        assert set(row["candidates"]) == {"eagle2@2x2x2", "eagle3@static", "pld@2", "lookahead@2x2x2"}
        assert set(row["predicted"]) == {"eagle2@2x2x2", "pld@2"}
        assert row["identical"] == "12/12"
    assert len(yaml.safe_load(quick["out"].read_text())["entries"]) == 2


@pytest.fixture
def measured(monkeypatch):
    """Replaces measurements by the speedups that a test sets, by label and task, and records the prompts' lengths."""
    speedups: dict[str, dict[str, float]] = {}
    lengths: list[dict] = []

    def time_against_plain(target, methods, samples, setting, repeats, **options):
        time_against_plain.costs = options.get("costs")
        lengths.append({task: [len(prompt.tokens) for prompt in prompts] for task, prompts in samples.items()})
        values = {label: {task: [value] * 5 for task, value in speedups[label].items()} for label in methods}
        return {label: Score(by_task) for label, by_task in values.items()}, "1/1"

    monkeypatch.setattr(search, "time_against_plain", time_against_plain)
    monkeypatch.setattr(tune, "time_against_plain", time_against_plain)
    monkeypatch.setattr(search, "measure_costs", lambda *args: Costs([1, 3], [0.01, 0.02], {"pld": [(1, 1, 0.0)]}))
    return speedups, lengths


def test_the_choice_is_the_best_of_what_was_measured(pair, measured):
    """Whatever the machine: a trial in which one setting is fast and another only on some tasks."""
    fast = measured[0]
    fast |= {"pld@1": {"a": 1.5, "b": 1.2}, "pld@2": {"a": 2.5, "b": 0.9}}
    setting, samples = Setting(2, 0.0, 6), {"a": PROMPTS[:1]}
    found = search.find_candidates(["pld"], pair, tune.Args(), search.Grid([1, 2], [2], [2]))
    assert found.keys() == fast.keys()
    recorded = search.record_drafts(pair, found, samples, setting)
    part = recorded["pld"]
    entry, report = search.tune_request(pair, found, recorded, samples, setting, 2, 5, 1.0)
    assert search.time_against_plain.costs == {
        "pld@1": CycleCost((1, 2), (1.0, 1.5)), "pld@2": CycleCost((1, 2, 3), (1.0, 1.5, 2.0))
    }  # fmt: skip
    guess = report["predicted"]
    # Three rows cost two plain passes.
    assert guess["pld@2"] == round(part.cycles(None)[0] / part.cycles(TreeConfig.chain(2))[0] / 2, 3)
    cost = CycleCost((1, 2), (1.0, 1.5))
    assert entry == Entry(
        2, 0.0, "pld", length=1, ngram=3, cost=cost, predicted=guess["pld@1"], measured=1.35, worst=1.2
    )
    assert report["pass_over_plain"] == {1: 1.0, 3: 2.0}
    fast["pld@1"] = {"a": 0.8, "b": 0.9}
    entry, _ = search.tune_request(pair, found, recorded, samples, setting, 2, 5, 1.0)
    assert entry == Entry(2, 0.0)


def test_costs_of_the_shortest_and_of_the_longest_prompts_count(pair, measured, monkeypatch):
    """By hand: the middle one of 4, 34 and 84 tokens lies 3/8 on the way."""
    measured[0].update({"pld@1": {"a": 1.0}})
    setting, samples = Setting(1, 0.0, 6), {"a": [Prompt([7] * length, KEYS[0]) for length in (84, 4, 34)]}
    found = search.find_candidates(["pld"], pair, tune.Args(), search.Grid([1], [2], [2]))
    recorded = search.record_drafts(pair, found, samples, setting)

    def measure_costs(target, families, prompts, *rest):
        slots = float(len(prompts[0].tokens))
        return Costs([1, 2], [1.0, 1.0 + slots / 100], {"pld": [(1, 1, 0.0)]}, slots=slots)

    monkeypatch.setattr(search, "measure_costs", measure_costs)
    _, report = search.tune_request(pair, found, recorded, samples, setting, 1, 5, 1.0)
    later = CycleCost((1, 2), (1.0, 1.84), slots=84.0)
    assert search.time_against_plain.costs == {"pld@1": CycleCost((1, 2), (1.0, 1.04), slots=4.0, longer=later)}
    assert report["pass_over_plain"] == {1: 1.0, 2: 1.34}


def test_short_and_long_prompts_are_tuned_apart_and_checked(quick, measured, capsys):
    """A profile fails a check in which "auto" is over 5% slower than plain decoding on a task."""
    speedups, lengths = measured
    given = quick | {"tasks": "talk,sums", "prompts": "4", "methods": "pld@2x2"}
    speedups["pld@2x2"] = {"talk": 2.0}
    assert tune.main(tune.Args(**given)) == 0
    assert lengths == [{"talk": [3, 2]}, {"sums": [10]}]
    entries = yaml.safe_load(quick["out"].read_text())["entries"]
    assert [(entry.get("prompt"), entry["method"]) for entry in entries] == [(4, "pld"), (None, "pld")]
    given |= {"check": quick["out"], "temperatures": "0,0.5"}
    for worst, holds in ((0.96, True), (0.94, False)):
        speedups["auto"] = {"talk": 1.3, "sums": worst}
        assert tune.main(tune.Args(**given)) == (0 if holds else 1)
        found = last(capsys)
        assert (found["holds"], found["worst"]) == (holds, worst)
        methods = ["pld (entry of batch 1, temperature 0)"] * 2
        assert [row["auto"] for row in found["settings"]] == [methods, ["vanilla (no entry)"]]
    tune.main(tune.Args(**given | {"skip": 1, "tasks": "talk"}))
    assert lengths[-1] == {"talk": [2]}  # without the first question


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"skip": 2}, "must have prompts of at most .* after the first 2, got none in talk"),
        ({"batches": "1,3"}, "--batches must be at most --limit 2, got 3"),
        ({"repeats": 4}, "--repeats must be at least 5, got 4"),
        ({"minutes": -1.0}, "--minutes must be above 0, got -1"),
        ({"methods": "sps", "target": "a/b"}, "--draft-model must be given for sps"),
        ({"methods": "own:json:loads"}, "must name methods of the library, got own:json:loads"),
        ({"methods": "eagle3@chain2/pld4"}, "a profile can hold, got eagle3@chain2/pld4, two in one"),
        ({"methods": "eagle3", "top_ks": "2", "nodes": "50"}, "must leave a choice, got none"),
        ({"methods": "eagle3@chain2/rejection"}, "eagle3@chain2/rejection: verification must be deterministic"),
        ({"tasks": "long"}, "must have prompts of at most .* got none in long"),
        ({"tasks": "talk,sums", "prompts": "2,20"}, r"got none beyond the last\. The sample has prompts of 2 to 10"),
        ({"tasks": "talk,sums", "prompts": "2,3,6"}, "got none for 6"),
        (
            {"check": Path("none.yaml")},
            r"^--check must be a profile, got none\.yaml: no such file\. Write one by .* --out none\.yaml\.$",
        ),
    ],
)
def test_what_is_refused(quick, given, message):
    with pytest.raises(ValueError, match=message):
        tune.main(tune.Args(**quick | given))
    assert not quick["out"].exists()


def test_drafting_costs_what_it_adds_to_a_plain_step(monkeypatch):
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    seconds = {1: 2.0, 2: 3.0, 4: 4.0, 8: 5.0, 13: 6.0, ("eagle3", head.tree): 2.5}
    seconds["empty cycles of eagle3"] = 2.3
    seconds |= {costing.DRAW: 0.5, costing.WALK: 1.1}  # of three further tokens
    places = {costing.DRAW: 1, costing.WALK: 1}  # other calls run at two places of a reply
    monkeypatch.setattr(
        costing, "time_turns", lambda calls, *_, **__: {name: places.get(name, 2) * seconds[name] for name in calls}
    )
    costs = costing.measure_costs(target, {"eagle3": {head.tree: head}}, PROMPTS[:2], Setting(2, 1.0, 8), 1)
    seconds |= {6: 4.8, ("sps", CHAIN): 2.2, "empty cycles of sps": 2.0}
    both = costing.measure_costs(
        target, {"eagle3": {head.tree: head}, "sps": {CHAIN: head.with_tree(CHAIN)}}, PROMPTS[:2], Setting(2, 1.0, 8), 1
    )
    assert both.rows == [1, 2, 4, 6, 8, 13] and both.at_rows(6) == 4.8
    assert both.parts("sps", CHAIN).draft == 0
    assert costs.rows == [1, 2, 4, 8, 13] and costs.passes == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert costs.draw == pytest.approx(0.2) and costs.parts("eagle3", head.tree).token == pytest.approx(0.1)
    parts = costs.parts("eagle3", head.tree)
    assert parts.draft > 0 and parts.draft + parts.level == pytest.approx(0.3 / 2, abs=2e-4)
    ((levels, top_k, added),) = costs.drafts["eagle3"]
    assert 1 <= levels <= head.tree.depth and (top_k, added) == (head.tree.top_k, 0.5)
    passes = costs._replace(passes=[1.0, 1.02, 1.05, 3.0, 3.0], rows=[1, 2, 4, 8, 13])
    assert passes.parts("eagle3", head.tree).rows == (1, 4, 13)  # two cost what four do, and eight what thirteen do
    assert costs.parts("eagle3", head.tree).rows == (1, 2, 4, 8, 13)
    # With half the levels drafted, the whole tree costs more than was measured.
    half = costs._replace(drafts={"eagle3": [(head.tree.depth / 2, top_k, added)]})
    whole = costs._replace(drafts={"eagle3": [(head.tree.depth, top_k, added)]})
    assert whole.cycle("eagle3", head.tree) == pytest.approx(6.5)
    assert half.cycle("eagle3", head.tree) > 6.7


@pytest.mark.parametrize(("written", "lengths"), [((0.0,), [[5, 9]]), ((0.25, 0.75), [[9, 13], [17, 21]])])
def test_costs_are_measured_within_replies(written, lengths):
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    setting = Setting(2, 0.0, 16)
    _, states = costing.blank_states(target, PROMPTS[:2], setting, head, written)
    assert [state.cache.length.tolist() for state in states] == lengths
    drafted = costing.drafting_of(target, head, PROMPTS[:2], setting, written)(1)
    assert drafted.target.cache.length.tolist() == [length + 1 for length in lengths[-1]]
    assert drafted.drafter.cache.length.tolist() == [length + 1 for length in lengths[-1]]
    assert [state.drafter.cache.length.tolist() for state in states] == lengths
    _, empty = costing.empty_cycles_of(target, head, PROMPTS[:2], setting, written)(2)
    assert empty.cache.length.tolist() == [length + 2 for length in lengths[-1]]
    assert empty.accepted.tolist() == [[2, 0, 0, 0, 0]] * 2 and not empty.done.any()


@pytest.mark.parametrize(("tree", "levels"), [("chain4", 1), ("k3n12", 1), ("no-rerank", 4), ("static", 4)])
def test_an_empty_cycle_drafts_a_level_where_drafting_can_stop(tree, levels):
    head = tiny_head("eagle3", TREES[tree])
    cost = CycleCost((1, head.tree.num_nodes + 1), (0.5, 99.0), 0.5)  # the cost of the cycle tells its levels
    request, (state,) = costing.blank_states(tiny_target(), PROMPTS[:2], Setting(2, 0.0, 16), head, (0.5,), cost)
    payoff, _ = drafted_cycle(request.params, adaptive.start(), state, request.sampling, request.engine, cost)
    assert (float(payoff.spent) - 0.5) / 0.5 == costing.least_levels(request.engine.drafter) == levels
