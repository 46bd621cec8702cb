"""Every verb does its work, exits with the right code, and prints valid JSON."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml

from posttrain import __version__
from posttrain.store.workspace import Workspace

pytestmark = pytest.mark.slow

Call = Callable[..., Any]


@pytest.fixture
def root(finished_copy: Path) -> Path:
    """A copy of a workspace after two rounds."""
    return finished_copy


def test_run_does_the_remaining_rounds(root: Path, posttrain: Call) -> None:
    again = posttrain("run", "-w", root)
    assert (again.code, again.err) == (0, "2 of 2 rounds are done; raise `rounds` for more\n")
    assert posttrain("run", "-w", root, "--rounds", "3", "--until", "score").code == 0
    rest = posttrain("run", "--workspace", root, "--rounds", "3")
    assert rest.code == 0
    assert [line.split()[0] for line in rest.out.splitlines()] == ["round", "0", "1", "2", "3", "next:"]
    assert "round 3" in rest.err.splitlines()
    assert len(posttrain("status", "-w", root, "--json").json["rounds"]) == 4


def test_a_run_that_waits_exits_with_0_and_one_line(small: Any, posttrain: Call) -> None:
    root = small(label={"annotator": "people"})
    outcome = posttrain("run", "-w", root)
    assert outcome.code == 0
    line = (
        f"waiting for labels for round 1: fill the label column of {root}/labels/round-1.csv (12 records) "
        f"or answer on the pages (posttrain label serve -w {root}), then run again"
    )
    assert outcome.out.splitlines()[-1] == line
    assert posttrain("status", "-w", root).out.splitlines()[-1] == line


def test_labels_are_exported_and_imported(small: Any, posttrain: Call, tmp_path: Path) -> None:
    root = small(rounds=1, label={"annotator": "people"})
    posttrain("run", "-w", root)
    batch = tmp_path / "batch.csv"
    assert posttrain("label", "export", batch, "-w", root).out.startswith("wrote 12 records to ")
    truth = {row["text"]: row["label"] for row in small.rows()}
    lines = batch.read_text().splitlines()
    filled_lines = [f"{line}{truth[line.split(',')[1]]}" for line in lines[1:]]
    batch.write_text("\n".join([lines[0], *filled_lines[:4], *lines[5:]]))
    assert posttrain("label", "import", batch, "-w", root).out == "4 of 12 rows are filled in\n"
    batch.write_text("\n".join([lines[0], *filled_lines]))
    assert posttrain("label", "import", batch, "-w", root).out == "12 of 12 rows are filled in; now: posttrain run\n"
    assert posttrain("run", "-w", root).code == 0
    reports = posttrain("label", "report", "-w", root, "--json").json
    assert [(report["round"], report["labels"]) for report in reports["rounds"]] == [(1, 12)]
    assert reports["quality"]["counts"]["answers"] == 12
    shown = posttrain("label", "report", "-w", root).out
    assert "answers: 12, annotators: 1, items: 12" in shown
    assert shown.endswith("no alarms\n")


def test_status_prints_rounds_and_champion(root: Path, posttrain: Call) -> None:
    state = posttrain("status", "-w", root, "--json").json
    assert state.keys() >= {"round", "champion", "waiting", "rounds"}
    assert state["champion"].keys() >= {"id", "round", "metrics"}
    assert all(entry.keys() >= {"round", "labels", "metrics", "decision", "seconds"} for entry in state["rounds"])
    assert (state["round"], state["waiting"]) == (2, None)
    output = posttrain("status", "-w", root)
    assert f"champion: {state['champion']['id']} of round 2, at " in output.out
    assert output.err == ""


def test_status_shows_the_score_of_a_function(small: Any, posttrain: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    suites = {"test": {"scorer": "python", "function": "length_of_answers:length", "sample": 2}}
    root = small(task={"max_new_tokens": 2}, evaluate={"suites": suites}, gate={"deploy": ["score > 0"]})
    (root / "length_of_answers.py").write_text("def length(answer, expected, prompt):\n    return len(answer) + 7\n")
    monkeypatch.syspath_prepend(root)
    assert posttrain("run", "-w", root, "--rounds", "0").code == 0
    assert posttrain("status", "-w", root).out.split()[:3] == ["round", "labels", "score"]


def test_the_current_folder_is_the_default_workspace(
    root: Path, posttrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    assert posttrain("status", "--json").json["round"] == 2


def test_show_prints_models_records_runs_rounds_and_versions(root: Path, posttrain: Call) -> None:
    champion = posttrain("show", "champion", "-w", root, "--json").json
    assert champion["kind"] == "model"
    output = posttrain("show", "champion", "-w", root).out
    assert "trained on 24 records" in output
    record = champion["trained_on"]["records"][0]
    assert record["id"] in output
    result = posttrain("show", record["id"], "-w", root, "--json").json
    assert champion["id"] in result["models"]
    assert f"trained {champion['id']}" in posttrain("show", record["id"], "-w", root).out
    run = champion["runs"][0]["id"]
    assert posttrain("show", run, "-w", root, "--json").json["stage"] == "train"
    assert "stage: train" in posttrain("show", run, "-w", root).out
    assert posttrain("show", "2", "-w", root, "--json").json["number"] == 2
    output = posttrain("show", "2", "-w", root).out
    assert "holds: deploy: accuracy >= 0" in output
    assert "gain in accuracy: " in output
    assert posttrain("show", "train@v1", "-w", root, "--json").json["names"] == ["train@v1"]
    assert "made from" in posttrain("show", "train@v1", "-w", root).out


def test_report_writes_a_page(root: Path, posttrain: Call, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert posttrain("report", page, "-w", root).code == 0
    html = page.read_text()
    champion = posttrain("status", "-w", root, "--json").json["champion"]["id"]
    assert champion in html
    assert not re.search(r"""(src|href)=["']?https?://""", html)
    refused = posttrain("report", tmp_path / "curve.svg", "-w", root)
    assert (refused.code, "a report is HTML; name a file that ends in .html" in refused.err) == (2, True)


