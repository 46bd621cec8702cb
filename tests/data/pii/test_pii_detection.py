"""Texts that are detected as personal data, kind by kind, and texts that are not."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.pii.checksums import is_card, is_iban, is_old_resident_id, is_resident_id, luhn
from posttrain.data.pii.detect import HINT, KINDS, Kind, detect, mask

EMAIL = ["ann.lee@mail.example.org", "a+b@x.co", "o'hara_1@sub.domain.museum", "x@xn--80ak6aa92e.com"]
NO_EMAIL = ["@ann", "a@b", "icon@2x.png", "x = a @ b.T", "pkg@1.2.3", "a@@b.com", "user@-x.com"]

PHONE = [
    "+1 (415) 555-2671",
    "+14155552671",
    "+44 20 7946 0958",
    "+86 138 0013 8000",
    "(+44) 20 7946 0958",
    "+49 30 12345678",
    "0044 20 7946 0958",
    "415-555-2671",
    "(415) 555-2671",
    "1-800-356-9377",
    "13800138000",
    "138 0013 8000",
    "138-0013-8000",
    "010-62345678",
    "020 7946 0958",
    "07700 900123",
    "01 42 68 53 00",
    "030/1234567",
    "(11) 98765-4321",
    "415-555-2671 x12",
]
NO_PHONE = [
    "80000 + 50000 = 130000",
    "<<200000-130000=70000>>70000",
    "5+12345678",
    "1,380,013,800",
    "$13800138000",
    "2024-01-15T10:30:00+08:00",
    "2024-01-15 10:30:00.123456",
    "01.02.2020 10:30",
    "01/02/2020",
    "0.123 456 789",
    "1700000000",
    "12345678901",
    "978-3-16-148410-0",
    "https://shop.com/item/13800138000",
    "order-138-0013-8000",
    "115-555-2671",
    "(999) 155-2671",
    "138001380001",
    "3.14159265358979",
    "+15000000",
    "+0 123 456 789",
]

IP = ["8.8.8.8", "120.0.0.8", "2606:4700:4700::1111", "2001:4860:4860:0:0:0:0:8888", "93.184.216.34"]
RESERVED_IP = ["192.168.0.1", "127.0.0.1", "203.0.113.7", "fe80::1", "2001:db8::1", "::1", "fd00::12"]
NO_IP = [
    "1.2.3",
    "256.1.1.1",
    "1.2.3.4.5",
    "01.2.3.4",
    "version 8.8.8.8",
    "v8.8.8.8",
    "Mozilla/5.0 Chrome/120.0.0.0 Safari/537.36",
    "python-requests/2.31.0.1",
    "Chrome 120.0.6099.109",
    "build: 10.4.22.1",
    "版本号：8.8.8.8",
    "std::vector",
    "10:30:45",
    "a::b",
]

CARD = ["4111111111111111", "4111 1111 1111 1111", "5555-5555-5555-4444", "378282246310005", "3782 822463 10005"]
CARD += ["6011111111111117", "3530111333300000", "30569309025904", "2223003122003222", "6250941006528599"]
NO_CARD = [
    ".4111111111111111",
    "1.5.4111111111111111",
    "4111111111111112",
    "1234567812345670",
    "4111.1111",
    "0.4111111111111111",
    "4111 1111 1111",
]

IBAN = ["DE89370400440532013000", "GB29 NWBK 6016 1331 9268 19", "FR1420041010050500013M02606", "NO9386011117947"]
IBAN += ["MT84MALT011000012345MTLCAST001S", "CH9300762011623852957"]
IBAN += ["de89370400440532013000", "DE89-3704-0044-0532-0130-00", "gb29 nwbk 6016 1331 9268 19", "No93-8601-1117-947"]
NO_IBAN = ["DE89370400440532013001", "DE8937040044053201300", "XX89370400440532013000", "AB12 CD34 EF56"]
NO_IBAN += [
    "DE89-3704-0044-0532-0130-01",
    "de89370400440532013001",
    "de89-370400440532-013000",
    "de8 9370400440532013000",
]

ID = ["11010519491231002X", "11010519491231002x", "440524188001010014".replace("1880", "1980")]
OLD_ID = ["110105491231002", "130503670401001", "659001991231999"]
NO_ID = [
    "990105491231002",
    "110105490231002",
    "117105491231002",
    "110100491231002",
    "110105491231000",
    "1101054912310021",
]
NO_ID += ["0.110105491231002", "$110105491231002", "110105491231002.5", "346205490101001"]
NO_ID += ["110105194912310021", "110105194913310020", "990105194912310029", "110105194902300025"]

SSN = ["536-22-1234", "219 09 9999"]
NO_SSN = ["000-12-3456", "666-12-3456", "912-12-3456", "536-00-1234", "536-22-0000", "1536-22-1234"]


def _cases(kind: Kind, texts: list[str]) -> list[tuple[Kind, str]]:
    return [(kind, text) for text in texts]


def _with_check(seventeen: str) -> str:
    return next(seventeen + check for check in "0123456789X" if is_resident_id(seventeen + check))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *_cases("email", EMAIL),
        *_cases("phone", PHONE),
        *_cases("ip", IP),
        *_cases("card", CARD),
        *_cases("iban", IBAN),
        *_cases("resident_id", [*ID[:2], _with_check("44052419800101001"), *OLD_ID]),
        *_cases("ssn", SSN),
    ],
)
def test_personal_data_is_detected_in_any_context(kind: Kind, value: str) -> None:
    for template in ("{}", "It is {}.", "电话{}，好的", "a, {}, b", "({})", "x: {}\n", "“{}”"):
        text = template.format(value)
        start = text.index(value)
        assert detect(text) == [(kind, start, start + len(value))], text


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *_cases("email", NO_EMAIL),
        *_cases("phone", NO_PHONE),
        *_cases("ip", [*RESERVED_IP, *NO_IP]),
        *_cases("card", NO_CARD),
        *_cases("iban", NO_IBAN),
        *_cases("resident_id", NO_ID),
        *_cases("ssn", NO_SSN),
    ],
)
def test_lookalikes_are_not_detected(kind: Kind, value: str) -> None:
    for template in ("{}", "It is {}.", "a {} b"):
        assert detect(template.format(value), [kind]) == [], template


def test_a_word_before_a_number_allows_a_looser_grouping() -> None:
    assert detect("there were 98765 43210 of them") == []
    assert [item.kind for item in detect("Phone: 98765 43210")] == ["phone"]
    assert detect("my phone on 2026-04-12, my phone 20260412, call 12.04.2026, call 1234567.89") == []
    assert [item.kind for item in detect("手机号是 9876543210")] == ["phone"]


@pytest.mark.parametrize("text", ["no.{}", "No. {}", "card:{}", "Nr.{}.", "卡号.{}"])
def test_a_card_after_an_abbreviation_is_detected(text: str) -> None:
    start = text.index("{")
    assert detect(text.format(CARD[0])) == [("card", start, start + 16)]


def test_an_address_after_a_word_that_ends_in_v_is_detected() -> None:
    assert [item.kind for item in detect("in Tel Aviv 8.8.8.8, and http://8.8.4.4/a")] == ["ip", "ip"]


def test_a_card_of_15_digits_is_no_old_resident_id() -> None:
    digits = next(f"3411014912310{n:02}" for n in range(100) if is_card(f"3411014912310{n:02}"))
    assert is_old_resident_id(digits)
    assert [item.kind for item in detect(digits)] == ["card"]


def test_every_match_has_one_kind() -> None:
    text = "Pay DE89 3704 0044 0532 0130 00 or 4111 1111 1111 1111 12/25, ann@x.org, +1 415 555 2671 from 8.8.8.8:80"
    assert mask(text) == (
        "Pay <IBAN> or <CARD_NUMBER> 12/25, <EMAIL>, <PHONE> from <IP_ADDRESS>:80",
        {"iban": 1, "card": 1, "email": 1, "phone": 1, "ip": 1},
    )


FRAGMENTS = st.sampled_from(
    [*EMAIL, *PHONE, *IP, *RESERVED_IP, *CARD, *IBAN, *ID, *OLD_ID, *SSN, *NO_PHONE, *NO_CARD, *NO_IP]
)
TEXTS = st.lists(
    FRAGMENTS
    | st.text(alphabet="0123456789@.:+-() abcDEx,，电", max_size=24)
    | st.sampled_from(["", " ", "-", ".", "1"]),
    max_size=8,
).map("".join)


@given(TEXTS)
def test_masking_is_complete_and_idempotent(text: str) -> None:
    result, counts = mask(text)
    assert detect(result) == []
    assert mask(result) == (result, {})
    assert bool(counts) == bool(detect(text))


@given(TEXTS)
def test_the_hint_misses_nothing(text: str) -> None:
    hint = re.compile(HINT.replace(r"\x{a0}", "\xa0"))
    for item in detect(text):
        assert hint.search(text[item.start : item.end])


@given(TEXTS)
def test_distant_words_change_nothing(text: str) -> None:
    prefix, suffix = "so it goes " * 9, " and so on" * 9
    expected = [(item.kind, item.start + len(prefix), item.end + len(prefix)) for item in detect(text)]
    assert detect(f"{prefix}{text}{suffix}") == expected


@pytest.mark.slow
@given(TEXTS)
def test_matches_do_not_overlap(text: str) -> None:
    result = detect(text)
    assert all(item.end <= next_item.start for item, next_item in pairwise(result))


@pytest.mark.slow
@given(st.from_regex(r"\A(?:4[0-9]{15}|5[1-5][0-9]{14}|3[47][0-9]{13}|62[0-9]{14})\Z"))
def test_a_wrong_check_digit_is_no_card(digits: str) -> None:
    right = next(digits[:-1] + digit for digit in "0123456789" if luhn(digits[:-1] + digit))
    assert is_card(right)
    assert [item.kind for item in detect(f"card {right}", ["card"])] == ["card"]
    for digit in set("0123456789") - {right[-1]}:
        assert detect(f"card {right[:-1]}{digit}", ["card"]) == []


@pytest.mark.slow
@given(st.from_regex(r"\A(?:DE|FR|GB)[0-9A-Z]{23}\Z"))
def test_a_wrong_check_is_no_iban(characters: str) -> None:
    length = {"DE": 22, "FR": 27, "GB": 22}[characters[:2]]
    account = characters[2:].ljust(length, "0")[: length - 4]
    country = "".join(str(int(item, 36)) for item in characters[:2])
    number = int("".join(str(int(item, 36)) for item in account) + country + "00")
    right = 98 - number % 97  # computes the check, which is_iban only verifies
    for check in range(100):
        value = f"{characters[:2]}{check:02}{account}"
        # 00, 01 and 99 are the remainders of 97, 98 and 02 again.
        assert is_iban(value) == ((check - right) % 97 == 0)
        assert bool(detect(value, ["iban"])) == is_iban(value)


@given(st.dates(), st.integers(0, 999))
def test_a_wrong_check_is_no_resident_id(birthday: object, order: int) -> None:
    digits = f"110105{str(birthday).replace('-', '')}{order:03}"
    right = [check for check in "0123456789X" if is_resident_id(digits + check)]
    assert len(right) == 1
    for check in set("0123456789X") - set(right):
        assert detect(f"id {digits}{check}", ["resident_id"]) == []


def test_every_kind_has_a_case() -> None:
    assert set(KINDS) == {"email", "phone", "ip", "card", "iban", "resident_id", "ssn"}
