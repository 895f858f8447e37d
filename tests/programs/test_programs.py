"""What every program begins and ends with: arguments, configuration files, errors, logs."""

from __future__ import annotations

import dataclasses
import io
import logging
import re
import sys
import types
import warnings

import pytest

from eagle_jax.config import ConfigError, TreeConfig
from infer.common.programs import arguments, can_write, listed, naming, parse_tree, run


@dataclasses.dataclass(frozen=True)
class Args:
    """Of a program.

    Attributes:
      size: how large.
      name: how called.
    """

    size: int = 3
    name: str = "a"


@pytest.mark.parametrize("words", ["--config FILE --size 7", "--size 7 --config FILE", "--size 7 --config=FILE"])
def test_a_file_gives_defaults_wherever_it_is_named(words, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("size: 5\nname: b\n")
    assert arguments(Args, None, words.replace("FILE", str(path)).split()) == Args(7, "b")


def test_a_file_that_does_not_fit_is_an_error(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("sise: 5\n")
    for name, message in (
        ("c", "key must be .*, got 'sise'. Did you mean 'size'"),
        ("d", "No such file or directory$"),
    ):
        with pytest.raises(ConfigError, match=rf"^--config \S*{name}\.yaml: {message}"):
            arguments(Args, None, ["--config", str(tmp_path / f"{name}.yaml")])
    with pytest.raises(SystemExit):
        arguments(Args, None, ["--size", "2", "--config"])
    assert "argument --config: expected one argument" in capsys.readouterr().err


def test_help_names_the_program_the_file_and_every_option(capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", types.SimpleNamespace(name="train.head"))
    with pytest.raises(SystemExit):
        arguments(Args, "Does it.\n\n    python -m it", ["--help"])
    out = capsys.readouterr().out
    for text in ("usage: python -m train.head", "Does it.", "--config FILE.yaml", "how large", "how called"):
        assert text in out


@pytest.fixture
def call(monkeypatch):
    """Runs a main function as a program and returns its exit status; logging and warnings are restored."""
    monkeypatch.setattr("sys.argv", ["it"])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def program(main, **options):
        with pytest.raises(SystemExit) as caught:
            run(main, Args, None, **options)
        return caught.value.code

    yield program
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (None, 0),
        (0, 0),
        (1, 1),
        ({"a": 1}, 0),
        (ValueError("size is wrong"), "error: size is wrong"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), "error: x.json: No such file or directory"),
        (OSError("disk full"), "error: disk full"),
    ],
    ids=str,
)
def test_a_program_ends_with_a_status_or_a_sentence(outcome, code, call):
    def main(args):
        assert args == Args()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert call(main) == code


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("sys.argv", ["it"])
    with pytest.raises(ZeroDivisionError):
        run(lambda args: 1 / 0, Args, None)


def test_a_warning_is_one_line(call, capsys):
    call(lambda args: warnings.warn("assumed", stacklevel=2))
    assert capsys.readouterr().err == "warning: assumed\n"


@pytest.mark.parametrize(("log", "line"), [("plain", r"begun\n"), ("timed", r"[\d-]+ [\d:,]+ begun\n")])
def test_a_program_logs_although_a_library_was_first(log, line, call, capsys):
    """Orbax brings absl, whose handler on the root logger would keep the program's away."""
    logging.getLogger().addHandler(logging.NullHandler())
    call(lambda args: logging.info("begun"), log=log)
    assert re.fullmatch(line, capsys.readouterr().err)


def test_a_line_is_in_the_file_when_it_is_printed(call, monkeypatch):
    """Python would buffer it: what kills the program next would take the line with it."""
    file = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(file))

    def main(args):
        print("begun")
        assert file.getvalue() == b"begun\n"

    assert call(main) == 0


def test_errors_name_their_option_once(tmp_path):
    path = tmp_path / "x"
    for inner, message in (
        (ConfigError("no such thing"), "--head a: no such thing"),
        (ConfigError("--head b: no such thing"), "--head b: no such thing"),
        (ConfigError("a: no such thing"), "--head a: no such thing"),
        (ValueError("no"), "--head a: no"),
    ):
        with pytest.raises(type(inner), match=f"^{message}$"), naming("--head", "a"):
            raise inner
    with pytest.raises(ValueError, match=f"^--head {path}: No such file or directory$"), naming("--head", path):
        path.read_text()


def test_trees():
    assert parse_tree("2,2,6") == TreeConfig(2, 2, 6)
    with pytest.raises(ValueError, match="--tree must be depth,top_k,num_nodes, got '6x10'"):
        parse_tree("6x10")
    with pytest.raises(ConfigError, match=r"^--tree 2,2,7: TreeConfig\.num_nodes must be at most 6"):
        parse_tree("2,2,7")


def test_lists():
    assert listed(Args(name=" b, a,b"), "name") == ["b", "a"]
    assert listed(Args(name="1,0.5"), "name", float, 0) == [1.0, 0.5]
    for text, kind, least, message in [
        (" , ", str, None, "--name must have at least one value"),
        ("a", float, None, "--name must be numbers, got 'a'. Separate"),
        ("0,1", int, 1, "--name must be whole numbers of at least 1, got '0,1'"),
        ("inf", float, 0, "--name must be numbers of at least 0, got 'inf'"),
        ("nan", float, 0, "--name must be numbers of at least 0, got 'nan'"),
    ]:
        with pytest.raises(ValueError, match=message):
            listed(Args(name=text), "name", kind, least)


def test_a_place_that_cannot_be_written_is_an_error_before_the_work(tmp_path):
    can_write(tmp_path / "new" / "folder")
    can_write(tmp_path / "profile.yaml", folder=False)
    assert list(tmp_path.iterdir()) == []
    (file := tmp_path / "notes.txt").touch()
    can_write(file, folder=False)  # is replaced
    for path, folder, message in [
        (file, True, r"--out must be a directory, got .*notes\.txt\. Choose"),
        (tmp_path, False, r"--out must be a file, got .*\. Choose"),
        (file / "below" / "it", True, r"--out must be writable, got .*below/it: .*notes\.txt: Not a directory"),
    ]:
        with pytest.raises(ValueError, match=message):
            can_write(path, folder=folder)