def test_report_of_a_workspace_in_its_first_round(small: Any, posttrain: Call, tmp_path: Path) -> None:
    root = small(label={"annotator": "people"})
    posttrain("run", "-w", root, "--until", "collect")
    assert posttrain("report", tmp_path / "early.html", "-w", root).code == 0
    posttrain("run", "-w", root)
    assert posttrain("report", tmp_path / "waiting.html", "-w", root).code == 0


def test_config_prints_values_and_defaults(root: Path, posttrain: Call, tmp_path: Path) -> None:
    import yaml

    config = posttrain("config", "show", "-w", root, "--json").json
    assert config["label"]["per_round"] == 12
    assert yaml.safe_load(posttrain("config", "show", "-w", root).out) == config
    assert posttrain("config", "check", "-w", root).code == 0
    default_text = posttrain("config", "show", "--defaults", "-w", tmp_path).out
    defaults = yaml.safe_load(default_text)
    assert defaults.keys() == config.keys()
    assert defaults["train"].keys() == config["train"].keys()
    assert defaults["train"]["epochs"] == 6
    assert all(line.strip() for line in default_text.splitlines())


def test_the_output_of_config_show_is_a_config(root: Path, posttrain: Call) -> None:
    (root / "posttrain.yaml").write_text(posttrain("config", "show", "-w", root).out)
    again = posttrain("run", "-w", root)
    assert (again.code, again.err) == (0, "2 of 2 rounds are done; raise `rounds` for more\n")


def test_data_lists_shows_compares_and_exports_versions(
    root: Path, posttrain: Call, tmp_path: Path, small: Any
) -> None:
    versions = posttrain("data", "list", "-w", root, "--json").json
    assert {entry["version"]: entry["records"] for entry in versions} == {
        "labelled@v1": 0,
        "pool@v1": 60,
        "test@v1": 20,
        "train@v1": 12,
        "train@v2": 24,
    }
    assert "train@v2" in posttrain("data", "list", "-w", root).out
    version = posttrain("data", "show", "train@v1", "-w", root, "--json").json
    assert len(version["records"]) == 12
    assert "12 of 12 records" in posttrain("data", "show", "train@v1", "-w", root).out
    assert posttrain("data", "show", "train", "-w", root, "--json", "--limit", "3").json["counts"]["records"] == 24
    assert "rejected" in posttrain("data", "show", "pool", "-w", root, "--rejected", "--json").json
    change = posttrain("data", "diff", "train@v1", "train@v2", "-w", root, "--json").json
    assert (len(change["came"]), change["went"], change["changed"]) == (12, [], [])
    assert posttrain("data", "diff", "train@v1", "train@v2", "-w", root).out.startswith(
        "12 added, 0 removed, 0 changed"
    )
    for ending in ("jsonl", "csv", "parquet"):
        out = tmp_path / f"train.{ending}"
        assert posttrain("data", "export", "train@v2", out, "-w", root).code == 0
        assert posttrain("data", "check", out, "-w", tmp_path).code == 0
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 24


