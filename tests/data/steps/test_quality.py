"""Records are scored by a classifier: a saved one, or one trained on the user's examples."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from posttrain.data.quality.classifier import SETTINGS, load_classifier, train_quality
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.quality import Quality
from posttrain.data.steps.step import DataStep
from posttrain.store.errors import UserError
from posttrain.testing.steps import StepContract, lines, reasons, table_of

GOOD = [f"the {noun} was {word} and we thank you for it" for noun in ("meal", "room", "trip") for word in "abcdefgh"]
BAD = [f"click {word} now!!! free {noun}" for noun in ("prize", "money", "pills") for word in "abcdefgh"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality")
    for name, texts in (("good", GOOD), ("bad", BAD)):
        folder.joinpath(f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture
def table() -> pa.Table:
    return table_of(
        "the bus was late and we thank you for it",
        "click here now!!! free pills",
        {"prompt": "click x now!!! free money", "completion": "thank you for it, the trip was good"},
        {"prompt": "the room was cold and we thank you"},
        "",
    )


class TestTrainedOnFiles(StepContract):
    @pytest.fixture
    def step(self, root: Path) -> DataStep:
        return Quality(good="good.jsonl", bad="bad.jsonl", field="input").located(root)

    @pytest.fixture
    def table(self, table: pa.Table) -> pa.Table:
        return table

    def test_records_like_the_bad_examples_are_rejected(self, step: DataStep, table: pa.Table) -> None:
        step.check()
        outcome = apply_step(step, table)
        assert {2: "low quality", 3: "low quality"}.items() <= reasons(outcome).items()
        assert {1, 4} <= set(lines(outcome.kept))
        result = outcome.facts["quality"].to_pylist()
        assert all(0 <= item <= 1 for item in result)
        assert outcome.rejected["score"].to_pylist()[:2] == result[1:3]

    def test_the_key_holds_the_content_of_the_files_not_their_path(
        self, step: Quality, root: Path, tmp_path: Path
    ) -> None:
        for name in ("good.jsonl", "bad.jsonl"):
            (tmp_path / name).write_bytes((root / name).read_bytes())
        settings = {"good": "good.jsonl", "bad": "bad.jsonl", "field": "input"}
        assert Quality(**settings).located(tmp_path).key() == step.key()
        (tmp_path / "bad.jsonl").write_text('{"text": "another"}\n')
        assert Quality(**settings).located(tmp_path).key() != step.key()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    train_quality(GOOD, BAD).save(folder)
    return folder


class TestSavedClassifier(StepContract):
    @pytest.fixture
    def step(self, folder: Path) -> DataStep:
        return Quality(model=str(folder))

    @pytest.fixture
    def table(self, table: pa.Table) -> pa.Table:
        return table

    def test_scores_are_those_of_the_classifier(self, step: DataStep, folder: Path) -> None:
        step.check()
        result = apply_step(step, table_of(*GOOD, *BAD)).facts["quality"].to_pylist()
        assert result == load_classifier(folder).probabilities(GOOD + BAD).tolist()

    def test_without_a_threshold_it_only_measures(self, folder: Path, table: pa.Table) -> None:
        outcome = apply_step(Quality(model=str(folder), quality_threshold=None), table)
        assert outcome.kept.equals(table)
        assert outcome.facts["quality"].null_count == 0


@pytest.mark.slow
def test_a_classifier_is_trained_once_and_saved(root: Path, tmp_path: Path, table: pa.Table) -> None:
    settings = {"good": str(root / "good.jsonl"), "bad": [str(root / "bad.jsonl")]}
    step = Quality(**settings, model="kept").located(tmp_path)
    expected = apply_step(step, table).facts["quality"].to_pylist()
    modification_time = (tmp_path / "kept" / SETTINGS).stat().st_mtime_ns
    # Another threshold is another step, for which nothing is trained.
    assert (
        apply_step(step.model_copy(update={"quality_threshold": 0.9}), table).facts["quality"].to_pylist() == expected
    )
    assert (tmp_path / "kept" / SETTINGS).stat().st_mtime_ns == modification_time
    assert step.key() == Quality(**settings).located(root).key()
    assert apply_step(Quality(**settings), table).facts["quality"].to_pylist() == expected
    with pytest.raises(UserError, match="other examples or settings"):
        apply_step(step.model_copy(update={"field": "answer"}), table)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give `model`"),
        ({"good": "good.jsonl"}, "give both"),
        ({"model": "x", "quality_threshold": 2}, "quality_threshold"),
        ({"model": "x", "quality_treshold": 0.5}, "did you mean `quality_threshold`"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Quality.read(settings, "posttrain.yaml")


@pytest.mark.parametrize("settings", [{"good": "missing", "bad": "missing"}, {"model": "missing"}])
def test_check_raises_for_missing_files(settings: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing"):
        Quality(**settings).located(tmp_path).check()
