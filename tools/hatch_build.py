"""Records the commit in wheels and source archives, for ``posttrain --version``."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the file ``posttrain/COMMIT`` to what is built from a checkout."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Writes the commit's hash; an editable installation reads it from the checkout itself."""
        # A source archive has no repository, and brings the file along.
        if version == "editable" or not (Path(self.root) / ".git").exists():
            return
        command = ["git", "-C", self.root, "rev-parse", "--short=12", "HEAD"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:  # no git
            return
        if result.returncode == 0:
            self._folder = tempfile.TemporaryDirectory()
            file = Path(self._folder.name) / "COMMIT"
            file.write_text(result.stdout, encoding="ascii")
            folder = "src/posttrain" if self.target_name == "sdist" else "posttrain"
            build_data["force_include"][str(file)] = f"{folder}/COMMIT"