def test_data_add_extends_pool_and_labelled_records(root: Path, posttrain: Call, tmp_path: Path, small: Any) -> None:
    small.write(tmp_path / "more.csv", small.rows()[80:90], ["text"])
    small.write(tmp_path / "labelled.csv", small.rows()[90:95])
    assert posttrain("data", "add", tmp_path / "more.csv", "-w", root).code == 0
    assert posttrain("data", "add", tmp_path / "more.csv", "-w", root).code == 0
    assert posttrain("data", "add", tmp_path / "labelled.csv", "--to", "labelled", "-w", root).code == 0
    assert (root / "data" / "pool" / "more.csv").read_bytes() == (tmp_path / "more.csv").read_bytes()
    posttrain("run", "-w", root, "--rounds", "3")
    versions = {entry["version"]: entry["records"] for entry in posttrain("data", "list", "-w", root, "--json").json}
    assert (versions["pool@v2"], versions["labelled@v2"], versions["train@v3"]) == (70, 5, 41)


def test_data_check_lists_problems_by_line(posttrain: Call, tmp_path: Path, small: Any) -> None:
    root = small()
    assert posttrain("data", "check", root / "answers.csv", "-w", root).out == "no problem found\n"
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"text": \n{"txt": "b"}\n{"text": "a"}\n')
    output = posttrain("data", "check", bad, "-w", tmp_path)
    assert output.code == 2
    assert [line.split(": ")[0] for line in output.out.splitlines()[:-1]] == [f"{bad}:{line}" for line in (2, 3, 4)]
    result = posttrain("data", "check", bad, "-w", tmp_path, "--json")
    assert result.code == 2
    assert [problem["line"] for problem in result.json["problems"]] == [2, 3, 4]
    assert sum(result.json["counts"].values()) == 3


def test_answers_of_pool_records_are_ignored_and_not_checked(posttrain: Call, tmp_path: Path, small: Any) -> None:
    root = small()
    rows = [{"text": "my crad is late", "label": "crad"}, {"text": "my crad is late", "label": "card"}]
    small.write(tmp_path / "inputs.csv", rows)
    (root / "pool.csv").write_bytes((tmp_path / "inputs.csv").read_bytes())
    assert posttrain("data", "check", root / "pool.csv", "-w", root).code == 0
    assert posttrain("data", "add", tmp_path / "inputs.csv", "-w", root).code == 0
    assert posttrain("data", "check", root / "data" / "pool" / "inputs.csv", "-w", root).code == 0
    assert posttrain("run", "-w", root, "--until", "collect").code == 0
    message = "inputs.csv:2: label `crad` is not in the label set"
    assert message in posttrain("data", "add", tmp_path / "inputs.csv", "--to", "labelled", "-w", root).mistake
    assert message in posttrain("data", "check", tmp_path / "inputs.csv", "-w", root).out
    small.configure(root, data={"labelled": ["pool.csv"]})
    assert "pool.csv:2: label `crad`" in posttrain("data", "check", root / "pool.csv", "-w", root).out


def test_select_by_uncertainty_needs_a_trained_champion(small: Any, posttrain: Call) -> None:
    root = small()
    assert posttrain("run", "-w", root, "--rounds", "0").code == 0
    for strategy in ("entropy", "margin", "uncertain_diverse"):
        outcome = posttrain("select", "-w", root, "--strategy", strategy)
        assert outcome.mistake.startswith(f"--strategy: strategy `{strategy}` uses the champion's uncertainty")
        assert outcome.mistake.endswith(
            "none has been trained yet; use auto, facility_location, typiclust, diverse or random"
        )
    assert len(posttrain("select", "-w", root, "--strategy", "random", "--json").json["records"]) == 12


