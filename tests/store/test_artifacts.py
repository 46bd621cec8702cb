"""A local folder, S3 and the memory of fsspec pass the contract of artifact stores."""

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from posttrain.store.artifacts import MANIFEST, ArtifactStore
from posttrain.store.errors import UserError, WorkError
from posttrain.store.workspace import open_artifacts
from posttrain.testing.stores import CONTENT, ArtifactStoreContract, Reopen, commit, read


class TestLocalArtifacts(ArtifactStoreContract):
    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Reopen:
        return lambda: open_artifacts(None, tmp_path / "home")

    def names(self, store: Any) -> set[str]:
        return {path.relative_to(store.root).as_posix() for path in store.root.rglob("*") if path.is_file()}

    def read_raw(self, store: Any, name: str) -> bytes:
        return bytes((store.root / name).read_bytes())

    def write_raw(self, store: Any, name: str, content: bytes) -> None:
        (store.root / name).unlink(missing_ok=True)  # an artifact's files are read-only
        (store.root / name).write_bytes(content)

    def remove_raw(self, store: Any, name: str) -> None:
        (store.root / name).unlink()

    def test_checksums_are_read_once_per_process(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        artifact = commit(store)
        second_store = type(store)(store.root, store.root.parent / "tmp")
        second_store.path(artifact.id)
        monkeypatch.setattr("posttrain.store.artifacts.file_digest", lambda path: pytest.fail("read again"))
        assert second_store.path(artifact.id) == store.path(artifact.id)

    def test_files_are_read_only(self, store: Any) -> None:
        artifact = commit(store)
        for name in (MANIFEST, *CONTENT):
            assert (store.root / artifact.id / name).stat().st_mode & 0o777 == 0o444
        store.delete(artifact.id)
        assert store.ids() == []

    def test_commit_moves_and_copies_nothing(self, store: Any) -> None:
        with store.temporary_folder() as folder:
            (folder / "a").write_bytes(b"1")
            inode = (folder / "a").stat().st_ino
            artifact = store.commit(folder, "model", {})
        assert (store.path(artifact.id) / "a").stat().st_ino == inode

    def test_files_are_synced_before_the_artifact_is_visible(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A power cut loses nothing: every file and folder is synced, then the rename, then the root."""
        rename, events = os.rename, []

        def record_rename(source: Path, target: Path) -> None:
            events.append(0)
            rename(source, target)

        monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_ino))
        monkeypatch.setattr(os, "rename", record_rename)
        with store.temporary_folder() as folder:
            events.clear()
            for name, data in CONTENT.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
            artifact = store.commit(folder, "model", {})
        folder = store.path(artifact.id)
        inside = {path.stat().st_ino for path in (folder, *folder.rglob("*"))}
        assert len(inside) == 3 + len(CONTENT) + 1
        assert set(events[: events.index(0)]) == inside
        assert events[-2:] == [0, store.root.stat().st_ino]

    def test_a_store_on_another_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A store that links to another file system stages there, as a rename cannot cross file systems."""
        home = tmp_path / "home"
        home.mkdir()
        (home / "artifacts").symlink_to(Path(os.environ.get("POSTTRAIN_TEST_DISK", "/dev/shm")) / uuid.uuid4().hex)
        target = (home / "artifacts").readlink()
        target.mkdir()
        try:
            store = open_artifacts(None, home)
            artifact = commit(store)
            assert read(store.path(artifact.id)) == CONTENT
            assert store.ids() == [artifact.id]
            assert list((target / ".tmp").iterdir()) == []
        finally:
            for path in sorted(target.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            target.rmdir()


class TestFileUrl(TestLocalArtifacts):
    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Reopen:
        return lambda: open_artifacts(f"file://{tmp_path}/shared", tmp_path / "home")


class RemoteContract(ArtifactStoreContract):
    url: str

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Reopen:
        return lambda: open_artifacts(self.url, tmp_path / "home")

    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> Reopen:
        return lambda: open_artifacts(self.url, tmp_path / uuid.uuid4().hex)

    @property
    def files(self) -> Any:
        return fsspec.filesystem(self.url.partition(":")[0], use_listings_cache=False)

    def names(self, store: ArtifactStore) -> set[str]:
        root = self.files._strip_protocol(self.url)
        return {name.removeprefix(f"{root}/") for name in self.files.find(self.url)}

    def read_raw(self, store: ArtifactStore, name: str) -> bytes:
        return bytes(self.files.cat_file(f"{self.url}/{name}"))

    def write_raw(self, store: ArtifactStore, name: str, content: bytes) -> None:
        self.files.pipe_file(f"{self.url}/{name}", content)

    def remove_raw(self, store: ArtifactStore, name: str) -> None:
        self.files.rm_file(f"{self.url}/{name}")

    def test_manifest_is_the_commit_mark(self, store: ArtifactStore, elsewhere: Reopen) -> None:
        """An upload cut short anywhere leaves nothing visible and is finished by the next."""
        artifact = commit(store)
        self.remove_raw(store, f"{artifact.id}/{MANIFEST}")
        for name in (None, *sorted(CONTENT)):
            if name:
                self.remove_raw(store, f"{artifact.id}/{name}")
            assert elsewhere().ids() == []
            assert not elsewhere().exists(artifact.id)
        commit(elsewhere())
        assert elsewhere().verify(artifact.id) == []

    def test_manifest_is_uploaded_last(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        original_put, uploads = store._files.put_file, []

        def record_upload(source: str, target: str, **options: Any) -> None:
            uploads.append(Path(target).name)
            assert self.names(store).isdisjoint({f"{Path(target).parent.name}/{MANIFEST}"})
            original_put(source, target, **options)

        monkeypatch.setattr(store._files, "put_file", record_upload)
        commit(store)
        assert len(uploads) == len(CONTENT) + 1
        assert uploads[-1] == MANIFEST
        commit(store)
        assert len(uploads) == len(CONTENT) + 1  # the same content is not uploaded again

    def test_damaged_copy_is_downloaded_again(self, store: ArtifactStore, reopen: Reopen) -> None:
        artifact = commit(store)
        (store.path(artifact.id) / "weights.bin").write_bytes(b"0")
        assert read(reopen().path(artifact.id)) == CONTENT


@pytest.mark.slow
class TestS3Artifacts(RemoteContract):
    @pytest.fixture(autouse=True)
    def _bucket(self, s3_url: str) -> None:
        self.url = s3_url

    def test_a_missing_bucket_raises(self, s3_url: str, tmp_path: Path) -> None:
        store = open_artifacts("s3://no-such-bucket/artifacts", tmp_path)
        with pytest.raises(UserError, match="no-such-bucket"):
            commit(store)

    def test_an_unreachable_server_raises(self, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        store = open_artifacts(s3_url, tmp_path)
        for call in (store.ids, lambda: commit(store), lambda: store.get("model-0123456789abcdef")):
            with pytest.raises(WorkError, match="cannot be reached"):
                call()
        fsspec.get_filesystem_class("s3").clear_instance_cache()


class TestMemoryArtifacts(RemoteContract):
    @pytest.fixture(autouse=True)
    def _folder(self) -> Iterator[None]:
        self.url = f"memory://{uuid.uuid4().hex}/artifacts"
        yield
        fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://bucket/x", "`nowhere://` is not known"),
        ("bucket/x", "not an artifact URL"),
        ("s3://", "not an artifact URL"),
        ("file://", "not an artifact URL"),
        ("no_such_module:Store", "cannot import `no_such_module`"),
        ("json:JSONEncoder://bucket", "`json:JSONEncoder` is not an artifact store; derive it from posttrain"),
    ],
)
def test_an_invalid_url_raises(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        open_artifacts(url, tmp_path)
    assert error.value.where == "store.artifacts"


def test_a_missing_extra_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(UserError, match=r"pip install s3fs"):
        open_artifacts("s3://bucket", tmp_path)
