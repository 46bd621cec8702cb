"""``hub:OWNER/NAME``: datasets of the Hugging Face Hub, over HTTP from a small Hub on this machine."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hub_server import Hub

from posttrain.data.reading.hub import fetch_hub_dataset
from posttrain.data.reading.reader import read
from posttrain.store.errors import UserError


def parquet_bytes(*texts: str) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(pa.table({"text": list(texts)}), buffer)
    return buffer.getvalue()


@pytest.fixture
def one(hub: Hub) -> Hub:
    """A dataset with one configuration, two splits, and a training split in two files."""
    hub.datasets["me/one"] = {
        "default/train/0001.parquet": parquet_bytes("c"),
        "default/train/0000.parquet": parquet_bytes("a", "b"),
        "default/test/0000.parquet": parquet_bytes("t"),
    }
    return hub


def texts(files: list[Path]) -> list[str]:
    return [text for file in files for table in read(file) for text in table["text"].to_pylist()]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("hub:me/one", "abc"), ("hub:me/one:train", "abc"), ("hub:me/one:test", "t"), ("hub:me/one/default:test", "t")],
)
def test_a_split_is_read_in_the_order_of_its_files(one: Hub, name: str, expected: str) -> None:
    assert texts(fetch_hub_dataset(name)) == list(expected)


def test_only_the_split_is_downloaded(one: Hub) -> None:
    fetch_hub_dataset("hub:me/one:test")
    assert {path for method, path in one.requests if method == "GET" and "/resolve/" in path} == {
        f"/datasets/me/one/resolve/{'0' * 40}/default/test/0000.parquet"
    }


def test_what_was_downloaded_is_read_without_a_network(one: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    before = fetch_hub_dataset("hub:me/one")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_hub_dataset("hub:me/one") == before
    with pytest.raises(UserError, match=r"^hub:me/one:test: the Hub cannot be reached"):
        fetch_hub_dataset("hub:me/one:test")
    with pytest.raises(UserError) as caught:
        fetch_hub_dataset("hub:me/other")
    fix = "check the network, or download its files elsewhere, and name them"
    assert str(caught.value) == f"hub:me/other: the Hub cannot be reached (HF_HUB_OFFLINE is set); {fix}"


def test_a_hub_that_does_not_answer_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    # Its client waits half a minute between its tries.
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with pytest.raises(UserError, match=r"^hub:me/one: the Hub cannot be reached \(.+\); check the network, or "):
        fetch_hub_dataset("hub:me/one")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hub:one", "hub:one: is not the name of a dataset on the Hub; write hub:OWNER/NAME, "),
        ("hub:me/one:a:b", "is not the name of a dataset"),
        ("hub:me/none", "hub:me/none: the Hub has no such dataset, or this token may not use it; check the name, and "),
        ("hub:me/one:dev", "hub:me/one:dev: has no split `dev`; one of test, train"),
        ("hub:me/one/defautl", "has no configuration `defautl`; did you mean `default`?"),
    ],
)
def test_wrong_names_are_one_line(one: Hub, name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        fetch_hub_dataset(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_of_several_configurations_has_to_be_named(hub: Hub) -> None:
    hub.datasets["me/two"] = {f"{name}/train/0.parquet": parquet_bytes(name) for name in ("main", "socratic")}
    with pytest.raises(UserError) as caught:
        fetch_hub_dataset("hub:me/two")
    fix = "name one of them, such as hub:me/two/main:train"
    assert str(caught.value) == f"hub:me/two: has the configurations main, socratic; {fix}"
    assert texts(fetch_hub_dataset("hub:me/two/socratic")) == ["socratic"]