def test_select_previews_a_batch(root: Path, posttrain: Call) -> None:
    chosen = posttrain("select", "-w", root, "--n", "5", "--json").json["records"]
    assert len(chosen) == 5
    assert chosen[0].keys() >= {"id", "reason", "rank", "input"}
    assert len(posttrain("select", "-w", root, "--strategy", "random", "--json").json["records"]) == 12
    assert "rank" in posttrain("select", "-w", root).out
    assert posttrain("status", "-w", root, "--json").json["round"] == 2


def test_select_with_an_untrained_model_uses_the_cold_start(small: Any, posttrain: Call) -> None:
    root = small()
    posttrain("run", "-w", root, "--rounds", "0")
    chosen = posttrain("select", "-w", root, "--json").json["records"]
    assert len(chosen) == 12
    assert {(row["uncertainty"], row["predicted"]) for row in chosen} == {(None, None)}
    # Before a model is trained `auto` covers, and a covering strategy may replace the configured one.
    assert posttrain("select", "-w", root, "--strategy", "auto", "--json").json["records"] == chosen
    small.configure(root, select={"strategy": "diverse"})
    first = posttrain("select", "-w", root, "--json").json["records"]
    other = posttrain("select", "-w", root, "--strategy", "random", "--json").json["records"]
    assert [row["id"] for row in first] != [row["id"] for row in other]
    assert "`margin` uses the champion" in posttrain("select", "-w", root, "--strategy", "margin").mistake


def test_eval_measures_the_champion_or_a_model(root: Path, posttrain: Call) -> None:
    state = posttrain("status", "-w", root, "--json").json
    evaluation = posttrain("eval", "-w", root, "--json").json
    assert evaluation["model"] == state["champion"]["id"]
    assert evaluation["metrics"]["accuracy"] == state["champion"]["metrics"]["accuracy"]
    base = next(entry for entry in posttrain("models", "list", "-w", root, "--json").json if entry["round"] == 0)
    evaluation = posttrain("eval", "--model", base["id"][:12], "-w", root, "--json").json
    assert evaluation["model"] == base["id"]
    assert evaluation["metrics"]["accuracy"] == state["rounds"][0]["metrics"]["accuracy"]
    assert "accuracy" in posttrain("eval", "-w", root, "--full").out


