"""Checks labels of methods, their weights, a method of the user's own, and options for paths and chat templates."""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax
import pytest

import eagle_jax
from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.config import EAGLE1_PARENTS, ConfigError, TreeConfig
from eagle_jax.data.chat.tokenize import chat_text
from eagle_jax.models.quantised import is_quantised
from infer.common.labels import Label
from infer.common.methods import BUNDLED, NOTHING, OPTIONS, Loader, Places, best_static, check_methods, load_pair
from infer.common.programs import arguments
from infer.common.results import Positions
from tests.data.chats import TEMPLATES
from tests.programs.conftest import recorded_file, recording

DEFAULT = TreeConfig(depth=2, top_k=2, num_nodes=4)
with_fields = functools.partial(TreeConfig, depth=4, top_k=2, num_nodes=7)
STATIC = TreeConfig.static(EAGLE1_PARENTS)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("eagle3", DEFAULT),
        ("eagle3@untempered", TreeConfig(2, 2, 4, sampled_ranking="untempered")),
        ("eagle3@6x10x59", TreeConfig(6, 10, 59)),
        ("eagle3@chain3", TreeConfig.chain(3)),
        ("eagle2@static", STATIC),
        ("eagle2@4x2x7/confidence/norerank", with_fields(rank_by="confidence", rerank=False)),
        ("eagle3@4x2x7/top_p0.9", with_fields(top_p=0.9)),
        ("eagle3@4x2x7/noise_scale0.5", with_fields(noise_scale=0.5)),
        ("sps@chain5/block", TreeConfig.chain(5, "block")),
        ("sps@chain4", TreeConfig.chain(4, "rejection")),
        ("sps@4x2x7", with_fields()),
        ("eagle1", STATIC),
        ("eagle1@rejection", TreeConfig.static(EAGLE1_PARENTS, "rejection")),
        ("eagle1@chain3", TreeConfig.chain(3)),
    ],
)
def test_a_label_names_a_tree(text, tree):
    label = Label.parse(text)
    assert (label.text, label.method) == (text, text.partition("@")[0])
    assert label.tree(DEFAULT, EAGLE1_PARENTS) == tree


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("typical", "method must be one of vanilla, sps, pld, .* got 'typical'. Settings follow an @"),
        ("eagle3@", "setting of eagle3 must be DEPTHxTOP_KxNODES, .* got ''. Write eagle3@4x2x7/untempered"),
        ("vanilla@chain3", "vanilla must have no setting, got 'chain3'. Write vanilla"),
        ("eagle3@chian3", "must be DEPTHxTOP_KxNODES, chainN, .* untempered, .* got 'chian3'"),
        ("eagle3@4x2x7/chain3", "settings of 'eagle3@4x2x7/chain3' must be given once, got 'chain3' again"),
        ("pld@chain3", "setting of pld must be LENGTHxNGRAM, .* got 'chain3'. Write pld@10x3/shortest2"),
        ("lookahead@5x7x7/latest", "must be NGRAMxWINDOWxGUESSES, got 'latest'. Write lookahead@5x7x7"),
        ("eagle3@2x2x99", "eagle3@2x2x99: .*num_nodes"),
        ("eagle3@4x2x7/block", "eagle3@4x2x7/block: .*verification"),
        ("pld@0", "pld@0: .*length"),
        ("eagle3@chain3/pld0", "eagle3@chain3/pld0: .*length"),
        ("eagle3@chain3/pld6/pld4", "settings of 'eagle3@chain3/pld6/pld4' must be given once, got 'pld4' again"),
        ("pld@10/pld6", "setting of pld must be LENGTHxNGRAM, .* got 'pld6'"),
        ("lookahead@1x2x3", "lookahead@1x2x3: .*ngram"),
        ("own:a", "method must be own:module:function without a setting, got 'own:a'"),
        ("own:no_such_module:f", "module of 'own:no_such_module:f' must be importable .No module named 'no_such"),
        ("own:json:no_such", "'own:json:no_such' must take one argument, the target, got None"),
        ("medusa@best4", "--positions must be given for medusa@best31"),
        ("medusa@choices", "--choices must be given for medusa@choices"),
    ],
)
def test_a_bad_label_is_an_error_before_weights_are_loaded(text, message):
    with pytest.raises((ValueError, ConfigError), match=message):
        check_methods([text], Places())


def test_plain_decoding_comes_first_and_every_label_once():
    found = check_methods(["eagle3", "vanilla", "eagle3@chain3", "eagle3"], Places())
    assert found == ["vanilla", "eagle3", "eagle3@chain3"]


