"""Records come from plain, compressed and remote files alike; a path that is not a file raises."""

import gzip
import os
import socket
from pathlib import Path

import pyarrow as pa
import pytest

from posttrain.data.reading import data_files
from posttrain.data.reading.data_files import Url, display_path, expand_paths
from posttrain.data.reading.reader import check_file, read
from posttrain.data.records.record import concat
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow

CONTENTS = {
    "a.jsonl": b"".join(b'{"text": "text %d"}\n' % number for number in range(4_000)),
    "a.json": b"[" + b",\n".join(b'{"text": "text %d"}' % number for number in range(4_000)) + b"]",
    "a.csv": b"text\n" + b"".join(b"text %d\n" % number for number in range(4_000)),
    "a.tsv": b"text\n" + b"".join(b"text %d\n" % number for number in range(4_000)),
}


def compress(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content, 1)
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


def read_error(path: Path, name: str | None = None) -> str:
    with pytest.raises(UserError) as error:
        list(read(path, name=name or path.name))
    assert "\n" not in str(error.value)
    assert str(check_file(path, name=name or path.name)[0].error()) == str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("name", "suffix"), list(zip(CONTENTS, [".gz", ".zst", ".zst", ".gz"], strict=True)))
def test_compressed_files_give_the_records_of_plain_ones(tmp_path: Path, name: str, suffix: str) -> None:
    content = CONTENTS[name]
    middle = content.index(b"\n", len(content) // 2) + 1
    (tmp_path / name).write_bytes(content)
    members = compress(content[:middle], suffix) + compress(content[middle:], suffix)
    (tmp_path / (name + suffix)).write_bytes(members)
    plain = concat(list(read(tmp_path / name, name="x")))
    assert concat(list(read(tmp_path / (name + suffix), name="x"))).equals(plain)
    assert plain.num_rows == 4_000


@pytest.mark.parametrize(("name", "suffix"), [("a.jsonl", ".zst"), ("a.csv", ".gz")])
def test_a_truncated_file_is_one_problem_with_its_last_line(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / (name + suffix)
    content = compress(CONTENTS[name], suffix)
    path.write_bytes(content[: len(content) // 2])
    problems = check_file(path, name=path.name)
    assert [problem.kind for problem in problems] == ["damaged file"]
    assert problems[0].message == "the compressed data ends too early"
    assert problems[0].line in range(1, 4_000)
    path.write_bytes(content[:-2])
    assert read_error(path).startswith(f"{path.name}:")
    assert "ends too early" in read_error(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv.gz", "a.json.gz", "a.json.zst"])
def test_an_uncompressed_file_with_a_compressed_suffix_raises(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"text": "not compressed at all"}\n')
    assert "is not compressed as its name says, or damaged" in read_error(tmp_path / name)
    (tmp_path / name).write_bytes(b"")
    assert read_error(tmp_path / name).startswith(f"{name}: the file holds no records")


def test_flipped_bytes_inside_gzip_raise(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    content = bytearray(compress(CONTENTS["a.jsonl"], ".gz"))
    content[-8:-4] = b"\0\0\0\0"
    path.write_bytes(bytes(content))
    assert "is not compressed as its name says, or damaged" in read_error(path)


def test_compressed_parquet_raises(tmp_path: Path) -> None:
    (tmp_path / "a.parquet.gz").write_bytes(b"x")
    assert "decompress it" in read_error(tmp_path / "a.parquet.gz")


def test_globs_are_sorted_and_each_file_comes_once(tmp_path: Path) -> None:
    (tmp_path / "data" / "inner").mkdir(parents=True)
    for name in ("data/b.jsonl", "data/a.jsonl", "data/c.csv", "data/inner/d.jsonl", "data/[x].jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')

    def expand(*names: str) -> list[str]:
        return [display_path(path, tmp_path) for path in expand_paths(names, tmp_path)]

    assert expand("data/*.jsonl") == ["data/[x].jsonl", "data/a.jsonl", "data/b.jsonl"]
    assert expand("data/b.jsonl", "data/*.jsonl")[0] == "data/b.jsonl"
    assert len(expand("data/b.jsonl", "data/*.jsonl")) == 3
    assert expand("data/**/*.jsonl")[-1] == "data/inner/d.jsonl"
    assert expand("data/[x].jsonl") == ["data/[x].jsonl"]
    assert expand("missing.jsonl") == ["missing.jsonl"]
    assert expand(str(tmp_path / "data" / "*.csv")) == ["data/c.csv"]
    with pytest.raises(UserError, match=r"^data/\*\.parquet: no file matches; check the pattern$"):
        expand_paths(["data/*.parquet"], tmp_path)


def test_a_glob_finds_saved_datasets_and_no_other_folders(tmp_path: Path) -> None:
    for name in ("saved", "other"):
        (tmp_path / "data" / name).mkdir(parents=True)
    (tmp_path / "data" / "saved" / "state.json").write_text("{}")
    assert [path.name for path in expand_paths(["data/*"], tmp_path)] == ["saved"]


def test_a_path_that_is_no_file_raises_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert read_error(tmp_path / "pipe.jsonl").startswith("pipe.jsonl: is a pipe, a socket or a device, not a file")
    assert "not a file" in read_error(Path("/dev/zero"), "zero.jsonl")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.jsonl"))
        assert "not a file" in read_error(tmp_path / "s.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    assert read_error(tmp_path / "folder.jsonl").startswith("folder.jsonl: the folder holds no .arrow files")
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    assert read_error(tmp_path / "link.jsonl").startswith("link.jsonl: is a link to a file that is not there")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    assert "cannot be read" in read_error(tmp_path / "loop.jsonl")
    assert "cannot be read" in read_error(Path("a\0b.jsonl"), "a.jsonl")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz", "a.jsonl.zst"])
def test_an_unreadable_file_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_text("x")

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    assert read_error(tmp_path / name) == f"{name}: cannot be read: Permission denied"


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz"])
def test_a_line_longer_than_the_limit_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in ("data_files", "json_rows", "formats"):
        monkeypatch.setattr(f"posttrain.data.reading.{module}.MAX_LINE_BYTES", 1000)
    start, line = (b"text\n", b"%s\n") if name == "a.csv" else (b"", b'{"text": "%s"}\n')
    content = start + line % b"a" + line % (b"b" * 5000) + line % b"c"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read_error(tmp_path / name).startswith(f"{name}:{3 if start else 2}: ")
    assert "is longer than 1,000 bytes, the most that is read" in read_error(tmp_path / name)
    if not start:
        assert [problem.line for problem in check_file(tmp_path / name)] == [2]


def test_lines_of_a_range_equal_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(CONTENTS["a.jsonl"][:-1])
    with path.open("rb") as file:
        lines = list(data_files.read_lines(file, "a"))
    boundary = sum(map(len, lines[:7]))
    assert list(data_files.read_line_range(path, 0, boundary)) == lines[:7]
    assert list(data_files.read_line_range(path, boundary, path.stat().st_size)) == lines[7:]
    monkeypatch.setattr(data_files, "MAX_LINE_BYTES", 5)
    assert [line[:6] for line in lines[:7]] == list(data_files.read_line_range(path, 0, boundary))


@pytest.fixture(scope="module")
def bucket(s3_server: str) -> str:
    """A bucket with files."""
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="records")
    table = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table({"text": ["a", "b"]}), table)
    for key, content in {
        "in/b.jsonl": b'{"text": "a"}\n{"text": "b"}\n',
        "in/a.jsonl.gz": gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'),
        "in/a.parquet": bytes(table.getvalue()),
        "in/cut.csv.gz": gzip.compress(b"text\n" + os.urandom(100).hex().encode())[:-30],
    }.items():
        client.put_object(Bucket="records", Key=key, Body=content)
    return "s3://records"


def test_records_are_read_from_a_url(bucket: str, tmp_path: Path) -> None:
    names = [str(path) for path in expand_paths([f"{bucket}/in/*.jsonl*", f"{bucket}/in/a.parquet"], tmp_path)]
    assert names == [f"{bucket}/in/a.jsonl.gz", f"{bucket}/in/b.jsonl", f"{bucket}/in/a.parquet"]
    texts = [concat(list(read(name)))["text"].to_pylist() for name in names]
    assert texts == [["a", "b"]] * 3
    assert concat(list(read(names[0])))["source"].to_pylist() == [names[0]] * 2


def test_problems_behind_a_url_raise(bucket: str, tmp_path: Path) -> None:
    for name, message in {
        f"{bucket}/in/none.jsonl": "there is no such file",
        f"{bucket}/in/cut.csv.gz": "the compressed data ends too early",
        "s3://no-such-bucket/a.jsonl": "there is no such file",
        "nothing://a/b.jsonl": "nothing installed reads nothing://",
        "zip://a.jsonl::file:///a.jsonl": "chained URLs are not read",
    }.items():
        with pytest.raises(UserError, match=message) as error:
            list(read(Url(name)))
        assert str(error.value).startswith(name)
    for name in (f"{bucket}/out/*.jsonl", "nothing://a/*.jsonl"):
        with pytest.raises(UserError, match=r"no file matches|nothing installed"):
            expand_paths([name], tmp_path)
