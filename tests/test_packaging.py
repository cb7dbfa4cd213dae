"""The wheel holds what the tree holds, and works where only the wheel is installed."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

USE = """
import importlib, importlib.metadata, pathlib, sys
import torch
import pdp_fx

assert pathlib.Path(pdp_fx.__file__).is_relative_to(sys.prefix), pdp_fx.__file__
assert importlib.metadata.version("pdp-fx") == {version!r}
for name in {modules!r}:
    importlib.import_module(name)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
x = torch.randn(3, 8)
spec = pdp_fx.PruneSpec(pdp_fx.Unstructured(0.5), schedule=pdp_fx.Schedule(start=0, epsilon=1.0))
prepared = pdp_fx.prepare(net, spec, (x,))
pdp_fx.step(prepared)
small = pdp_fx.convert(prepared)
torch.testing.assert_close(small(x), prepared.eval()(x), rtol=0, atol=1e-6)
"""


@pytest.mark.parametrize("package", ["tracing", "channels", "ops", "weights"])
def test_the_text_of_a_package_names_its_modules(package: str) -> None:
    home = ROOT / "pdp_fx" / package
    text = ast.get_docstring(ast.parse((home / "__init__.py").read_text())) or ""
    assert {path.stem for path in home.glob("*.py")} - {"__init__"} <= set(re.findall(r"`(\w+)`", text))


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def package_files() -> Iterator[Path]:
    for folder, _, files in os.walk(ROOT / "pdp_fx", followlinks=True):
        yield from (Path(folder, file).relative_to(ROOT) for file in files if not file.endswith(".pyc"))


def modules() -> list[str]:
    dotted = (".".join(path.with_suffix("").parts) for path in package_files() if path.suffix == ".py")
    return sorted(name.removesuffix(".__init__") for name in dotted if not name.endswith("__main__"))


def test_the_list_of_packages_is_the_tree() -> None:
    folders = {".".join(path.parent.parts) for path in package_files() if path.suffix == ".py"}
    assert sorted(project()["tool"]["setuptools"]["packages"]) == sorted(folders)


def test_every_package_folder_has_an_init() -> None:
    folders = {path.parent for path in package_files() if path.suffix == ".py"}
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()] == []


def test_the_passes_are_linked_by_a_relative_symlink() -> None:
    assert os.readlink(ROOT / "pdp_fx" / "passes") == "../passes"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree, so that no build leftovers land in, or come from, the tree itself."""
    tree = tmp_path_factory.mktemp("tree") / "source"
    shutil.copytree(
        ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info")
    )
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {path.as_posix() for path in package_files()}


@pytest.mark.slow
def test_the_installed_wheel_prunes_a_net_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    home, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    # A path line lends this environment's torch and runs none of its .pth files: no editable install shows.
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    # A PYTHONPATH would let pip find the package in the tree, and leave it at that.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    subprocess.run(install, env=environment, capture_output=True, check=True)
    command = [
        str(python),
        "-W",
        "error",
        "-c",
        USE.format(modules=modules(), version=project()["project"]["version"]),
    ]
    done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(empty.iterdir()) == []
