"""Every example in a docstring runs and gives what it shows."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.DONT_ACCEPT_TRUE_FOR_1


def _modules():
    for package in ("jaxlib_icml", "kernels_pallas", "experiments"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.stem != "__main__":
                parts = path.relative_to(ROOT).with_suffix("").parts
                yield ".".join(parts[:-1] if path.stem == "__init__" else parts), path


def _examples_in(path):
    """Counts the docstrings with examples in the source, without importing it."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    return sum(bool(doctest.DocTestParser().get_examples(text)) for text in docstrings)


MODULES = [(name, path, _examples_in(path)) for name, path in _modules()]


@pytest.mark.parametrize(("name", "count"), [(name, count) for name, _, count in MODULES if count])
def test_examples(name, count):
    module = importlib.import_module(name)
    found = [test for test in doctest.DocTestFinder().find(module, name) if test.examples]
    # Decorated functions can hide from doctest: none may be left out unnoticed.
    assert len(found) == count, f"doctest sees {[test.name for test in found]}"
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    report = []
    for test in found:
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


def test_there_are_examples():
    assert sum(count for _, _, count in MODULES) > 0
