"""The labelling page's code and commands work, and its tables match the code."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import select

from posttrain.cli import label
from posttrain.cli.main import main
from posttrain.label.answer_kinds import KINDS
from posttrain.label.config import LabelConfig
from posttrain.label.formats.exporter import DATASETS
from posttrain.label.quality.config import VALUE_NAMES
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem, QueueConfig
from posttrain.label.webhook import note_batches
from posttrain.loop.config import load_config
from posttrain.store.label_tables import label_events
from posttrain.store.workspace import Workspace
from posttrain.web.quality_report import _FINDINGS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "labelling.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def table_names(heading: str) -> list[str]:
    """The names in code in the first column of the table under this heading."""
    table = PAGE.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return [name for row in table.splitlines()[2:] for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]


def test_every_config_on_the_page_is_right(small: Any) -> None:
    sections = [yaml.safe_load(block) for block in blocks("yaml")]
    assert [set(section) for section in sections] == [{"task"}, {"label"}, {"label"}, {"triggers"}]
    for section in sections:
        # The head needs a sentence model that is not installed everywhere: the file is read, and no model looked up.
        LabelConfig.read(section.get("label", {}), "posttrain.yaml")
    assert load_config(small(task=sections[0]["task"], triggers=sections[3]["triggers"])).triggers.names >= {
        "label.alpha",
        "label.alarms",
    }
    assert set(re.findall(r"`(label\.\w+)`", PAGE)) >= set(VALUE_NAMES)
    (settings,) = re.findall(r"`label\.queue: ({.*?})`", PAGE)
    QueueConfig.read(yaml.safe_load(settings), "posttrain.yaml")


def test_the_tables_name_every_setting_alarm_format_and_kind() -> None:
    assert table_names("key") == list(QueueConfig.model_fields)
    assert set(table_names("alarm")) == set(_FINDINGS)
    assert set(table_names("`--format`")) == {*label._FORMATS, DATASETS}
    assert set(table_names("Kind")) == set(KINDS)


def test_the_batch_goes_out_and_comes_back_and_others_come_in(
    small: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = small(label={"annotator": "people"})
    monkeypatch.chdir(root)
    monkeypatch.setattr(label, "waiting_round", lambda store: 1)
    with Workspace.create(root) as store:
        queue = Queue(store.metadata)
        queue.add_batch("round-1", "choice", [NewItem("r", {"text": "?"})], labels=small.labels, round=1)
        # Newer than the round's batch, and yet not the one that is to be labelled.
        queue.add_batch("tickets", "text", [NewItem("t", {"text": "hello"})])
    (root / "old-labels.jsonl").write_text('{"text": "an old one", "label": "card"}\n')
    (commands,) = blocks("bash")
    for line in commands.splitlines():
        with pytest.raises(SystemExit, match=r"^0$"):
            main(shlex.split(line, comments=True)[1:])
    assert capsys.readouterr().out.splitlines() == [
        "wrote 1 item of the batch round-1 to tasks.json",
        "wrote 1 item of the batch tickets to tickets.csv",
        "read 1 item, 0 answers into the batch round-1 (label-studio, choice)",
        "read 1 item, 1 answer into the new batch old (jsonl, choice)",
        "labels that join the training set with the next run: 1; they are in data/labelled/batch-old.jsonl, "
        "and nobody is asked for them again",
        "the batch old is closed",
    ]


def test_the_webhook_is_sent_what_the_page_shows(tmp_path: Path) -> None:
    (body,) = map(json.loads, blocks("json"))
    with Workspace.create(tmp_path) as store:
        Queue(store.metadata).add_batch("round-3", "choice", [NewItem("r", {"text": "?"})], labels=["a", "b"], round=3)
        note_batches(store.metadata)
        with store.metadata.reading() as connection:
            ((event, detail),) = connection.execute(select(label_events.c.event, label_events.c.detail)).all()
    assert (event, list(detail["batch"])) == (body["event"], list(body["batch"]))


def test_the_plan_of_a_team_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (code,) = [block for block in blocks("python") if "plan_labels" in block]
    exec(code, {})  # noqa: S102
    assert re.fullmatch(r"[\d,]+ labels per day at \d+\.\d\d each, \d+\.\d% of them wrong\n", capsys.readouterr().out)
