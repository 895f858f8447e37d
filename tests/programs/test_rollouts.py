"""Runs `infer.rollouts` on a tiny target."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from infer import rollouts
from tests.models import tiny_target


def test_lanes_write_the_texts_of_batches_in_fewer_passes(capsys, monkeypatch):
    monkeypatch.setattr(rollouts, "load_pair", lambda args: (tiny_target(), None))
    monkeypatch.setattr(rollouts, "chat_ids", lambda _, messages: [len(messages[0]["content"]) % 12, 3, 5])
    args = rollouts.Args(methods="pld@4", replies=9, lanes=3, median=3, repeats=1, tasks="math")
    report = rollouts.main(args)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == report["rows"]
    rows = {(row["method"], row["order"]): row for row in report["rows"]}
    assert len(rows) == 6 and all(row["different"] == 0 and row["seconds"] > 0 for row in rows.values())
    lengths = rollouts.lognormal_lengths(9, 3, 0)
    # The first token of a reply comes with its prompt.
    assert rows["vanilla", "as they come"]["passes"] == sum(max(lengths[at : at + 3]) - 1 for at in (0, 3, 6))
    assert rows["vanilla", "sorted"]["passes"] == sum(sorted(lengths, reverse=True)[at] - 1 for at in (0, 3, 6))
    assert rows["vanilla", "lanes"]["passes"] == max(lengths) - 1  # the longest reply, beside which all others fit
    for method in ("vanilla", "pld@4"):
        passes = [rows[method, order]["passes"] for order in ("lanes", "sorted", "as they come")]
        assert passes == sorted(passes)
    assert rows["vanilla", "as they come"]["speedup"] == 1
    fewest = (sum(lengths) - 9) / 3
    for order in ("lanes", "sorted", "as they come"):
        row = rows["vanilla", order]
        assert row["over_bound"] == pytest.approx(row["passes"] / fewest, abs=1e-3)


@pytest.mark.slow
def test_with_stops_no_length_is_known(capsys, monkeypatch):
    """Replies end at the tiny target's stop token; their budgets are equal, so nothing is sorted."""
    stopping = dataclasses.replace(tiny_target(), config=dataclasses.replace(tiny_target().config, eos_ids=(3,)))
    monkeypatch.setattr(rollouts, "load_pair", lambda args: (stopping, None))
    monkeypatch.setattr(rollouts, "chat_ids", lambda _, messages: [len(messages[0]["content"]) % 12, 3, 5])
    args = rollouts.Args(methods="pld@4", replies=9, lanes=3, median=2, repeats=1, tasks="math", stops=True)
    report = rollouts.main(args)
    assert [(row["method"], row["order"]) for row in report["rows"]] == [
        (method, order) for method in ("vanilla", "pld@4") for order in ("lanes", "as they come")
    ]
    assert all(row["different"] == 0 for row in report["rows"])
    assert len(report["lengths"]) == 9 and report["lengths"][0] < report["lengths"][-1] <= 40


def test_one_length_is_twenty_medians_and_none_is_longer():
    lengths = rollouts.lognormal_lengths(257, 8, 1)
    assert max(lengths) == 160 and np.median(lengths) == 8 and min(lengths) >= 1
    assert lengths != rollouts.lognormal_lengths(257, 8, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lanes": 0}, "--lanes must be at least 1, got 0"), ({"methods": "eagle9"}, "eagle9"), ({"seed": -1}, "--seed")],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        rollouts.main(rollouts.Args(**options))
