"""The commands that add packages name what works in each kind of installation."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from posttrain.store import installation
from posttrain.store.installation import file_system_hint, install_command, installed_commit, version_text


@pytest.mark.parametrize(
    ("prefix", "uv", "command", "without_dependencies"),
    [
        ("venv", False, "{python} -m pip install s3fs", "{python} -m pip install --no-deps s3fs"),
        ("venv", True, "uv pip install s3fs", "uv pip install --python {python} --no-deps s3fs"),
        ("pipx/venvs/posttrain", False, "pipx inject posttrain s3fs", "pipx runpip posttrain install --no-deps s3fs"),
        ("uv/tools/posttrain", True, "uv tool install --with s3fs", "uv pip install --python {python} --no-deps s3fs"),
        ("uv/archive-v0/abc", True, "uvx --with s3fs", "make an environment that stays (uv venv)"),
    ],
)
def test_each_kind_of_installation_has_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, uv: bool, command: str, without_dependencies: str
) -> None:
    folder = tmp_path / prefix
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("home = /usr\n" + "uv = 0.9\n" * uv)
    python = folder / "bin" / "python"
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setattr(sys, "executable", str(python))
    assert install_command("s3fs").startswith(command.format(python=python))
    assert install_command("s3fs", dependencies=False).startswith(without_dependencies.format(python=python))


def test_pip_is_named_alone_where_the_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = tmp_path / "pip"
    pip.write_text("")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    # Brackets and comparisons mean something to the shell.
    assert install_command("psycopg[binary]", "x>=2", "y-z") == "pip install 'psycopg[binary]' 'x>=2' y-z"
    assert file_system_hint("s3") == "pip install s3fs"
    assert file_system_hint("odd") == "install the fsspec package for odd"


def test_the_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "posttrain"
    package.mkdir(parents=True)
    (package / "a.py").write_text("1\n")

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr(installation, "_PACKAGE", package)
    commit = git("rev-parse", "--short=12", "HEAD")
    assert installed_commit() == commit
    (package / "a.py").write_text("2\n")
    assert installed_commit() == f"{commit}+changes"
    monkeypatch.setenv("PATH", "")
    assert installed_commit() is None, "without git"


def test_the_commit_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        text: str | None = None

        def read_text(self, name: str) -> str | None:
            return self.text if name == "direct_url.json" else None

    distribution = Distribution()
    monkeypatch.setattr(installation, "_PACKAGE", tmp_path / "site-packages" / "posttrain")
    monkeypatch.setattr(installation, "COMMIT_FILE", tmp_path / "COMMIT")
    monkeypatch.setattr(metadata, "distribution", lambda name: distribution)
    for text in (None, "{}", "nothing", '{"vcs_info": 3}'):
        distribution.text = text
        assert installed_commit() is None
        assert version_text() == installation.__version__
    origin: Any = {"url": "https://a/b", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef0123"}}
    distribution.text = json.dumps(origin)
    assert installed_commit() == "0123456789ab"
    (tmp_path / "COMMIT").write_text("fedcba987654\n")
    assert version_text() == f"{installation.__version__} (fedcba987654)"
