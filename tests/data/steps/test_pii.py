"""Personal data is masked, rejected or reported, and never shown."""

import pyarrow as pa
import pytest

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.pii import PersonalData
from posttrain.data.steps.step import DataStep
from posttrain.store.errors import UserError
from posttrain.testing.steps import StepContract, lines, reasons, table_of


@pytest.fixture
def table() -> pa.Table:
    return table_of(
        "no numbers here",
        "write to ann@mail.org or bob@mail.org",
        {"prompt": "My card is 4111 1111 1111 1111.", "completion": "Call 415-555-2671"},
        {"prompt": "2 + 2 = 4", "completion": "card_arrival"},
        {
            "prompt": [
                {"role": "system", "content": "I am at 8.8.8.8"},
                {"role": "user", "content": "x"},
            ],
            "completion": "fine",
            "rejected": "ask ann@mail.org",
        },
        {"prompt": "nothing"},
    )


class TestMasking(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return PersonalData()

    @pytest.fixture
    def table(self, table: pa.Table) -> pa.Table:
        return table

    def test_placeholders_replace_the_values(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert outcome.rejected.num_rows == 0
        rows = outcome.kept.to_pylist()
        assert rows[1]["text"] == "write to <EMAIL> or <EMAIL>"
        assert rows[2]["prompt"][0]["content"] == "My card is <CARD_NUMBER>."
        assert rows[2]["completion"] == "Call <PHONE>"
        assert rows[4]["prompt"][0] == {"role": "system", "content": "I am at <IP_ADDRESS>"}
        assert rows[4]["rejected"] == "ask <EMAIL>"
        assert [rows[row] for row in (0, 3, 5)] == table.take([0, 3, 5]).to_pylist()
        assert outcome.changed["detail"].to_pylist() == ["2 email", "1 card, 1 phone", "1 email, 1 ip"]
        assert outcome.facts["pii"].to_pylist() == [0, 2, 2, 0, 2, 0]
        assert outcome.facts["pii_email"].to_pylist() == [None, 2, None, None, 1, None]
        assert set(outcome.facts) == {
            "pii",
            "pii_email",
            "pii_phone",
            "pii_card",
            "pii_iban",
            "pii_ip",
            "pii_resident_id",
        }

    def test_masking_is_idempotent(self, step: DataStep, table: pa.Table) -> None:
        result = apply_step(step, table).kept
        repeat = apply_step(step, result)
        assert repeat.kept.equals(result)
        assert repeat.changed.num_rows == 0


class TestRejecting(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return PersonalData(action="reject", field="input")

    @pytest.fixture
    def table(self, table: pa.Table) -> pa.Table:
        return table

    def test_the_detail_names_kinds_and_no_value(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert reasons(outcome) == dict.fromkeys((2, 3, 5), "personal data")
        assert outcome.rejected["detail"].to_pylist() == ["2 email", "1 card", "1 ip"]
        assert outcome.rejected["score"].to_pylist() == [2, 1, 1]


class TestReporting(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return PersonalData(action="report", field="answer", kinds=["ssn", "phone"])

    @pytest.fixture
    def table(self, table: pa.Table) -> pa.Table:
        return table

    def test_it_only_measures(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert outcome.kept.equals(table)
        assert outcome.changed.num_rows == 0
        assert outcome.facts["pii"].to_pylist() == [0, 0, 1, 0, 0, 0]
        assert set(outcome.facts) == {"pii", "pii_ssn", "pii_phone"}


def test_slices_and_chunks_are_read_correctly(table: pa.Table) -> None:
    step = PersonalData(action="reject")
    chunked = pa.concat_tables([table.slice(2, 3), table.slice(0, 2), table.slice(4)])
    assert lines(apply_step(step, chunked).kept) == [4, 1, 6]


def test_the_order_of_kinds_does_not_matter() -> None:
    assert PersonalData(kinds=["phone", "email"]).key() == PersonalData(kinds=["email", "phone", "email"]).key()


def test_an_unknown_kind_raises() -> None:
    with pytest.raises(UserError, match="kinds"):
        PersonalData.read({"kinds": ["name"]}, "posttrain.yaml")
