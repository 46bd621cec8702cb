"""Caches every reply of a model on disk, so that resumed work does not pay for it twice."""

import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.store.errors import WorkError
from posttrain.store.files import disk_errors, make_folder
from posttrain.store.hashing import digest, encode_line, read_lines

Turns = Sequence[Mapping[str, str]]
"""A conversation, as in ``[{"role": "user", "content": "..."}]``."""
Generate = Callable[[Sequence[Turns]], Sequence[str | None]]
"""Returns one reply a prompt, in order; None if it is unusable."""


class ReplyCache:
    """Stores replies by the digest of the request, in a folder of append-only files.

    Each process has a file of its own, so that several can work in one folder; it sees the replies that others wrote
    before it started.
    """

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self._path = folder / f"{os.getpid()}-{uuid.uuid4().hex}.jsonl"
        self._known: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        for path in sorted(folder.glob("*.jsonl")):
            for value in read_lines(path.read_bytes()).values:
                # The first reply wins, so that a rerun reads what an earlier run used.
                self._known.setdefault(value["key"], value)

    def get(self, key: str) -> dict[str, Any] | None:
        """Returns the value that `put` has stored under the key."""
        return self._known.get(key)

    def values(self) -> list[dict[str, Any]]:
        """Returns all stored values."""
        return list(self._known.values())

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Stores a reply; it is on the disk afterwards.

        Raises:
            UserError: the disk refused.
        """
        line = encode_line({"key": key, **value})
        with self._lock, disk_errors(self._path), self._path.open("ab") as file:
            file.write(line)
            # Synced before it is returned: a reply that was paid for must survive a kill.
            file.flush()
            os.fsync(file.fileno())
        self._known[key] = value


def request_keys(requests: Sequence[Any], earlier: Counter[str]) -> list[str]:
    """Builds a key for each request; equal requests are numbered, as each may get a reply of its own.

    Args:
        requests: JSON values.
        earlier: number of earlier equal requests; updated in place.
    """
    keys = []
    for request in requests:
        # A repeated prompt requests another sample, so its key includes the number of earlier requests.
        name = digest(request)
        keys.append(digest([name, earlier[name]]))
        earlier[name] += 1
    return keys


class CachedGenerate:
    """Wraps a `Generate`, and queries it only for replies that are not cached."""

    def __init__(
        self, generate: Generate, model: str, replies: ReplyCache, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._generate, self._replies = generate, replies
        self._request = {"model": model, **(settings or {})}
        self._earlier: Counter[str] = Counter()

    def __call__(self, prompts: Sequence[Turns]) -> list[str | None]:
        plain = [[dict(turn) for turn in prompt] for prompt in prompts]
        names = request_keys([{**self._request, "prompt": prompt} for prompt in plain], self._earlier)
        new = [at for at, name in enumerate(names) if self._replies.get(name) is None]
        if new:
            replies = self._generate([prompts[at] for at in new])
            # A wrong number of replies would pair prompts with others' answers.
            if len(replies) != len(new):
                raise WorkError(f"the model gave {len(replies)} replies to {len(new)} prompts")
            for at, reply in zip(new, replies, strict=True):
                self._replies.put(names[at], {"prompt": plain[at], "reply": reply})
        entries = [self._replies.get(name) for name in names]
        return [entry["reply"] if entry else None for entry in entries]
