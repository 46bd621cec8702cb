"""Validates numbers with check digits, which distinguish a real number from a mistyped or invented one."""

import re
from datetime import date

IBAN_LENGTHS = {
    country: length
    for length, countries in {
        15: "NO",
        16: "BE",
        18: "DK FI FK FO GL NL SD",
        19: "MK SI",
        20: "AT BA EE KZ LT LU MN XK",
        21: "CH CR HR LI LV",
        22: "BG BH DE GB GE IE ME RS VA",
        23: "AE GI IL IQ OM SO TL",
        24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST",
        26: "IS TR",
        27: "BI DJ FR GR IT MC MR SM",
        28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
        29: "BR EG PS QA UA",
        30: "JO KW MU YE",
        31: "MT SC",
        32: "LC",
        33: "RU",
    }.items()
    for country in countries.split()
}
"""Characters of an IBAN by country: SWIFT's IBAN registry (ISO 13616)."""

# GB/T 2260: the first two digits of a region code name the province.
_PROVINCES = frozenset(
    str(code)
    for first, last in ((11, 15), (21, 23), (31, 37), (41, 46), (50, 54), (61, 65), (71, 71), (81, 83))
    for code in range(first, last + 1)
)
_ID_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_ID_CHECKS = "10X98765432"

# Issuers' prefixes with the lengths that they give out (ISO/IEC 7812).
_CARDS = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})"  # Visa
    r"|(?:5[1-5]\d{2}|222[1-9]|22[3-9]\d|2[3-6]\d{2}|27[01]\d|2720)\d{12}"  # Mastercard
    r"|3[47]\d{13}"  # American Express
    r"|(?:6011|64[4-9]\d|65\d{2})\d{12,15}"  # Discover
    r"|62\d{14,17}"  # UnionPay
    r"|35(?:2[89]|[3-8]\d)\d{12}"  # JCB
    r"|3(?:0[0-5]|[689]\d)\d{11}"  # Diners Club
    r"|(?:5018|5020|5038|5893|6304|6759|676[1-3])\d{8,15}"  # Maestro
)


def luhn(digits: str) -> bool:
    """Returns True if the last digit is the check digit of ISO/IEC 7812-1, annex B."""
    total = 0
    for index, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + index % 2)
        total += value - 9 * (value > 9)
    return total % 10 == 0


def is_card(digits: str) -> bool:
    """Returns True for a payment card's number: a known issuer's prefix and length, and a right check digit."""
    return _CARDS.fullmatch(digits) is not None and luhn(digits)


def is_iban(characters: str) -> bool:
    """Returns True for an IBAN without spaces: the country's length, and 1 modulo 97 (ISO 13616)."""
    if IBAN_LENGTHS.get(characters[:2]) != len(characters):
        return False
    return int("".join(str(int(character, 36)) for character in characters[4:] + characters[:4])) % 97 == 1


def is_resident_id(characters: str) -> bool:
    """Returns True for a Chinese resident ID number (GB 11643): a province, a date of birth, the check character."""
    if len(characters) != 18 or characters[:2] not in _PROVINCES:
        return False
    try:
        date(int(characters[6:10]), int(characters[10:12]), int(characters[12:14]))
    except ValueError:
        return False
    total = sum(int(digit) * weight for digit, weight in zip(characters, _ID_WEIGHTS, strict=False))
    return _ID_CHECKS[total % 11] == characters[17].upper()


def is_old_resident_id(digits: str) -> bool:
    """Returns True if 15 digits may be a Chinese resident ID number as issued until 1999 (GB 11643-1989).

    It has no check digit, so it needs a region code as GB/T 2260 forms them (a province, a prefecture of 01 to 70
    or 90, a county), a date of birth of the 20th century, and an order code other than 000.
    """
    if len(digits) != 15 or digits[:2] not in _PROVINCES:
        return False
    prefecture, county = digits[2:4], digits[4:6]
    if not ("01" <= prefecture <= "70" or prefecture == "90") or county == "00" or digits[12:] == "000":
        return False
    try:
        date(1900 + int(digits[6:8]), int(digits[8:10]), int(digits[10:12]))
    except ValueError:
        return False
    return True
