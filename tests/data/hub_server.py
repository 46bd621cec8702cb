"""A small Hugging Face Hub on this machine: datasets to download, and uploads that it keeps."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_right"
SHA = "0" * 40


class Hub:
    """The server's content and what it was sent.

    Attributes:
        datasets: bytes by path, by the dataset's name.
        uploads: bytes by path, by the model's name.
        created: the bodies of requests for new repositories.
        requests: method and path of every request.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.datasets: dict[str, dict[str, bytes]] = {}
        self.uploads: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str]] = []

    def reply(self, method: str, path: str, body: bytes, token: str | None) -> tuple[int, Any]:
        """Returns status and JSON value, or bytes, of a reply."""
        self.requests.append((method, path))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "datasets"]:
            files = self.datasets.get("/".join(parts[2:4]))
            if files is None:
                return 404, {"error": "Repository not found"}
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": SHA} for name, content in files.items()
            ]
            if parts[4] == "tree":
                return 200, entries
            return 200, {"id": "/".join(parts[2:4]), "sha": SHA, "siblings": [{"rfilename": name} for name in files]}
        if parts[0] == "datasets" and parts[3] == "resolve":
            content = self.datasets["/".join(parts[1:3])].get("/".join(parts[5:]))
            return (404, {"error": "Entry not found"}) if content is None else (200, content)
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "type": "user", "orgs": []}
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.address}/me/support", "id": "me/support", "name": "me/support"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "preupload" in parts:
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for name in names]
            return 200, {"files": files}
        if "commit" in parts:
            uploaded = self.uploads.setdefault("/".join(parts[2:4]), {})
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.address}/me/support/commit/{SHA}"
            return 200, {"commitUrl": url, "commitOid": SHA, "success": True, "hookOutput": ""}
        return 404, {"error": f"{method} {path} is not known here"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub to which huggingface_hub sends all requests, with an empty cache; nobody is signed in."""
    from huggingface_hub import constants

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(urlsplit(self.path).path)
            status, value = server.hub.reply(self.command, path, body, self.headers.get("Authorization"))
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"')
            self.send_header("X-Repo-Commit", SHA)
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound" if "resolve" in path else "RepoNotFound")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_HEAD = answer

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.hub.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server.hub
    server.shutdown()
    server.server_close()
    thread.join()
