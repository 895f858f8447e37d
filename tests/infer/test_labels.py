"""Labels of methods: one grammar, weights read once."""

from __future__ import annotations

import pytest

import eagle_jax
from eagle_jax.config import EAGLE1_PARENTS, ConfigError, TreeConfig
from eagle_jax.runtime.demo import bundled
from infer.common import drafts
from infer.common.labels import Label
from infer.common.methods import Loader, Sources, best_static, check_methods, load_pair
from tests.infer.result_files import recorded_file, recording

OWN = TreeConfig(depth=2, top_k=2, num_nodes=4)
TREE = TreeConfig(depth=4, top_k=2, num_nodes=7)


def with_fields(**fields) -> TreeConfig:
    return TreeConfig(depth=4, top_k=2, num_nodes=7, **fields)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("eagle3", OWN),
        ("eagle3@6x10x59", TreeConfig(6, 10, 59)),
        ("eagle3@chain3", TreeConfig.chain(3)),
        ("eagle2@static", TreeConfig.static(EAGLE1_PARENTS)),
        ("eagle2@static/traversal", TreeConfig.static(EAGLE1_PARENTS, "traversal")),
        ("eagle2@4x2x7/confidence", with_fields(rank_by="confidence")),
        ("eagle2@4x2x7/norerank", with_fields(rerank=False)),
        ("eagle2@4x2x7/confidence/norerank", with_fields(rank_by="confidence", rerank=False)),
        ("eagle3@4x2x7/untempered", with_fields(sampled_ranking="untempered")),
        ("eagle3@4x2x7/law", with_fields(sampled_ranking="law")),
        ("eagle3@4x2x7/draw", TREE),
        ("eagle3@4x2x7/top_p0.9", with_fields(top_p=0.9)),
        ("eagle3@untempered", TreeConfig(2, 2, 4, sampled_ranking="untempered")),
        ("sps@chain5/rejection", TreeConfig.chain(5, "rejection")),
        ("sps@chain5/block", TreeConfig.chain(5, "block")),
        ("sps@chain5/traversal", TreeConfig.chain(5, "traversal")),
        ("sps@chain5/deterministic", TreeConfig.chain(5)),
        ("sps@chain4", TreeConfig.chain(4, "rejection")),
        ("sps@4x2x7", TREE),
        ("eagle1", TreeConfig.static(EAGLE1_PARENTS)),
        ("eagle1@rejection", TreeConfig.static(EAGLE1_PARENTS, "rejection")),
        ("eagle1@chain3", TreeConfig.chain(3)),
        ("hass", OWN),
    ],
)
def test_a_label_names_a_tree(text, tree):
    label = Label.parse(text)
    assert label.text == text
    assert label.method == text.partition("@")[0]
    assert label.tree(OWN, EAGLE1_PARENTS) == tree


