"""Builds a random pair on which programs run in seconds, and small result files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.models.quantised import quantise_params
from infer import acceptance, bench, chat, cycle, demo, tune
from infer.common import results
from infer.common.methods import NOTHING
from tests.models import tiny_head, tiny_target


class ByteTokenizer:
    """Encodes a byte as a token."""

    chat_template = None

    def get_vocab(self):
        return {str(byte): byte for byte in range(256)}

    def encode(self, text, **options):
        return list(text.encode())

    def decode(self, tokens, *, skip_special_tokens=True):
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


@pytest.fixture
def pair(monkeypatch):
    """Makes `eagle_jax.load_demo` return the small pair, and the programs use no compilation cache.

    JAX would go on writing to it after the test, whatever its configuration says by then.
    """
    for program in (acceptance, bench, chat, cycle, demo, tune):
        monkeypatch.setattr(program, "use_compilation_cache", lambda: None)
    monkeypatch.setattr("infer.tuning.costs.ENOUGH", 0.0)

    target = tiny_target(258)

    def load_demo(head="hass", dtype="float32", weights=None):
        if dtype != "float32":
            raise ValueError(f"the small pair is float32, not {dtype}")
        kind = "eagle3" if head == "eagle3" else "eagle1"
        params = quantise_params(target.params, weights, dtype)
        own = target if weights is None else dataclasses.replace(target, params=params)
        return own, tiny_head(kind, TreeConfig(2, 2, 4), 258, seed=2 if head == "hass" else 1), ByteTokenizer()

    monkeypatch.setattr(eagle_jax, "load_demo", load_demo, raising=False)
    return target


@pytest.fixture
def tasks(tmp_path):
    """Returns a folder with a task of two conversations, and a task too long for the small pair."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [{"question_id": 1, "turns": ["abc", "again"]}, {"question_id": 2, "turns": ["de"]}]
    (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (folder / "long.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["x" * 3000]}), encoding="utf-8")
    return folder


OWN_MODULE = """
import eagle_jax

def lookup(target):
    return eagle_jax.prompt_lookup(target, ngram=2, length=3).plain

def head(target):
    return eagle_jax.load_demo("hass")[1].with_tree(eagle_jax.TreeConfig.chain(2, verification="rejection"))

def nothing(target):
    return 3

def two(target, other):
    return None
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Returns the name of an importable module with methods of the user's own, another one for each test."""
    (tmp_path / f"mine_{tmp_path.name}.py").write_text(OWN_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return f"mine_{tmp_path.name}"


QUESTIONS = [f"q{number}" for number in range(5)]
NOISE = (0.3, -0.1, 0.2, -0.4, 0.0)
EVEN = (0.0,) * 5


def draft_of(label: str) -> results.Draft:
    if label in ("vanilla", "transformers"):
        return NOTHING
    return results.Draft("dynamic, depth 4, top 2, 7 nodes", "deterministic, ranked by draw", 8, f"bundled {label}")


def bench_cell(label: str, task: str, speedup: float, tau: float | None, noise=EVEN, **own) -> results.Cell:
    """Returns a cell of five questions; `noise` is added to the tau and the speedup of each."""
    tokens = [round(1600 * ((tau or 1.0) + extra)) + 1 for extra in noise]
    by_question = results.TimedQuestions(
        question=QUESTIONS, call=list(range(5)), replies=[1] * 5, tokens=tokens,
        cycles=None if tau is None else [1600] * 5, seconds=[[1.0] * 5], plain_tokens=tokens,
        plain_seconds=[[speedup + extra for extra in noise]],
    )  # fmt: skip
    values = dict(
        label=label, task=task, temperature=0.0, batch=1, questions=5, replies=5,
        tokens=sum(tokens), passes=None if tau is None else 8000, cycles=None if tau is None else 8000,
        tok_s=100 * speedup, speedup=speedup, speedup_range=[speedup - 0.1, speedup + 0.1], decode_speedup=speedup,
        tau=tau, accepted=None if tau is None else [10, 20, 30], ms_per_pass=None, identical=5, draft=draft_of(label),
        by_question=by_question,
    )  # fmt: skip
    return results.Cell(**(values | own))


def recording(label: str, task: str, tau: float = 2.5, noise=EVEN, **own) -> results.Recording:
    """Returns a recording of five questions; `noise` is added to the tau of each."""
    tokens = [round(1600 * (tau + extra)) for extra in noise]
    values = dict(
        label=label, task=task, temperature=0.0, questions=5, replies=5,
        tokens=sum(tokens), cycles=8000, tau=tau, draft=draft_of(label),
        positions=results.Positions([[12, 12], [12, 0]], [[10, 10], [5, 0]], [[6, 1], [2, 0]]),
        calibration=results.Calibration([4, 0, 6], [0.25, None, 0.75], [2, 0, 6]),
        chains=[results.Chain(1, 16, 10, [10], [6]), results.Chain(2, 20, 10, [10, 6], [6, 3])],
        by_question=results.CountedQuestions(QUESTIONS, tokens, [1600] * 5),
    )  # fmt: skip
    return results.Recording(**(values | own))


def bench_file(path: Path, *cells: results.Cell, machine: str = "a laptop", **settings) -> Path:
    results.write(results.Result(machine, "abc1234", {"target": None} | settings, list(cells)), path)
    return path


def recorded_file(path: Path, *cells: results.Recording, **settings) -> Path:
    results.write(results.Recorded("a server", None, {"target": None} | settings, list(cells)), path)
    return path
