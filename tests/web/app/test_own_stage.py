"""A stage that is one file appears in the status, in the report and on the pages, as those of the package do."""

import html
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.show import show
from posttrain.cli.status import status
from posttrain.loop.config import load_config
from posttrain.loop.loop import Loop
from posttrain.store.workspace import Workspace
from posttrain.web.loop_report import report_page
from posttrain.web.page import render_page

pytestmark = pytest.mark.slow

STAGE = '''
"""Count letters."""

from posttrain.loop.record import StageReport
from posttrain.loop.stage import Stage
from posttrain.report.charts.bars import bars, count_rows
from posttrain.report.section import Section, Table, Text


class CountLetters(Stage):
    name, title, kind, after = "letters", "letters of the labels", "letters", "dataset"

    def run(self, context, out, scratch):
        labels = context.dataset(context.state.dataset).records["completion"].to_pylist()
        return {"letters": sum(map(len, labels)), "labels": len(labels)}

    @classmethod
    def report(cls, record):
        counted = record.artifact(record.state.outputs.get(cls.name))
        if counted is None:
            return StageReport({"letters": None})
        sentence = f"the {counted.meta['labels']} labels have {counted.meta['letters']} letters"
        return StageReport({"letters": counted.meta["letters"]}, [sentence], blocks=[Text("All are `known`.")])

    @classmethod
    def sections(cls, loop):
        counts = [(f"round {each.number}", cls.report(each).values["letters"] or 0) for each in loop.done]
        chart = bars(count_rows(counts), "letters by round")
        table = Table(("round", "letters"), [(name, str(count)) for name, count in counts], name="letters")
        yield Section.of("Letters <b>", "How long labels are.", chart, table)
'''


@pytest.fixture
def root(begun_workspace: Path, small: Any) -> Path:
    folder = Path(shutil.copytree(begun_workspace, small.folder / "workspace", symlinks=True))
    (folder / "my_letters.py").write_text(STAGE)
    small.configure(folder, rounds=1, stages=["my_letters:CountLetters"])
    with Workspace.create(folder) as store:
        Loop(store, load_config(folder)).run()
    return folder


def test_a_stage_of_ones_own_appears_everywhere(
    root: Path, make_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_server(root)
    entry = server.browser("viewer").get("/api/status").json()["rounds"][1]
    assert entry["letters"] > 0
    sentence = f"the 12 labels have {entry['letters']} letters"
    assert entry["sentences"]["letters"] == [sentence]
    shown = f"T{sentence[1:]}."
    viewer = server.browser("viewer")
    pages = {path: html.unescape(viewer.get(path).text) for path in ("/dashboard", "/rounds", "/rounds/letters")}
    assert "letters of the labels" in pages["/dashboard"]
    assert shown in pages["/rounds"]
    assert "All are <code>known</code>." in pages["/rounds"]
    assert 'href="/rounds/letters"' in pages["/rounds"]
    assert "How long labels are." in pages["/rounds/letters"]
    assert '<h2 id="letters-b-title">Letters <b></h2>' in pages["/rounds/letters"]
    assert viewer.get("/rounds/nothing").status_code == 404
    config = load_config(root)
    report = html.unescape(render_page(report_page(server.site.workspace, config)))
    assert shown in report
    assert "letters by round" in report
    status(root)
    show("round 1", root)
    printed = capsys.readouterr().out
    assert f"round 1: {sentence}" in printed
    assert f"  {sentence}" in printed
