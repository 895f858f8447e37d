"""What every program begins and ends with: arguments, configuration files, errors, Ctrl-C."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import warnings

import pytest

from eagle_jax.config import ConfigError, TreeConfig
from infer.common.programs import arguments, at_least_one, can_write, listed, naming, parse_tree, run


@dataclasses.dataclass(frozen=True)
class Args:
    """Of a program.

    Attributes:
      size: how large.
      name: how called.
    """

    size: int = 3
    name: str = "a"


@pytest.mark.parametrize(
    "words",
    [["--config", "FILE", "--size", "7"], ["--size", "7", "--config", "FILE"], ["--size", "7", "--config=FILE"]],
)
def test_a_file_gives_defaults_wherever_it_is_named(words, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("size: 5\nname: b\n")
    assert arguments(Args, None, [word.replace("FILE", str(path)) for word in words]) == Args(7, "b")


def test_a_file_that_does_not_fit_is_refused(tmp_path):
    (tmp_path / "c.yaml").write_text("sise: 5\n")
    with pytest.raises(ConfigError, match=r"^--config \S*c\.yaml: unknown key 'sise'. Did you mean 'size'"):
        arguments(Args, None, ["--config", str(tmp_path / "c.yaml")])
    with pytest.raises(ConfigError, match=r"^--config \S*d\.yaml: no such configuration file$"):
        arguments(Args, None, ["--config", str(tmp_path / "d.yaml")])
    with pytest.raises(ConfigError, match="--config needs the path"):
        arguments(Args, None, ["--size", "2", "--config"])


def test_help_names_the_file_and_every_option(capsys):
    with pytest.raises(SystemExit):
        arguments(Args, "Does it.\n\n    python -m it", ["--help"])
    out = capsys.readouterr().out
    for text in ("Does it.", "--config FILE.yaml", "how large", "how called"):
        assert text in out


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
def test_a_program_ends_with_a_status_or_a_sentence(outcome, code, monkeypatch):
    monkeypatch.setattr("sys.argv", ["it"])

    def main(args):
        assert args == Args()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.raises(SystemExit) as caught:
        run(main, Args, None)
    assert caught.value.code == code


def test_a_warning_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["it"])
    with pytest.raises(SystemExit):
        run(lambda args: warnings.warn("taken for granted", stacklevel=2), Args, None)
    assert capsys.readouterr().err == "warning: taken for granted\n"


def test_errors_name_their_option_once(tmp_path):
    for inner, message in (
        (ConfigError("no such thing"), "^--head a: no such thing$"),
        (ConfigError("--head b: no such thing"), "^--head b: no such thing$"),
        (ValueError("no"), "^--head a: no$"),
    ):
        with pytest.raises(type(inner), match=message), naming("--head", "a"):
            raise inner
    with pytest.raises(ConfigError, match=r"^--head a: no such thing$"), naming("--head", "a"):
        raise ConfigError("a: no such thing")
    path = tmp_path / "x"
    with pytest.raises(ValueError, match=f"^--head {path}: No such file or directory$"), naming("--head", path):
        path.read_text()


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("sys.argv", ["it"])

    def main(args):
        raise KeyError("a fault")

    with pytest.raises(KeyError, match="a fault"):
        run(main, Args, None)


def test_trees():
    assert parse_tree("2,2,6") == TreeConfig(2, 2, 6)
    with pytest.raises(ValueError, match=r"--tree '6x10' must be depth,top_k,num_nodes"):
        parse_tree("6x10")
    with pytest.raises(ConfigError, match="exceeds the 6 candidates"):
        parse_tree("2,2,7")


def test_a_program_is_named_as_it_is_started(repository):
    """And JAX's notes about backends that are not there stay out of its log."""
    run = subprocess.run(
        [sys.executable, "-m", "train.demo.data", "--help"], cwd=repository, capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("usage: python -m train.demo.data [-h]")


@pytest.mark.parametrize(("log", "line"), [("plain", r"begun\n"), ("timed", r"[\d-]+ [\d:,]+ begun\n")])
def test_programs_log_even_where_a_library_was_there_first(repository, log, line):
    """Orbax brings absl, whose handler on the root logger would keep ours away."""
    code = (
        "import logging; logging.getLogger().addHandler(logging.NullHandler())\n"
        "from infer.common.programs import run; from tests.programs.test_programs import Args\n"
        f"run(lambda args: logging.info('begun'), Args, None, log={log!r})"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert re.fullmatch(line, ran.stderr)


def test_a_line_is_there_when_it_is_printed(repository, tmp_path):
    """Also in a file, whose buffer Python would fill first: what kills the program next takes no line with it."""
    code = "import os; from infer.common.programs import run; from tests.programs.test_programs import Args\n"
    code += "run(lambda args: (print('begun'), os.kill(os.getpid(), 9)), Args, None)"
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", code], cwd=repository, stdout=log, stderr=subprocess.DEVNULL, check=False)
    assert (tmp_path / "log").read_text() == "begun\n"


def test_lists():
    assert listed(Args(name=" b, a,b"), "name") == ["b", "a"]
    assert listed(Args(name="1,0.5"), "name", float, 0) == [1.0, 0.5]
    for text, kind, least, message in [
        (" , ", str, None, "--name is empty"),
        ("a", float, None, "--name 'a' must be numbers, separated by commas"),
        ("0,1", int, 1, "--name '0,1' must be whole numbers of at least 1"),
        ("inf", float, 0, "--name 'inf' must be numbers of at least 0"),
        ("nan", float, 0, "--name 'nan' must be numbers of at least 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            listed(Args(name=text), "name", kind, least)


def test_counts_are_at_least_one():
    at_least_one(Args(size=1), "size")
    at_least_one(Args(size=None), "size")
    with pytest.raises(ValueError, match="--size 0 must be at least 1"):
        at_least_one(Args(size=0), "size")


def test_a_place_where_nothing_can_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    can_write(tmp_path / "new" / "folder")
    can_write(tmp_path / "profile.yaml", folder=False)
    assert list(tmp_path.iterdir()) == []
    (file := tmp_path / "notes.txt").touch()
    can_write(file, folder=False)  # is replaced
    for path, folder, message in [
        (file, True, r"--out .*notes\.txt is a file: give a directory"),
        (tmp_path, False, "is a directory: give a file"),
        (file / "below" / "it", True, r"below/it: .*notes\.txt is a file and holds nothing: give another place"),
        (file / "profile.yaml", False, r"notes\.txt is a file and holds nothing"),
    ]:
        with pytest.raises(ValueError, match=message):
            can_write(path, folder=folder)

    def refused(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)  # whoever runs this may be root, whom no mode bits stop
    with pytest.raises(ValueError, match=r"nothing can be written in .* \(Permission denied\): give another place"):
        can_write(tmp_path / "new")


def test_the_hubs_retries_are_not_told(repository):
    """What comes of them is one sentence; `import datasets` sets the level of the hub's package anew."""
    code = """
import dataclasses
from infer.common import programs

@dataclasses.dataclass(frozen=True)
class Args:
    pass

def main(args):
    import datasets
    import huggingface_hub.utils._http as http
    http.logger.warning("Retrying in 1s")
    http.logger.error("told")

programs.run(main, Args, None)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "told" in done.stderr
    assert "Retrying" not in done.stderr
