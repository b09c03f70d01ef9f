"""Tests of the contents of the wheel and the source archive."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from shardmuon import __version__

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"  # the folder that contains all packages of the wheel

pytest.importorskip("build", reason="needs the build package of the extra 'dev'")
pytest.importorskip("twine", reason="needs the twine package of the extra 'dev'")


def _run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the source archive, and build the wheel from that archive. The build uses a copy of the repository without
    files that git ignores."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    files = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in files.stdout.decode().rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    _run("-m", "build", "--no-isolation", "--outdir", str(folder), str(source), PYTHONWARNINGS="ignore")
    (archive,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return archive, wheel


def test_the_index_would_take_both(built: tuple[Path, Path]) -> None:
    assert _run("-m", "twine", "check", "--strict", *map(str, built), NO_COLOR="1").count("PASSED") == 2


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    with zipfile.ZipFile(built[1]) as wheel:
        found = {name for name in wheel.namelist() if not name.endswith("/")}
    suffixes = (".py", ".typed", ".yaml", ".json", ".html")
    expected = {str(path.relative_to(SOURCE)) for path in SOURCE.glob("shardmuon*/**/*") if path.suffix in suffixes}
    assert {name for name in found if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in found)


def test_the_metadata_says_what_a_reader_of_the_index_needs(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == __version__
    needed = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(need.split(">")[0] for need in needed) == ["numpy", "torch"]
    assert "shardmuon" in metadata.get_payload()
    assert {"demo", "deepspeed", "megatron"} <= set(metadata.get_all("Provides-Extra", []))


def test_the_wheel_runs_as_a_module_and_as_a_command(built: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(tmp_path)
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
        assert "shardmuon = shardmuon.commands.main:main" in wheel.read(name).decode()
    # The script prints the path from which shardmuon is imported, and then runs `python -m shardmuon --version`.
    code = (
        "import runpy, sys, shardmuon; print(shardmuon.__file__); sys.argv[1:] = ['--version']; "
        "runpy.run_module('shardmuon', run_name='__main__', alter_sys=True)"
    )
    where = str(tmp_path / "shardmuon" / "__init__.py")
    assert _run("-c", code, PYTHONPATH=str(tmp_path)).splitlines() == [where, f"shardmuon {__version__}"]
