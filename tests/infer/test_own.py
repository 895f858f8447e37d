"""A method of the user's own in the programs that compare methods: `own:module:function`."""

from __future__ import annotations

import json

import pytest

import eagle_jax
from infer import bench, tune
from infer.common import drafts, own, results
from infer.common.labels import Label
from infer.common.methods import Loader, Sources, check_methods, load_pair
from infer.tuning import search

MODULE = """
import eagle_jax

def lookup(target):
    return eagle_jax.prompt_lookup(target, ngram=2, length=3).plain

def head(target):
    return eagle_jax.load_demo("hass")[1].with_tree(eagle_jax.TreeConfig.chain(2, verification="rejection"))

def nothing(target):
    return 3

def wants(target, other):
    return None
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with one task of one question."""
    monkeypatch.setattr(bench, "use_compilation_cache", lambda: None)
    (folder := tmp_path / "tasks").mkdir()
    (folder / "talk.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["abcabc"]}), encoding="utf-8")
    return folder


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of an importable module; each test has one of its own."""
    (tmp_path / f"mine_{tmp_path.name}.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return f"mine_{tmp_path.name}"


def test_it_is_timed_beside_the_others(pair, tasks, module, tmp_path):
    """Its own row, the texts plain decoding's; what was drafted is recorded."""
    label = f"own:{module}:lookup"
    args = bench.Args(
        methods=f"{label},pld@3x2", tasks="talk", data=tasks, temperatures="0,1", limit=1, max_new_tokens=6, repeats=1,
        transformers=False, golden=False, out=tmp_path / "out",
    )  # fmt: skip
    report = bench.main(args)
    assert report["labels"] == ["vanilla", label, "pld@3x2"]
    kept = results.read(report["result"])
    cells = {(cell.label, cell.temperature): cell for cell in kept.cells}
    for heat in (0.0, 1.0):
        mine, same = cells[label, heat], cells["pld@3x2", heat]
        assert (mine.identical, mine.tau) == (mine.compared, same.tau)
        assert mine.draft == drafts.PLAIN | {"kind": "own", "rows": 4, "depth": 3, "nodes": 3}
    assert drafts.tree_words(mine.draft) == "3 nodes in 3 levels"
    assert json.dumps(mine.draft)


def test_what_it_may_return(pair, module):
    target, _ = load_pair(Sources())
    load = Loader(target, Sources())
    assert isinstance(load(f"own:{module}:lookup"), eagle_jax.BoundDrafter)
    assert load(f"own:{module}:lookup").name == f"own:{module}:lookup"
    assert load.draft(f"own:{module}:head")["rule"] == "rejection"
    with pytest.raises(ValueError, match=r"nothing' returned a int, expected an eagle_jax.Drafter or BoundDrafter"):
        load(f"own:{module}:nothing")
    with pytest.raises(ValueError, match=r"wants' must take one argument, the target \(missing a required arg"):
        load(f"own:{module}:wants")
    assert Label.parse("own:a.b:c").method == "own:a.b:c"


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("own:a", r"'own:a' must read own:module:function, such as own:my_drafter:pair_lookup"),
        ("own:a:b:c", "must read own:module:function"),
        ("own:a:b@4", "takes no setting: name a function for each"),
        ("own:no_such_module:f", "there is no module no_such_module: run in the folder of no_such_module.py, or put"),
        ("own:json:no_such_function", "json has no function no_such_function"),
    ],
)
def test_what_is_no_method(label, message):
    with pytest.raises(ValueError, match=message):
        check_methods([label], Sources())


def test_a_module_that_cannot_import_its_own_is_told_as_python_does(tmp_path, monkeypatch):
    (tmp_path / "wants_more.py").write_text("import is_not_installed", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="is_not_installed"):
        own.find("own:wants_more:f")


def test_a_profile_cannot_hold_it(pair, module):
    with pytest.raises(ValueError, match="--methods must name methods of the library, got own:"):
        search.Tuner(tune.grid_of(tune.Args()), pair, Sources(), [f"own:{module}:lookup"])
