"""What the README shows works: its Python runs, its commands, flags and links exist."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from experiments.__main__ import main as experiments
from experiments.report import with_method_table
from jaxlib_icml.cli import main as icml
from jaxlib_icml.methods import method_table

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(*languages):
    """Yields (first words of the code, info string, code) of the fenced blocks in these languages."""
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    for language, info, code in FENCE.findall(text):
        if language in languages:
            yield language, info.split(), code


def _python_blocks():
    """A block opened with ```python slow is marked so."""
    for index, (_, info, code) in enumerate(_blocks("python")):
        marks = [pytest.mark.slow] if "slow" in info else []
        yield pytest.param(code, id=f"block{index}", marks=marks)


def _commands():
    """Returns the command lines of the shell blocks as lists of words; console blocks show them after a $."""
    lines = [
        line.removeprefix("$ ")
        for language, _, code in _blocks("bash", "console", "sh", "shell")
        for line in code.replace("\\\n", " ").splitlines()
        if language != "console" or line.startswith("$ ")
    ]
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def test_there_is_something_to_check():
    assert README.exists()
    assert len(list(_blocks("python"))) >= 2
    programs = {words[0] for words in _commands()}
    assert {"make", "icml"} <= programs


@pytest.mark.parametrize("code", list(_python_blocks()))
def test_python_runs(code):
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = {word for words in _commands() if words[0] == "make" for word in words[1:] if "=" not in word}
    assert sorted(shown - targets) == []


@pytest.mark.parametrize("words", [words for words in _commands() if words[0] == "icml"], ids=" ".join)
def test_icml_commands_and_their_flags_exist(words, capsys):
    assert icml(["--help"]) == 0
    assert words[1] in re.findall(r"^\s+([\w-]+)", capsys.readouterr().out, re.MULTILINE)
    flags = [word.partition("=")[0] for word in words[2:] if word.startswith("--")]
    if flags:
        with pytest.raises(SystemExit) as stop:
            icml([words[1], "--help"])
        assert not stop.value.code
        shown = set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
        assert sorted(set(flags) - shown) == []


def test_experiment_commands_exist(capsys):
    shown = set(re.findall(r"python -m experiments (\w+)", README.read_text(encoding="utf-8")))
    assert shown
    for name in shown:
        with pytest.raises(SystemExit) as stop:
            experiments([name, "--help"])
        assert not stop.value.code


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#\s]+)\)", README.read_text(encoding="utf-8"))
    files = [link for link in links if "://" not in link]
    assert sorted(link for link in files if not (ROOT / link).exists()) == []


def test_extras_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"(?:\.|jaxlib-icml)\[([\w,]+)\]", README.read_text(encoding="utf-8"))
    extras = {extra for group in named for extra in group.split(",")}
    assert sorted(extras - set(project["optional-dependencies"])) == []


def test_the_method_table_is_the_registrys():
    text = README.read_text(encoding="utf-8")
    assert method_table() in text, "run: python -m experiments report"
    assert with_method_table(text) == text, "run: python -m experiments report"