def test_settings_of_a_method_share_its_weights(pair, monkeypatch):
    loads, load_demo = [], eagle_jax.load_demo
    monkeypatch.setattr(eagle_jax, "load_demo", lambda head, **rest: loads.append(head) or load_demo(head, **rest))
    load = Loader(pair, Places())
    chain, ranked, default = load("eagle3@chain2"), load("eagle3@2x2x3/untempered"), load("eagle3")
    assert chain.params is ranked.params is default.params
    assert (chain.tree, default.tree) == (TreeConfig.chain(2), DEFAULT)
    assert load("vanilla") is None
    assert load("pld@4x2").drafter.depth == 4
    assert load("lookahead@3x2x2").drafter.num_nodes == 7
    both = load("eagle3@2x2x3/pld6x4")
    assert both.base.params is chain.params and both.base.tree == TreeConfig(2, 2, 3)
    assert (both.lookup.drafter.depth, both.drafter.num_nodes) == (6, 9)
    with pytest.raises(ConfigError, match="eagle1@chain2/rejection/pld6: "):
        load("eagle1@chain2/rejection/pld6")
    static, hass, dynamic = load("eagle1"), load("hass"), load("eagle2")
    assert loads == ["eagle3", "eagle1", "hass"]  # each bundled head once
    assert static.params is dynamic.params is not hass.params  # EAGLE-2 changed the tree alone
    assert (static.tree, dynamic.tree) == (STATIC, DEFAULT)
    with pytest.raises(ConfigError, match=r"eagle3@2x300x400: .*top_k"):
        load("eagle3@2x300x400")


@pytest.fixture(scope="module")
def loaded():
    return eagle_jax.load_demo()


@pytest.mark.parametrize("method", OPTIONS)
def test_weights_are_read_from_a_path(method, loaded):
    """EAGLE heads are of one kind, whatever their training; heads of another method are an error."""
    path = str(bundled(BUNDLED[method]))
    load = Loader(loaded[0], Places(**{OPTIONS[method]: path}))
    assert load(method) is not None and load.weights(method) == path
    for other in {"eagle3": ["eagle2"], "medusa": ["hydra"]}.get(method, []):
        with pytest.raises(ValueError, match=rf"--{other} must have heads of {other}, got .* heads of {method}\. Give"):
            Loader(loaded[0], Places(**{other: path}))(other)


RANKED = "deterministic, ranked by draw"


@pytest.mark.parametrize(
    ("text", "tree", "rule", "rows", "weights"),
    [
        ("vanilla", "nothing", "deterministic", 1, None),
        ("eagle2", "dynamic, depth 2, top 2, 4 nodes", RANKED, 5, "eagle1"),
        ("hass@2x2x3/confidence/norerank/top_p0.9", "dynamic, depth 2, top 2, 3 nodes by confidence, no rerank, top-p "
         "0.9", RANKED, 4, "hass"),
        ("eagle2@chain3/law/noise_scale0.5", "chain of 3", "deterministic, ranked by law, noise scale 0.5", 4,
         "eagle1"),
        ("eagle2@chain3/rejection", "chain of 3", "rejection", 4, "eagle1"),
        ("eagle1", "static, 25 nodes: 4+8+8+3+2", RANKED, 26, "eagle1"),
        ("eagle3@chain2/pld5x4", "chain of 2, with prompt lookup of 5", RANKED, 8, "eagle3"),
        ("pld", "length 10, ngram 3", "deterministic", 11, None),
        ("pld@4/latest", "length 4, ngram 3, latest True", "deterministic", 5, None),
        ("pld@4x2/shortest2/latest", "length 4, ngram 2, shortest 2, latest True", "deterministic", 5, None),
        ("lookahead", "ngram 5, window 7, guesses 7", "deterministic", 56, None),
        ("lookahead@3x2x2", "ngram 3, window 2, guesses 2", "deterministic", 8, None),
    ],
)  # fmt: skip
def test_the_record_of_a_label(pair, text, tree, rule, rows, weights):
    found = Loader(pair, Places()).draft(text)
    assert (found.tree, found.rule, found.rows) == (tree, rule, rows)
    assert found.weights == (weights and f"bundled {weights}")
    assert found == NOTHING or found != Loader(pair, Places()).draft("eagle2@2x2x2")


def recorded(folder, method="medusa"):
    """Writes greedy rates 0.8, 0.5 at the first level and 0.6, 0 at the second, in tasks of two widths."""
    tables = [([[10, 10], [8, 8]], [[8, 5], [5, 0]]), ([[10], [2]], [[8], [1]])]
    cells = []
    for temperature in (0.0, 1.0):
        for task, (reached, accepted) in enumerate(tables):
            rows = [[0] * len(level) for level in accepted] if temperature else accepted  # only greedy ones count
            own = {"temperature": temperature, "positions": Positions(reached, reached, rows)}
            cells.append(recording(f"{method}@static", str(task), **own))
    return str(recorded_file(folder / "positions.json", *cells))


