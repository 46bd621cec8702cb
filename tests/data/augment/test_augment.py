"""Variants follow their records, are marked, and depend only on the seed, the record and the method."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.data.augment.rewording import Templates
from posttrain.data.augment.word_edits import Noise, Synonyms, Typos
from posttrain.data.steps.augment import Augment
from posttrain.data.steps.step import DataStep
from posttrain.store.errors import UserError
from posttrain.testing.steps import StepContract, lines, table_of

TURNS = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "please return these shoes"}]
ROWS: list[Any] = [
    {"prompt": "where is the parcel that you sent", "completion": "late"},
    {"prompt": "I would like to order another lamp", "completion": "order", "group": "customer 7"},
    {"prompt": TURNS, "completion": "return"},
    "plain text about nothing in particular",
    {"prompt": [{"role": "tool", "content": "42"}], "completion": "a tool had the last word"},
    {"prompt": "is 1 2", "completion": "too short for a typing mistake"},
    {"prompt": "please send the money back", "completion": "better", "rejected": "worse"},
]


def inputs(table: pa.Table) -> list[str]:
    return [row["text"] or row["prompt"][-1]["content"] for row in table.to_pylist()]


def marks(table: pa.Table) -> list[tuple[str, str] | None]:
    result = [json.loads(meta).get("augmented") for meta in table["meta"].to_pylist()]
    return [(mark["method"], mark["of"]) if mark else None for mark in result]


class AddsRows(StepContract):
    adds_rows = True

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(*ROWS)


class TestTypos(AddsRows):
    @pytest.fixture
    def step(self) -> DataStep:
        return Augment(methods=(Typos(copies=2), Typos(words=3, share=0.5)), seed=3)

    def test_each_variant_follows_its_record_and_is_marked(self, step: Augment, table: pa.Table) -> None:
        outcome = step.apply(table)
        ids, texts, row_marks = outcome.kept["id"].to_pylist(), inputs(outcome.kept), marks(outcome.kept)
        origin = ""
        for id, text, mark in zip(ids, texts, row_marks, strict=True):
            if mark is None:
                origin, original = id, text
            else:
                assert mark[1] == origin
                assert mark[0] in ("typos", "typos 2")
                assert text != original
        assert (
            outcome.kept.filter(pa.array([mark is None for mark in row_marks]))
            .drop(["group"])
            .equals(table.drop(["group"]))
        )
        changes = [(row["id"], row["before"], row["detail"]) for row in outcome.changed.to_pylist()]
        assert changes == [(id, mark[1], mark[0]) for id, mark in zip(ids, row_marks, strict=True) if mark]
        assert lines(outcome.kept).count(5) == lines(outcome.kept).count(6) == 1

    def test_a_record_and_its_variants_are_one_group(self, step: Augment, table: pa.Table) -> None:
        result = step.apply(table).kept
        ids = dict(zip(lines(table), table["id"].to_pylist(), strict=True))
        groups = {(row["line"], row["group"]) for row in result.to_pylist()}
        without_variants = {5: None, 6: None}
        assert groups == set({**ids, 2: "customer 7", **without_variants}.items())

    def test_answers_stay_and_so_do_earlier_turns(self, step: Augment, table: pa.Table) -> None:
        rows = step.apply(table).kept.to_pylist()
        assert {row["completion"] for row in rows if row["line"] == 1} == {"late"}
        assert {(row["completion"], row["rejected"]) for row in rows if row["line"] == 7} == {("better", "worse")}
        assert {row["prompt"][0]["content"] for row in rows if row["line"] == 3} == {"Be kind."}

    def test_another_seed_makes_other_variants(self, step: Augment, table: pa.Table) -> None:
        assert inputs(step.model_copy(update={"seed": 4}).apply(table).kept) != inputs(step.apply(table).kept)

    def test_only_training_records_are_augmented(self, step: Augment) -> None:
        assert step.training_only
        assert not step.evaluation

    def test_share_sets_the_fraction_of_augmented_records(self) -> None:
        table = table_of(*(f"message number {number} about something" for number in range(1000)))
        num_variants = Augment(methods=(Typos(share=0.3),)).apply(table).changed.num_rows
        assert 250 < num_variants < 350


class TestSynonyms(AddsRows):
    @pytest.fixture
    def step(self, tmp_path: Path) -> DataStep:
        file = tmp_path / "synonyms.txt"
        file.write_text("# our words\nparcel, package, shipment\nplease,kindly\n\nOrder, buy, purchase\n")
        return Augment(methods=({"method": "synonyms", "file": str(file), "rate": 0.5},))

    def test_words_are_replaced_by_synonyms_of_their_line(self, step: Augment, table: pa.Table) -> None:
        texts = inputs(step.apply(table).kept)
        assert "where is the package that you sent" in texts or "where is the shipment that you sent" in texts
        assert "kindly send the money back" in texts

    def test_variants_equal_to_a_previous_text_are_dropped(self, tmp_path: Path) -> None:
        (tmp_path / "s").write_text("a, A\nthe, a")
        step = Augment(methods=(Synonyms(file=tmp_path / "s", copies=5, rate=1.0),))
        assert inputs(step.apply(table_of("the lamp")).kept) == ["the lamp", "a lamp"]

    def test_capitals_stay(self, tmp_path: Path) -> None:
        (tmp_path / "s").write_text("big, large")
        step = Augment(methods=(Synonyms(file=tmp_path / "s", rate=1.0),))
        assert inputs(step.apply(table_of("Big BIG big")).kept)[1] == "Large LARGE large"

    @pytest.mark.parametrize(("text", "message"), [("alone", "s:1: one word alone"), ("# x", "holds no synonyms")])
    def test_an_invalid_file_of_synonyms_raises(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "s").write_text(text)
        with pytest.raises(UserError, match=message):
            Augment(methods=(Synonyms(file=Path("s")),)).located(tmp_path).check()

    def test_the_key_holds_the_content_of_the_file_not_its_path(self, tmp_path: Path) -> None:
        keys = []
        for name in ("one", "two"):
            (tmp_path / name).write_text("a, b")
            keys.append(Augment(methods=(Synonyms(file=tmp_path / name),)).key())
        assert keys[0] == keys[1]
        (tmp_path / "two").write_text("a, c")
        assert Augment(methods=(Synonyms(file=tmp_path / "two"),)).key() != keys[0]


class TestTemplates(AddsRows):
    @pytest.fixture
    def step(self) -> DataStep:
        return Augment(
            methods=(Templates(templates=("Well, {text}",), by_label={"late": ("{text}, it is late", "Hey! {text}")}),)
        )

    def test_templates_by_label_and_for_all_labels(self, step: Augment, table: pa.Table) -> None:
        texts = inputs(step.apply(table).kept)
        assert {"where is the parcel that you sent, it is late", "Hey! where is the parcel that you sent"} & set(texts)
        assert "Well, plain text about nothing in particular" in texts

    @pytest.mark.parametrize("settings", [{}, {"templates": ["no slot"]}, {"by_label": {"a": ["{text} {text}"]}}])
    def test_invalid_templates_raise(self, settings: dict[str, Any]) -> None:
        with pytest.raises(UserError, match=r"templates|hold"):
            Augment.read({"methods": [{"method": "templates", **settings}]}, "config")


class TestNoise(AddsRows):
    @pytest.fixture
    def step(self) -> DataStep:
        return Augment(methods=(Noise(rate=0.5, blank="<blank>"),))

    def test_words_are_blanked(self) -> None:
        step = Augment(methods=(Noise(rate=0.25, blank="_"),))
        text = " ".join(f"w{number}" for number in range(4000))
        blanked_words = inputs(step.apply(table_of(text)).kept)[1].split()
        assert len(blanked_words) == 4000
        assert 900 < blanked_words.count("_") < 1100
        assert all(new in ("_", old) for new, old in zip(blanked_words, text.split(), strict=True))

    def test_white_space_stays(self) -> None:
        step = Augment(methods=(Noise(rate=0.999, blank="_"),))
        assert inputs(step.apply(table_of("a\n\n b\tc")).kept)[1] == "_\n\n _\t_"
