"""A part that the config names and that cannot be used is reported with key, file and line, in one line."""

from pathlib import Path

import pytest

from posttrain.cli.main import main

CONFIG = """\
model: tiny
data:
  pool: pool.csv
  test: test.csv
{section}
"""


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("  steps: [broken_part:X]", "posttrain.yaml:5: `data.steps`: step broken_part:X: {error}"),
        ("select: {strategy: broken_part:X}", "posttrain.yaml:5: `select.strategy`: selector broken_part:X: {error}"),
        ("select: {scores: [broken_part:X]}", "posttrain.yaml:5: `select.scores`: score broken_part:X: {error}"),
        ("select:\n  options: {by: broken_part:X}\n  strategy: top", "posttrain.yaml:6: select.options: {error}"),
        ("train: {objective: broken_part:X}", "posttrain.yaml:5: `train.objective`: objective broken_part:X: {error}"),
        (
            "evaluate:\n  suites:\n    short:\n      scorer: broken_part:X",
            "posttrain.yaml:8: evaluate.suites.short.scorer: {error}",
        ),
        ("store: {artifacts: broken_part:X}", "posttrain.yaml:5: store.artifacts: {error}"),
        (
            "store: {artifacts: json:JSONEncoder}",
            "`json:JSONEncoder` is not an artifact store; derive it from posttrain.",
        ),
        ("store: {artifacts: half_part:Half}", "`half_part:Half` does not define delete, exists, get, ids, open, "),
        ("stages: [broken_part:X]", "posttrain.yaml:5: stages: {error}"),
    ],
)
def test_a_broken_part_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, section: str, message: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    error = _write_broken_part(tmp_path)
    (tmp_path / "half_part.py").write_text(
        "from posttrain.store.artifacts import ArtifactStore\nclass Half(ArtifactStore): pass\n"
    )
    (tmp_path / "posttrain.yaml").write_text(CONFIG.format(section=section))
    for name in ("pool.csv", "test.csv"):
        (tmp_path / name).write_text("prompt,completion\na,b\nc,d\n")
    assert message.format(error=error) in _run(capfd, "run", "-w", str(tmp_path))


def test_a_broken_objective_of_a_training_alone_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    error = _write_broken_part(tmp_path)
    config = tmp_path / "train.yaml"
    config.write_text("model: tiny\ndata: data.jsonl\ntrain:\n  objective: broken_part:X\n")
    result = _run(capfd, "train", "--config", str(config))
    assert f"{config}:4: `train.objective`: objective broken_part:X: {error}" in result
    arguments = ("train", "--model", "tiny", "--data", "data.jsonl", "--objective", "broken_part:X")
    assert f"--objective: {error}" in _run(capfd, *arguments)


def _write_broken_part(folder: Path) -> str:
    """Writes a module that fails on its second line; returns the message about it."""
    file = folder / "broken_part.py"
    file.write_text("limit = 3\nX = undefined\n")
    return f"cannot import `broken_part`: NameError: name 'undefined' is not defined ({file}:2); fix it"


def _run(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        main([*arguments])
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err