def test_recorded_rates_give_the_best_static_tree(pair, tmp_path):
    path = recorded(tmp_path)
    # The values of nodes are 0.8; 0.5; 0.8 * 0.6; 0.5 * 0.6; and 0 below.
    assert best_static(Label.parse("medusa@best3"), path) == (-1, -1, 0)
    assert best_static(Label.parse("medusa@best4"), path) == (-1, -1, 0, 1)
    assert best_static(Label.parse("medusa@best2"), path, deepest=1) == (-1, -1)
    with pytest.raises(ConfigError, match=r"medusa@best9: num_nodes"):
        check_methods(["medusa@best9"], Places(positions=path))
    with pytest.raises(ValueError, match=r"must have cells of eagle2, got none\. Run infer\.acceptance on its @static"):
        check_methods(["eagle2@best4"], Places(positions=path))
    load = Loader(pair, Places(positions=recorded(tmp_path, "eagle3")))
    assert load("eagle3@best3").tree == TreeConfig.static([-1, -1, 0])


def test_a_file_of_paths_gives_a_static_tree(pair, tmp_path):
    """The paths may come in any order."""
    path = tmp_path / "tree.json"
    path.write_text("[[1], [0], [0, 0], [0, 0, 0], [1, 0]]")
    sources = Places(choices=str(path))
    assert check_methods(["eagle3@choices"], sources) == ["vanilla", "eagle3@choices"]
    assert Loader(pair, sources).draft("eagle3@choices").parents == (-1, -1, 0, 1, 2)


@pytest.mark.parametrize("text", ["[[0], [2]]", "[]", "[0, 1]", "[[0.5]]", None])
def test_paths_that_are_no_tree_are_an_error(tmp_path, text):
    path = tmp_path / "tree.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises((ValueError, ConfigError), match=f"^--choices {path}"):
        check_methods(["medusa@choices"], Places(choices=str(path)))


@pytest.mark.parametrize("option", ["choices", "positions"])
def test_a_file_that_no_method_uses_is_an_error(option):
    with pytest.raises(ValueError, match=f"--{option} must be read by a method, got /some/file. Leave it out, or"):
        check_methods(["medusa@static", "eagle3"], Places(**{option: "/some/file"}))


def test_a_function_of_the_user_returns_a_drafter(pair, own_module):
    load = Loader(load_pair(Places())[0], Places())
    assert load(f"own:{own_module}:lookup").name == f"own:{own_module}:lookup"
    assert load.draft(f"own:{own_module}:head").rule == "rejection"
    with pytest.raises(ValueError, match=r"nothing' must return a Drafter or BoundDrafter, got int"):
        load(f"own:{own_module}:nothing")
    with pytest.raises(ValueError, match=r"two' must take one argument, the target, got .*missing a req"):
        load(f"own:{own_module}:two")


def test_an_error_about_a_path_names_its_option(loaded, tmp_path):
    with pytest.raises(CheckpointError, match=r"^--target /nope: path_or_hub_id must be .*, got /nope"):
        load_pair(Places(target="/nope"))
    for method, field in OPTIONS.items():
        option = f"--{field.replace('_', '-')}"
        with pytest.raises(CheckpointError, match=f"^{option} /nope: path_or_hub_id must be .*, got /nope"):
            Loader(loaded[0], Places(**{field: "/nope"}))(method)
    with pytest.raises(ValueError, match=r"^--positions /nope: No such file or directory$"):
        best_static(Label.parse("medusa@best31"), "/nope")
    with pytest.raises(CheckpointError, match=r"^--eagle3 [^ ]*medusa must hold an EAGLE.*, got Medusa heads"):
        Loader(loaded[0], Places(eagle3=str(bundled("medusa"))))("eagle3")


@pytest.mark.parametrize("path", [None, str(bundled("target"))], ids=["bundled", "path"])
def test_the_target_is_quantised_and_drafters_are_not(path):
    sources = Places(target=path, weights="int4")
    target, _ = load_pair(sources)
    assert target.params["layers_0"]["mlp"]["gate_up_proj"]["weight"]["q"].dtype == "int4"
    head = Loader(target, dataclasses.replace(sources, eagle3=path and str(bundled("eagle3"))))("eagle3")
    assert not any(is_quantised(node) for node in jax.tree.leaves(head.params, is_leaf=is_quantised))


def test_a_template_and_its_arguments_are_options(loaded, monkeypatch, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }} {{ effort }}" + TEMPLATES["chatml"])
    given = ["--chat-template", str(tmp_path / "own.jinja"), "--template-args", "effort=low"]
    monkeypatch.setattr(eagle_jax, "load_demo", lambda **_: (*loaded[:2], copy.deepcopy(loaded[2])))
    _, tokenizer = load_pair(arguments(Places, None, given))
    assert chat_text(tokenizer, [{"role": "user", "content": "Hi"}]).startswith("Hi low")
    for wrong, message in (
        ("effrt=low", r"--template-args effrt=low: template arguments must be .* reads \(effort\)"),
        ("effort", "--template-args must be NAME=VALUE"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            load_pair(arguments(Places, None, [*given[:-1], wrong]))
