"""Every notebook runs from top to bottom at smoke scale, and is committed with outputs that give nothing away."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").rglob("*.ipynb"))
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    """The code cells and their sources; cells of IPython commands, which install packages, are left out."""
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    return [(cell, source) for cell, source in zip(cells, sources, strict=True) if not source.startswith(("%", "!"))]


def test_there_are_notebooks():
    assert NOTEBOOKS


@by_name
def test_outputs_are_committed_small_and_clean(path):
    assert path.stat().st_size < 300_000
    for cell, source in code_cells(path):
        kinds = [output["output_type"] for output in cell["outputs"]]
        assert set(kinds) <= {"stream", "display_data", "execute_result"}
        assert all(output.get("name") != "stderr" for output in cell["outputs"])
        assert ("display_data" in kinds) == ("plt.show()" in source)
        assert ("stream" in kinds) == ("print(" in source)
        texts = [output.get("text", "") for output in cell["outputs"]]
        texts += [output.get("data", {}).get("text/plain", "") for output in cell["outputs"]]
        for text in ["".join(text) for text in texts]:
            assert not re.search(r"/(home|root|tmp|usr|work|Users|opt)/", text)


@pytest.mark.slow
@by_name
def test_notebooks_run(path, monkeypatch, tmp_path):
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    monkeypatch.setenv("NOTEBOOK_SMOKE", "1")
    monkeypatch.chdir(tmp_path)
    shown = []

    def show():
        assert plt.get_fignums()
        plt.gcf().canvas.draw()
        shown.append(len(plt.gcf().axes))
        plt.close("all")

    monkeypatch.setattr(plt, "show", show)
    namespace = {"__name__": "__main__"}
    cells = code_cells(path)
    for number, (_, source) in enumerate(cells):
        exec(compile(source, f"{path.name}, code cell {number}", "exec"), namespace)
    assert len(shown) == sum(source.count("plt.show()") for _, source in cells)
    assert list(tmp_path.iterdir()) == []
