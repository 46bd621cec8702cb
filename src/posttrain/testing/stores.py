"""The contract of artifact stores, as a test class to inherit from.

class TestMyStore(ArtifactStoreContract):
    @pytest.fixture
    def reopen(self, tmp_path):
        return lambda: MyStore(tmp_path)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.store.artifacts import MANIFEST, Artifact, ArtifactStore
from posttrain.store.errors import DamagedArtifactError

CONTENT = {"weights.bin": bytes(range(256)) * 40, "config.json": b"{}", "deep/er/empty.txt": b""}

Reopen = Callable[[], ArtifactStore]


def commit(store: ArtifactStore, content: dict[str, bytes] = CONTENT, kind: str = "model", **meta: Any) -> Artifact:
    """Commits files by their names below the artifact's folder."""
    with store.temporary_folder() as folder:
        for name, data in content.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return store.commit(folder, kind, meta)


def read(folder: Path) -> dict[str, bytes]:
    """Reads all files of an artifact's folder but its manifest."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


class ArtifactStoreContract:
    """Tests what every artifact store promises; inherit and define the fixture ``reopen`` and the four raw accesses.

    An artifact is committed whole or not at all, equal content has one id, and damage is detected and named. ``reopen``
    returns the store as a new process sees it; the raw accesses list, read, overwrite and remove files behind its back.
    """

    # Not `abstractmethod`: pytest skips an abstract class in silence, and a contract that never ran would look passed.
    def names(self, store: ArtifactStore) -> set[str]:
        """Lists every file in the store, by its name below the root."""
        raise NotImplementedError

    def read_raw(self, store: ArtifactStore, name: str) -> bytes:
        """Reads a file of the store, by its name below the root."""
        raise NotImplementedError

    def write_raw(self, store: ArtifactStore, name: str, content: bytes) -> None:
        """Overwrites or adds a file of the store, by its name below the root."""
        raise NotImplementedError

    def remove_raw(self, store: ArtifactStore, name: str) -> None:
        """Removes a file of the store, by its name below the root."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, reopen: Reopen) -> ArtifactStore:
        """Returns the store, opened."""
        return reopen()

    @pytest.fixture
    def elsewhere(self, reopen: Reopen) -> Reopen:
        """Returns a function that opens the store as another machine sees it, without this one's local copies."""
        return reopen

    def test_what_is_committed_can_be_read(self, store: ArtifactStore, elsewhere: Reopen) -> None:
        artifact = commit(store, rank=8)
        assert (artifact.kind, artifact.meta, artifact.size) == ("model", {"rank": 8}, 10242)
        for view in (store, elsewhere()):
            assert view.exists(artifact.id)
            assert view.get(artifact.id) == artifact
            assert read(view.path(artifact.id)) == CONTENT
            assert view.ids() == [artifact.id]
            assert view.verify(artifact.id) == []
            assert view.verify_sizes(artifact.id) == []

    def test_id_is_fixed_for_all_time(self, store: ArtifactStore) -> None:
        assert commit(store, {"a": b"1"}, kind="dataset", n=1).id == "dataset-0f12681084ea85f8"

    def test_only_content_decides_the_id(self, store: ArtifactStore, reopen: Reopen) -> None:
        first = commit(store, rank=8)
        assert commit(reopen(), dict(reversed(CONTENT.items())), rank=8) == first
        others = [
            commit(store, rank=9),
            commit(store, kind="dataset", rank=8),
            commit(store, {**CONTENT, "config.json": b"[]"}, rank=8),
            commit(store, {name.replace("config", "other"): data for name, data in CONTENT.items()}, rank=8),
        ]
        assert store.ids() == sorted({first.id, *(other.id for other in others)})
        assert len(store.ids()) == 5

    def test_nothing_is_left_of_an_uncommitted_folder(self, store: ArtifactStore) -> None:
        folders = []

        def fail() -> None:
            with store.temporary_folder() as folder:
                folders.append(folder)
                (folder / "half").write_bytes(b"x")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert not folders[0].exists()
        assert self.names(store) == set()

    def test_empty_store(self, store: ArtifactStore) -> None:
        assert store.ids() == []
        assert not store.exists("model-0123456789abcdef")
        for lookup in (store.get, store.path):
            with pytest.raises(DamagedArtifactError, match="model-0123456789abcdef is missing"):
                lookup("model-0123456789abcdef")
        assert len(store.verify("model-0123456789abcdef")) == 1
        store.delete("model-0123456789abcdef")

    @pytest.mark.parametrize("id", ["", ".", "..", "../secret", "model-x/../../y", "/etc", "model-0123456789abcdef/a"])
    def test_no_id_leads_out_of_the_store(self, store: ArtifactStore, id: str) -> None:
        assert not store.exists(id)
        store.delete(id)
        with pytest.raises(DamagedArtifactError):
            store.path(id)

    @pytest.mark.parametrize(
        ("damage", "name"),
        list(zip(["flip", "truncate", "grow", "remove"], [*sorted(CONTENT), "weights.bin"], strict=True)),
    )
    def test_damage_is_detected_named_and_repaired(
        self, store: ArtifactStore, elsewhere: Reopen, name: str, damage: str
    ) -> None:
        artifact = commit(store)
        file = f"{artifact.id}/{name}"
        content = self.read_raw(store, file)
        if damage == "remove":
            self.remove_raw(store, file)
        else:
            changed = {"flip": bytes([content[0] ^ 1]) + content[1:] if content else b"\0"}
            changed |= {"truncate": content[:-1] or b"\0", "grow": content + b"\0"}
            self.write_raw(store, file, changed[damage])
        view = elsewhere()
        (problem,) = view.verify(artifact.id)
        assert problem.startswith(f"{name} ")
        # An empty file has no byte to flip: it grows.
        if damage != "flip" or not content:
            assert view.verify_sizes(artifact.id) == [problem]
        with pytest.raises(DamagedArtifactError, match=f"{artifact.id} is damaged: {name}"):
            view.path(artifact.id)
        assert commit(view).id == artifact.id
        assert elsewhere().verify(artifact.id) == []
        assert read(elsewhere().path(artifact.id)) == CONTENT

    @pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe"])
    def test_damaged_manifest(self, store: ArtifactStore, elsewhere: Reopen, content: bytes) -> None:
        artifact = commit(store)
        self.write_raw(store, f"{artifact.id}/{MANIFEST}", content)
        for lookup in (elsewhere().get, elsewhere().path):
            with pytest.raises(DamagedArtifactError, match=MANIFEST):
                lookup(artifact.id)
        assert elsewhere().verify(artifact.id)
        commit(elsewhere())
        assert elsewhere().verify(artifact.id) == []

    def test_manifest_of_something_else(self, store: ArtifactStore, elsewhere: Reopen) -> None:
        first, other = commit(store, rank=1), commit(store, rank=2)
        self.write_raw(store, f"{first.id}/{MANIFEST}", self.read_raw(store, f"{other.id}/{MANIFEST}"))
        with pytest.raises(DamagedArtifactError, match=MANIFEST):
            elsewhere().path(first.id)

    def test_foreign_file_is_named(self, store: ArtifactStore, elsewhere: Reopen) -> None:
        artifact = commit(store)
        self.write_raw(store, f"{artifact.id}/adapter_config.json", b"{}")
        assert elsewhere().verify(artifact.id) == ["adapter_config.json does not belong to it"]

    def test_delete(self, store: ArtifactStore, reopen: Reopen) -> None:
        remaining, artifact = commit(store, rank=1), commit(store, rank=2)
        store.delete(artifact.id)
        for view in (store, reopen()):
            assert view.ids() == [remaining.id]
            with pytest.raises(DamagedArtifactError, match="missing"):
                view.path(artifact.id)
        assert not any(name.startswith(artifact.id) for name in self.names(store))
        assert commit(store, rank=2) == artifact

    def test_links_are_refused(self, store: ArtifactStore, tmp_path: Path) -> None:
        for target in (tmp_path / "nothing", Path("/etc/hostname"), tmp_path):
            with store.temporary_folder() as folder:
                (folder / "link").symlink_to(target)
                with pytest.raises(ValueError, match="link"):
                    store.commit(folder, "model", {})
        assert store.ids() == []

    def test_bad_kind_name_and_meta(self, store: ArtifactStore) -> None:
        with store.temporary_folder() as folder, pytest.raises(ValueError, match="kind"):
            store.commit(folder, "a/b", {})
        with pytest.raises(ValueError, match=MANIFEST):
            commit(store, {MANIFEST: b"{}"})
        with pytest.raises(TypeError, match="object"):
            commit(store, value=object())
        assert self.names(store) == set()