def test_numbers():
    assert Label.parse("pld").numbers == (10, 3)
    assert Label.parse("pld@12").numbers == (12, 3)
    assert Label.parse("pld@12x2").numbers == (12, 2)
    own = Label.parse("pld@12x3/shortest2/latest")
    assert (own.numbers, own.fields) == ((12, 3), (("shortest", 2), ("latest", True)))
    assert Label.parse("pld@latest").numbers == (10, 3)
    assert Label.parse("pld@10x3/shortest1").fields == ()
    assert Label.parse("lookahead").numbers == (5, 7, 7)
    assert Label.parse("lookahead@3x4x5").numbers == (3, 4, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "typical",
            "unknown method 'typical': there are vanilla, sps, pld, lookahead, medusa, hydra, eagle1, hass, eagle2, "
            "eagle3",
        ),
        ("eagle3@", "a setting must follow the @, such as eagle3@6x10x59"),
        ("vanilla@chain3", "vanilla is plain decoding and takes no setting"),
        ("eagle3@chian3", "'eagle3@chian3': unknown setting 'chian3': a tree is 6x10x59 "),
        ("eagle3@6x10", "unknown setting '6x10'"),
        ("eagle3@untempered/chain3", "the tree 'chain3' comes first, and once"),
        ("eagle3@chain3/chain4", "the tree 'chain4' comes first, and once"),
        ("eagle3@law/draw", "'draw' contradicts or repeats"),
        ("eagle3@top_p", "'top_p' must read like top_p0.9"),
        ("pld@chain3", "'pld@chain3': unknown setting 'chain3': it reads pld@10, pld@10x3, pld@10x3/shortest2"),
        ("pld@latest/latest", "unknown setting 'latest/latest'"),
        ("pld@shortest", "unknown setting 'shortest'"),
        ("lookahead@5x7x7/latest", "unknown setting '5x7x7/latest': it reads lookahead@5x7x7"),
        ("lookahead@5x7", "it reads lookahead@5x7x7"),
    ],
)
def test_what_is_no_label_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Label.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eagle3@2x2x99", r"eagle3@2x2x99: TreeConfig.num_nodes=99 exceeds the 6 candidates"),
        ("eagle3@chain0", "eagle3@chain0: TreeConfig.depth=0 must be an integer of at least 1"),
        ("eagle3@4x2x7/block", r"eagle3@4x2x7/block: TreeConfig.verification='block' is for drafts whose shape"),
        ("eagle2@static/norerank", "eagle2@static/norerank: TreeConfig.rank_by and rerank choose among"),
        ("eagle3@chain3/top_p2", r"TreeConfig.top_p=2.0 must lie in \(0, 1\]"),
        ("pld@0", "pld@0: prompt_lookup: length=0 must be an integer of at least 1"),
        ("pld@10x3/shortest4", "shortest=4 must be at most ngram=3"),
        ("lookahead@1x2x3", "lookahead@1x2x3: lookahead: ngram=1 must be an integer of at least 2"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_anything_is_loaded(text, message):
    with pytest.raises(ConfigError, match=message):
        check_methods([text], Sources())


def test_plain_decoding_comes_first_and_each_once():
    assert check_methods(["eagle3", "vanilla", "eagle3@chain3", "eagle3"], Sources()) == [
        "vanilla",
        "eagle3",
        "eagle3@chain3",
    ]


def test_settings_of_a_method_share_its_weights(pair, monkeypatch):
    sources = Sources(tree=TreeConfig(3, 2, 5))
    target, _ = load_pair(sources)
    loads, load_demo = [], eagle_jax.load_demo
    monkeypatch.setattr(
        eagle_jax, "load_demo", lambda head, **options: loads.append(head) or load_demo(head, **options)
    )
    load = Loader(target, sources)
    one, two, own = load("eagle3@chain2"), load("eagle3@2x2x3/untempered"), load("eagle3")
    assert loads == ["eagle3"]
    assert one.params is two.params is own.params
    assert one.tree == TreeConfig.chain(2)
    assert two.tree == TreeConfig(2, 2, 3, sampled_ranking="untempered")
    assert own.tree == TreeConfig(3, 2, 5)  # that of --tree
    assert load("vanilla") is None
    assert load("pld@4x2").drafter.depth == 4
    assert load("lookahead@3x2x2").drafter.num_nodes == 7
    with pytest.raises(ConfigError, match=r"eagle3@2x300x400: .*top_k=300"):
        load("eagle3@2x300x400")


@pytest.mark.parametrize(("method", "held"), [("eagle2", "eagle3"), ("eagle3", "eagle2"), ("hydra", "medusa")])
def test_heads_of_another_method_are_not_measured_under_its_name(method, held):
    target, _, _ = eagle_jax.load_demo()
    load = Loader(target, Sources(**{method: str(bundled(held))}))
    with pytest.raises(ValueError, match=rf"--{method} .*: these are heads of {held}: give them as --{held}"):
        load(method)
    assert Loader(target, Sources(**{held: str(bundled(held))}))(held) is not None


def test_eagle_and_hass_are_names_of_the_same_kind_of_head(pair, monkeypatch):
    sources = Sources(tree=TREE)
    target, _ = load_pair(sources)
    loads, load_demo = [], eagle_jax.load_demo
    monkeypatch.setattr(
        eagle_jax, "load_demo", lambda head, **options: loads.append(head) or load_demo(head, **options)
    )
    load = Loader(target, sources)
    one, hass, two = load("eagle1"), load("hass"), load("eagle2")
    assert loads == ["eagle1", "hass"]  # each bundled head once
    assert one.params is two.params  # EAGLE-2 changed the tree alone
    assert one.params is not hass.params
    assert (one.tree, hass.tree, two.tree) == (TreeConfig.static(EAGLE1_PARENTS), TREE, TREE)
    found = {}
    monkeypatch.setattr(eagle_jax, "load_drafter", lambda path, target: found.setdefault(path, load_demo("eagle1")[1]))
    load = Loader(target, Sources(eagle1="taught/one", hass="taught/hass"))
    assert load("eagle1").params is found["taught/one"].params
    assert load("hass").params is found["taught/hass"].params
    assert load.draft("hass")["weights"] == "taught/hass"
    with pytest.raises(ValueError, match="eagle1 with --target needs --eagle1 PATH"):
        check_methods(["eagle1"], Sources(target="a/b"))


def test_what_a_label_drafts(pair):
    """As it is recorded, and in words."""
    target, _ = load_pair(Sources())
    load = Loader(target, Sources())

    def told(text: str) -> tuple:
        draft = load.draft(text)
        drafts.check_draft(draft)
        return drafts.tree_words(draft), drafts.rule_words(draft), draft["rows"], draft["weights"]

    assert told("vanilla") == ("nothing", "deterministic", 1, None)
    ranked, head = "deterministic, ranked by draw", "bundled eagle1"
    assert told("eagle2") == ("dynamic, depth 2, top 2, 4 nodes", ranked, 5, head)
    assert told("hass")[3] == "bundled hass"
    assert load.draft("eagle2") == load.draft("eagle2@2x2x4") != load.draft("eagle2@2x2x5")
    words = "dynamic, depth 2, top 2, 3 nodes by confidence, no rerank, top-p 0.9"
    assert told("eagle2@2x2x3/confidence/norerank/top_p0.9")[0] == words
    assert told("eagle2@untempered")[1] == "deterministic, ranked by untempered"
    assert told("eagle2@chain3/rejection") == ("chain of 3", "rejection", 4, head)
    assert told("pld@4x2")[0] == "4 tokens behind an n-gram of 2 at most"
    assert told("pld@4x2/latest")[0] == "4 tokens behind an n-gram of 2 at most, where it stood last"
    assert told("pld@4x3/shortest2")[0] == "4 tokens behind an n-gram of 2 to 3"
    settings = {"length": 4, "ngram": 2, "latest": True}
    assert load("pld@4x2/latest").drafter is eagle_jax.prompt_lookup(target, **settings).drafter
    assert told("eagle1") == ("static, 25 nodes: 4+8+8+3+2", ranked, 26, "bundled eagle1")
    assert told("pld@4x2") == ("4 tokens behind an n-gram of 2 at most", "deterministic", 5, None)
    assert told("lookahead@3x2x2") == ("N=3, W=2, G=2", "deterministic", 8, None)


def recorded(folder, *, method="medusa", temperatures=(0.0, 1.0)):
    """Rates 0.8, 0.5 at the first level and 0.6, 0 at the second where greedy, in two tasks of different width."""
    tables = [([[10, 10], [8, 8]], [[8, 5], [5, 0]]), ([[10], [2]], [[8], [1]])]
    cells = []
    for temperature in temperatures:
        for task, (reached, accepted) in enumerate(tables):
            rows = [[0] * len(level) for level in accepted] if temperature else accepted  # only greedy ones count
            positions = {"drafted": reached, "reached": reached, "accepted": rows}
            cells.append(recording(f"{method}@static", str(task), temperature=temperature, positions=positions))
    return str(recorded_file(folder / "positions.json", *cells))


def test_the_best_static_tree_is_that_of_the_recorded_rates(tmp_path):
    path = recorded(tmp_path)
    # Worth 0.8; 0.5; 0.8 * 0.6; 0.5 * 0.6; and nothing below.
    assert best_static(Label.parse("medusa@best3"), path) == (-1, -1, 0)
    assert best_static(Label.parse("medusa@best4"), path) == (-1, -1, 0, 1)
    assert best_static(Label.parse("medusa@best2"), path, deepest=1) == (-1, -1)
    sources = Sources(positions=path)
    assert check_methods(["medusa@best4"], sources) == ["vanilla", "medusa@best4"]
    with pytest.raises(ConfigError, match="medusa@best9: num_nodes=9 exceeds the 6 paths"):
        check_methods(["medusa@best9"], sources)
    with pytest.raises(ValueError, match=r"'medusa@best4' needs --positions FILE, a result of .*--methods medusa@stat"):
        check_methods(["medusa@best4"], Sources())
    with pytest.raises(ValueError, match=r"holds nothing of eagle2; record it with infer\.acceptance"):
        check_methods(["eagle2@best4"], sources)


def test_a_method_drafts_the_best_static_tree(pair, tmp_path):
    sources = Sources(positions=recorded(tmp_path, method="eagle3"))
    target, _ = load_pair(sources)
    assert Loader(target, sources)("eagle3@best3").tree == TreeConfig.static([-1, -1, 0])


def test_a_method_drafts_the_static_tree_it_is_given(pair, tmp_path):
    """In any order of paths."""
    path = tmp_path / "tree.json"
    path.write_text("[[1], [0], [0, 0], [0, 0, 0], [1, 0]]")
    sources = Sources(choices=str(path))
    assert check_methods(["eagle3@choices"], sources) == ["vanilla", "eagle3@choices"]
    load = Loader(load_pair(sources)[0], sources)
    assert load("eagle3@choices").tree == TreeConfig.static([-1, -1, 0, 1, 2])
    assert load.draft("eagle3@choices")["kind"] == "static"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0], [2]]", r"the path \[2\] has no elder sibling of rank 1 in the list"),
        ("[[0], [1, 0]]", r"the path \[1, 0\] has no parent \[1\] in the list"),
        ("[[0], [0]]", r"the path \[0\] is given twice"),
        ("[[]]", r"the path \[\] must list ranks"),
        ("[]", "must be a list of paths of ranks, such as"),
        ("[0, 1]", "must be a list of paths of ranks, such as"),
        ("[[0], [0.5]]", "must be a list of paths of ranks, such as"),
        ('{"paths": [[0]]}', "must be a list of paths of ranks, such as"),
        ("[[0]", "not JSON"),
        (None, "No such file or directory"),
    ],
)
def test_paths_that_are_no_tree_are_refused(tmp_path, text, message):
    path = tmp_path / "tree.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises((ValueError, ConfigError), match=f"^--choices {path}: .*{message}"):
        check_methods(["medusa@choices"], Sources(choices=str(path)))


def test_the_paths_have_to_be_given():
    with pytest.raises(ValueError, match="'medusa@choices' needs --choices FILE, a JSON list of paths"):
        check_methods(["medusa@choices"], Sources())


def test_a_file_that_no_method_uses_is_refused(tmp_path):
    for option, labels in (("choices", ["medusa@static", "eagle3"]), ("positions", ["medusa", "eagle3@chain3"])):
        with pytest.raises(ValueError, match=f"--{option} /some/file is given, and no method has a use for it"):
            check_methods(labels, Sources(**{option: "/some/file"}))