def test_models_are_listed_rolled_back_promoted_and_exported(root: Path, posttrain: Call, tmp_path: Path) -> None:
    models = posttrain("models", "list", "-w", root, "--json").json
    by_round = {entry["round"]: entry["id"] for entry in models}
    assert [entry["id"] for entry in models if entry["champion"]] == [by_round[2]]
    assert by_round[1] in posttrain("models", "list", "-w", root).out
    assert posttrain("models", "show", by_round[1], "-w", root, "--json").json["id"] == by_round[1]

    def champion() -> Any:
        return posttrain("status", "-w", root, "--json").json["champion"]["id"]

    output = posttrain("models", "rollback", "-w", root, "--reason", "too slow")
    change, champion_line = output.out.splitlines()
    assert re.fullmatch(r"round 2 \(\d+\.\d%\) → round 1 \(\d+\.\d%\)", change)
    assert champion_line == f"champion: {by_round[1]}, at {root}/.posttrain/champion"
    assert champion() == by_round[1] == (root / ".posttrain" / "champion").resolve().name
    assert posttrain("models", "promote", by_round[2][:10], "-w", root).code == 0
    assert champion() == by_round[2]
    deployments = posttrain("show", by_round[1], "-w", root, "--json").json["deployments"]
    assert [(entry["action"], entry["reason"]) for entry in deployments][-1] == ("rollback", "too slow")
    out = tmp_path / "deep" / "model"
    assert posttrain("models", "export", "champion", out, "-w", root).code == 0
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert [path.name for path in out.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("template", [None, "classify", "answer"])
def test_init_writes_a_config(
    posttrain: Call, tmp_path: Path, template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "new" / "folder"
    outcome = posttrain("init", root, *(["--template", template] if template else []))
    assert outcome.code == 0
    files = "inputs.jsonl, test.jsonl" if template == "answer" else "labels.txt, inputs.csv, test.csv"
    assert outcome.out == f"made {root}; put {files} in it as posttrain.yaml says, then: posttrain run -w {root}\n"
    text = (root / "posttrain.yaml").read_text()
    assert len(text.splitlines()) < 25
    assert "here already" in posttrain("init", root).mistake
    assert "nothing has run here yet" not in posttrain("status", "-w", root).err
    if template != "answer":
        (root / "labels.txt").write_text("yes\nno\n")
    assert posttrain("config", "show", "-w", root, "--json").json["rounds"] == 3
    assert "inputs" in posttrain("run", "-w", root).mistake


def test_version_and_help_are_printed(posttrain: Call) -> None:
    assert re.fullmatch(rf"{re.escape(__version__)}( \([0-9a-f]{{12}}(\+changes)?\))?\n", posttrain("--version").out)
    verbs = ["demo", "init", "run", "status", "show", "report", "config", "data", "select", "label", "eval", "models"]
    output = posttrain("--help")
    assert output.code == 0
    assert all(re.search(rf"\b{verb}\b", output.out) for verb in verbs)
    for verb in verbs:
        assert posttrain(verb, "--help").code == 0
        assert posttrain(verb, "-h") == posttrain(verb, "--help")
    for group in ((), ("config",), ("data",), ("label",), ("models",)):
        output = posttrain(*group)
        assert output.code == 2
        assert "Usage:" in output.out
        assert output.err == ""


def test_the_installed_command_prints_the_status(finished_workspace: Path) -> None:
    command = Path(sys.executable).parent / "posttrain"
    output = subprocess.run(
        [command, "status", "--json", "-w", finished_workspace], capture_output=True, text=True, check=True
    )
    assert json.loads(output.stdout)["round"] == 2
    assert output.stderr == ""


def test_a_rollback_does_not_wait_for_a_run(root: Path, posttrain: Call) -> None:
    with Workspace.open(root) as store, store.hold("loop", "busy"), store.work():
        assert posttrain("run", "-w", root).code == 2
        assert posttrain("eval", "-w", root).code == 0
        assert posttrain("models", "rollback", "-w", root).code == 0
        assert [entry.action for entry in store.metadata.deployments()][-1] == "rollback"


def test_files_that_the_config_names_may_be_missing(root: Path, posttrain: Call) -> None:
    """Neither reading nor a rollback needs the base model or the file of labels."""
    config = yaml.safe_load((root / "posttrain.yaml").read_text())
    config |= {"model": "./missing", "task": {"labels": "missing.txt"}}
    (root / "posttrain.yaml").write_text(yaml.safe_dump(config))
    assert posttrain("run", "-w", root).code == 2
    for verb in (["status"], ["show", "champion"], ["models", "list"], ["data", "list"], ["models", "rollback"]):
        assert posttrain(*verb, "-w", root).code == 0, verb


def test_a_second_run_at_the_same_time_is_refused(small: Any, posttrain: Call, tmp_path: Path) -> None:
    """The second run reports which process holds the workspace, and changes nothing."""
    root = small(deploy={"command": "sh wait.sh", "timeout": 60})
    (root / "wait.sh").write_text("echo $$ > started; while ! test -e go; do sleep 0.05; done\n")
    first = forked.start(["run", "-w", str(root), "--rounds", "0"], tmp_path, tmp_path / "first.log")
    while not (root / "started").exists():
        assert first.is_alive()
        time.sleep(0.01)
    try:
        for verb in (["run"], ["run", "--rounds", "3"]):
            line = posttrain(*verb, "-w", root).mistake
            assert "another process runs this loop" in line, verb
            assert f"process {first.pid} on {os.uname().nodename} since " in line
        assert posttrain("status", "-w", root).code == 0
    finally:
        (root / "go").touch()
        first.join(60)
    output = (tmp_path / "first.log").read_text()
    assert first.exitcode == 0, output
    assert output.splitlines()[0] == "round 0: baseline"
    assert "it/s" not in output, "no other library's progress bars"
    assert posttrain("run", "-w", root, "--rounds", "0").code == 0
