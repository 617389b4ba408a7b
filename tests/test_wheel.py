"""The wheel, built and installed the way a user gets it."""

import configparser
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def _run(*command, cwd):
    run = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build.__main__", reason="needs the [dev] extra")
    pytest.importorskip("hatchling", reason="needs the [dev] extra")
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment with the wheel in it, and the dependencies of this one behind it."""
    folder = tmp_path_factory.mktemp("user") / "venv"
    venv.create(folder, with_pip=True)
    paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
    interpreter = Path(paths["scripts"]) / Path(sys.executable).name
    _run(interpreter, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    # After the wheel's own: a path listed here is searched last, and .pth files inside it (an editable
    # installation of the checkout) are not followed.
    behind = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    Path(paths["purelib"], "dependencies.pth").write_text("\n".join(behind), encoding="utf-8")
    return interpreter


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        info = metadata.rpartition("/")[0]
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read(f"{info}/entry_points.txt").decode())
        about = archive.read(metadata).decode()
    assert {name.partition("/")[0] for name in names} == {"jaxlib_icml", "kernels_pallas", info}
    assert {"jaxlib_icml/py.typed", "kernels_pallas/py.typed", f"{info}/licenses/LICENSE"} <= names
    modules = {name for name in names if name.endswith(".py")}
    sources = {p.relative_to(ROOT) for top in ("jaxlib_icml", "kernels_pallas") for p in (ROOT / top).rglob("*.py")}
    assert modules == {path.as_posix() for path in sources}
    tables = {p.relative_to(ROOT).as_posix() for p in (ROOT / "kernels_pallas" / "configs").glob("*.json")}
    assert tables
    assert tables <= names
    assert dict(entry_points["console_scripts"]) == {"icml": "jaxlib_icml.cli:main"}
    assert "Name: jaxlib-icml\n" in about
    assert "License-Expression: Apache-2.0\n" in about


def test_the_installed_packages_import_from_the_wheel(python, tmp_path):
    code = "import jaxlib_icml, kernels_pallas; print(jaxlib_icml.__file__, kernels_pallas.__file__, sep='\\n')"
    for file in _run(python, "-c", code, cwd=tmp_path).splitlines():
        assert Path(file).is_relative_to(python.parents[1])
    code = "from jaxlib_icml import gradient_stabilizer, lm, moe, olion, training; print(callable(olion))"
    assert _run(python, "-c", code, cwd=tmp_path) == "True"


def test_experiments_and_tests_are_not_installed(python, tmp_path):
    code = "from importlib.util import find_spec; print(find_spec('experiments'), find_spec('tests'))"
    assert _run(python, "-c", code, cwd=tmp_path) == "None None"


def test_the_command_is_installed(python, tmp_path):
    command = next(path for path in python.parent.iterdir() if path.stem == "icml")
    assert "train" in _run(command, "--help", cwd=tmp_path)
