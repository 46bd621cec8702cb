"""Triggers that start a round."""

from datetime import UTC, datetime, timedelta

import pytest

from posttrain.loop.triggers import NAMES, TriggerConfig, evaluate_triggers
from posttrain.store.errors import UserError

VALUES = {"new_records": 40.0, "new_labels": 0.0, "days_since_training": 2.5, "degradation": 0.03, "urgent": 0.0}


@pytest.mark.parametrize(
    ("any_of", "all_of", "starts", "why"),
    [
        ([], [], True, ""),
        (["new_records >= 40"], [], True, "new_records >= 40 (new_records = 40)"),
        (["new_records > 40"], [], False, "new_records > 40 (new_records = 40)"),
        (["new_records > 40", "urgent"], [], False, "new_records > 40 (new_records = 40); urgent (urgent = 0)"),
        (["new_records > 40", "degradation > 2%"], [], True, "degradation > 2% (degradation = 0.03)"),
        (
            [],
            ["new_records > 1", "days_since_training > 7"],
            False,
            "days_since_training > 7 (days_since_training = 2.5)",
        ),
        ([], ["new_records > 1", "days_since_training > 2"], True, None),
        (["urgent", "new_records > 1"], ["days_since_training > 7"], False, None),
        (["urgent"], ["new_records > 1"], False, "urgent (urgent = 0)"),
        (["new_records > 1"], ["days_since_training > 1"], True, None),
    ],
)
def test_any_and_all_rules_start_a_round(any_of: list[str], all_of: list[str], starts: bool, why: str | None) -> None:
    result = evaluate_triggers(TriggerConfig(any=any_of, all=all_of), VALUES)
    assert result.starts is starts
    assert why is None or result.reason == why


def test_rules_may_use_every_name() -> None:
    assert evaluate_triggers(TriggerConfig(all=[f"{name} >= 0" for name in NAMES]), dict.fromkeys(NAMES, 0.0)).starts


@pytest.mark.parametrize("section", ["any", "all"])
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("new_record > 3", "nothing is called `new_record`; did you mean `new_records`?"),
        ("accuracy < 1", "nothing is called `accuracy`; one of new_records, "),
        ("new_records >", "something is missing at its end"),
    ],
)
def test_rules_with_unknown_names_or_errors_are_refused(section: str, rule: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        TriggerConfig.read({section: [rule]}, "posttrain.yaml")
    assert f"rule `{rule}`: {message}" in str(caught.value)


def test_a_schedule_has_the_hours_of_its_time_zone() -> None:
    triggers = TriggerConfig(schedule="0 3 * * *", time_zone="Asia/Tokyo")
    after = datetime(2026, 1, 1, tzinfo=UTC)
    assert triggers.next_time(after) == datetime(2026, 1, 1, 18, tzinfo=UTC)
    since = after + timedelta(hours=17)
    due = [evaluate_triggers(triggers, {}, since, since + timedelta(minutes=minutes)).starts for minutes in (59, 60)]
    assert due == [False, True]


def test_rules_of_all_hold_back_a_schedule_that_is_due() -> None:
    triggers = TriggerConfig(schedule="0 3 * * *", time_zone="UTC", all=["new_records > 100"])
    since, now = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 4, tzinfo=UTC)
    starts = [evaluate_triggers(triggers, {"new_records": count}, since, now).starts for count in (40.0, 140.0)]
    assert starts == [False, True]
