"""Finds and masks personal data in a text."""

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from posttrain.data.pii.checksums import IBAN_LENGTHS, is_card, is_iban, is_old_resident_id, is_resident_id

Kind = Literal["email", "iban", "resident_id", "card", "ip", "ssn", "phone"]

KINDS: tuple[Kind, ...] = ("email", "iban", "resident_id", "card", "ip", "ssn", "phone")
"""In order of precedence: a match of an earlier kind hides later kinds there."""

PLACEHOLDERS: dict[Kind, str] = {
    "email": "<EMAIL>",
    "iban": "<IBAN>",
    "resident_id": "<ID_NUMBER>",
    "card": "<CARD_NUMBER>",
    "ip": "<IP_ADDRESS>",
    "ssn": "<SSN>",
    "phone": "<PHONE>",
}

HINT = (
    r"@"
    r"|[0-9](?:[ .()/\-]{0,4}[0-9]){7}"
    r"|[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]"
    r"|:[0-9A-Fa-f]{0,4}:"
    r"|[A-Za-z]{2}[0-9]{2}[ \x{a0}\-]?[A-Za-z0-9]"
)
"""An RE2 expression that matches every text with personal data, to rule others out in one pass."""

Spans = Iterable[tuple[int, int]]

# Numbers are looked for around such a stretch alone: most of a text is none.
_DIGITS = re.compile(r"[0-9](?:[ .()/\-]{0,4}[0-9]){7,}")

_SEEN_BEFORE, _SEEN_BEHIND, _OPENING = 48, 24, 4

# Borders are of ASCII letters and digits: in Chinese no space stands between a word and a number.
_START, _END = r"(?<![0-9A-Za-z])", r"(?![0-9A-Za-z])"

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"

# The characters of RFC 5322's dot-atom that people do use; names that are not written in ASCII are left out.
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+'\-])[A-Za-z0-9_%+'\-]{1,64}(?:\.[A-Za-z0-9_%+'\-]{1,64}){0,8}"
    rf"@((?:{_LABEL}\.){{1,6}}(xn--[A-Za-z0-9\-]{{2,59}}|[A-Za-z]{{2,24}})){_END}"
)

# ``logo@2x.png`` is a picture.
_FILE_SUFFIXES = frozenset(
    ("png", "jpg", "jpeg", "gif", "svg", "webp", "bmp", "ico", "css", "js", "json", "html", "pdf", "txt")
)

# Capitals may have spaces anywhere; what is not all capitals, or has hyphens, stands in fours or in one piece: words
# between single spaces would else be tried too.
_IBAN = re.compile(
    _START
    + "(?=[A-Za-z]{2}[0-9]{2})(?:"
    + "|".join(
        f"(?:{countries})[0-9]{{2}}(?:[ \u00a0]?[A-Z0-9]){{{length - 4}}}{_END}"
        + "".join(
            f"|(?i:(?:{countries})[0-9]{{2}}(?:{gap}[A-Z0-9]{{4}}){{{length // 4 - 1}}}"
            + (f"{gap}[A-Z0-9]{{{length % 4}}}" if length % 4 else "")
            + f"{_END})"
            for gap in ("", " ", "\u00a0", "-")
        )
        for length in sorted(set(IBAN_LENGTHS.values()))
        for countries in ("|".join(sorted(country for country, size in IBAN_LENGTHS.items() if size == length)),)
    )
    + ")",
    re.ASCII,
)

_IBAN_START = re.compile(r"[A-Za-z]{2}[0-9]{2}")

_RESIDENT_ID = re.compile(rf"{_START}[1-9][0-9]{{5}}(?:19|20)[0-9]{{2}}[01][0-9][0-3][0-9]{{4}}[0-9Xx]{_END}")

# A point before a number makes it a fraction, unless it ends a word as in `no.`
_NO_AMOUNT = r"(?<![0-9A-Za-z$€£¥=_])(?<![0-9][ \-.,])(?:(?<!\.)|(?<=[^\W\d_]\.))"

_OLD_RESIDENT_ID = re.compile(
    rf"{_NO_AMOUNT}[1-9][0-9]{{5}}[0-9]{{2}}[01][0-9][0-3][0-9][0-9]{{3}}(?![0-9A-Za-z_]|[.,\-][0-9])"
)

_CARD = re.compile(
    _NO_AMOUNT
    + r"(?:[0-9]{12,19}|[0-9]{4}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{1,4}(?:\1[0-9]{3})?|[0-9]{4}([ -])[0-9]{6}\2[0-9]{4,5})"
    r"(?![0-9A-Za-z_]|[.,\-][0-9]| [0-9]{4}(?![0-9]))"
)

_IPV4_HINT = re.compile(r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]")

_IPV6_HINT = re.compile(r":[0-9A-Fa-f]{0,4}:")

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"

_IPV4 = re.compile(rf"(?<![0-9A-Za-z.\-])(?:{_OCTET}\.){{3}}{_OCTET}(?![0-9A-Za-z]|[.\-][0-9A-Za-z])")

# Four numbers with dots are as often the version of a program; behind a slash (`Chrome/120.0.0.0`, RFC 9110, section
# 10.1.5) they always are.
_VERSION = re.compile(
    r"[A-Za-z0-9_.\-]/$"
    r"|(?<![A-Za-z])(?:version|release|revision|build|firmware|driver|update|patch|rev\.?|ver\.?|v\.?"
    r"|chrome|chromium|edge?|firefox|opera|safari|electron|webview)(?:\s?[:=]?\s?|\sis\s)$"
    r"|版本(?:号?是?为?\s?[:：]?\s?)$",
    re.IGNORECASE,
)

_BEFORE_VERSION = 20  # characters that may tell a version

_IPV6 = re.compile(
    r"(?<![0-9A-Za-z:.])(?=[0-9A-Fa-f:]*:[0-9A-Fa-f]*:)[0-9A-Fa-f:]{2,39}(?<!(?<!:):)"
    r"(?![0-9A-Za-z]|:[0-9A-Fa-f:]|\.[0-9])"
)

_GLOBAL = ipaddress.IPv6Network("2000::/3")  # all that is given out (IANA)

_SSN = re.compile(
    r"(?<![0-9A-Za-z\-.])(?!000|666|9)[0-9]{3}([- ])(?!00)[0-9]{2}\1(?!0000)[0-9]{4}(?![0-9A-Za-z]|[-.][0-9])"
)

# Country calling codes of ITU-T E.164; no code is the beginning of another.
_CODES = re.compile(
    r"1|7|2[07]|2[1-689]\d|3[0-4]|3[578]\d|36|39|4[013-9]|42\d|5[1-8]|5[09]\d|6[0-6]|6[789]\d|8[1246]|8[05789]\d|9[0-58]|9[679]\d"
)

_BEFORE = r"(?<![0-9A-Za-z+$€£¥₹#=*/_%&@<.-])(?<![0-9][ ,:])"

_AFTER = r"(?![0-9A-Za-z%*=@]|[-./:,+*][0-9])"

_EXTENSION = r"(?:\s?(?:x|ext\.?)\s?\d{1,5})?"

_GROUPS = r"\d{1,15}(?:[ .\-/]{1,2}\d{1,12}|[ .\-]?\(\d{1,5}\)[ .\-]?\d{1,12}){0,6}"

_DATE = r"(?!\d{1,2}([./-])\d{1,2}\1\d{4})"

# Digits alone are not a telephone number: amounts, identifiers and dates look the same. A number needs a country
# code after ``+`` or ``00``, a trunk ``0`` or an area code with separators, the form of a Chinese mobile number, or,
# for looser groupings, a word such as "phone" right before it.
_INTERNATIONAL = re.compile(rf"{_BEFORE}(?:\(\+\d{{1,3}}\) ?|(?:\+|00 ?)(?=[1-9])){_GROUPS}{_AFTER}", re.ASCII)

_NATIONAL = re.compile(
    rf"{_BEFORE}(?:"
    # North America: neither the area nor the exchange begins with 0 or 1 (North American Numbering Plan).
    rf"(?:1[-. ])?(?:\([2-9]\d{{2}}\) ?|[2-9]\d{{2}}[-.])[2-9]\d{{2}}[-. ]\d{{4}}{_EXTENSION}"
    # China: mobile numbers; 400 and 800 lines.
    r"|1[3-9]\d{9}|1[3-9]\d([- ])\d{4}\1\d{4}|[48]00-\d{3}-\d{4}"
    # A trunk 0 and groups, as in most of the world.
    rf"|{_DATE}(?:\(0\d{{1,4}}\)|0\d{{1,4}})(?:[ .\-/]{{1,2}}\d{{2,8}}){{1,4}}(?! \d)|07\d{{9}}"
    # Brazil: the area in brackets.
    r"|\([1-9]\d\) ?9?\d{4}-\d{4}"
    rf"){_AFTER}",
    re.ASCII,
)

_AFTER_KEYWORD = re.compile(
    r"(?:\b(?:tel|telephone|phone|mobile|cell|fax|whatsapp|call(?: me)?(?: at| on)?|reach me (?:at|on))"
    r"(?: (?:number|no))?"
    r"|电话|手机|手机号|联系电话|传真)(?:\.|\b| (?:is|at|on)\b|[是为号码])*[:：]? ?"
    rf"({_BEFORE}\(?\d(?:[ .\-()]{{0,2}}\d){{7,11}}){_AFTER}",
    re.IGNORECASE | re.ASCII,
)

_ANY_DATE = re.compile(r"(?:19|20)\d\d([-./ ]?)\d\d\1\d\d|\d\d([-./ ])\d\d\2(?:19|20)\d\d", re.ASCII)


class PiiSpan(NamedTuple):
    """A piece of personal data: ``text[start:end]``."""

    kind: Kind
    start: int
    end: int


def detect(text: str, kinds: Sequence[Kind] = KINDS) -> list[PiiSpan]:
    """Finds personal data in a text, as spans from left to right without overlaps.

    Args:
        kinds: the kinds to find.
    """
    results: list[PiiSpan] = []
    stretches = [match.span() for match in _DIGITS.finditer(text)]
    for kind in KINDS:
        if kind not in kinds:
            continue
        spans = _WHOLE[kind](text) if kind in _WHOLE else _near_digits(stretches, text, _NUMBERS[kind])
        for start, end in spans:
            if all(end <= span.start or span.end <= start for span in results):
                results.append(PiiSpan(kind, start, end))
    return sorted(results, key=lambda span: span.start)


def mask(text: str, kinds: Sequence[Kind] = KINDS) -> tuple[str, dict[Kind, int]]:
    """Replaces personal data with placeholders, and counts it by kind."""
    counts: dict[Kind, int] = {}
    # Again until nothing is left: a placeholder changes what stands next to a number, which may then count as one.
    while spans := detect(text, kinds):
        parts, end = [], 0
        for span in spans:
            parts += [text[end : span.start], PLACEHOLDERS[span.kind]]
            end = span.end
            counts[span.kind] = counts.get(span.kind, 0) + 1
        text = "".join([*parts, text[end:]])
    return text, counts


def _near_digits(stretches: Sequence[tuple[int, int]], text: str, look: Callable[[str], Spans]) -> Spans:
    """Yields the matches of ``look`` near stretches of digits, with enough context for its lookarounds."""
    for first, last in stretches:
        shown = max(0, first - _SEEN_BEFORE)
        for start, end in look(text[shown : last + _SEEN_BEHIND]):
            if first - _OPENING <= start + shown < last:
                yield start + shown, end + shown


def _emails(text: str) -> Spans:
    if "@" in text:
        for match in _EMAIL.finditer(text):
            if match[2].lower() not in _FILE_SUFFIXES:
                yield match.span()


def _ibans(text: str) -> Spans:
    if not _IBAN_START.search(text):
        return
    for match in _IBAN.finditer(text):
        if is_iban(re.sub(r"[\s-]", "", match[0]).upper()):
            yield match.span()


def _resident_ids(text: str) -> Spans:
    for match in _RESIDENT_ID.finditer(text):
        if is_resident_id(match[0]):
            yield match.span()
    for match in _OLD_RESIDENT_ID.finditer(text):
        # Without a check digit it says less than a card's number, which has as many digits.
        if is_old_resident_id(match[0]) and not is_card(match[0]):
            yield match.span()


def _cards(text: str) -> Spans:
    for match in _CARD.finditer(text):
        if is_card(re.sub(r"\D", "", match[0])):
            yield match.span()


def _addresses(text: str) -> Spans:
    if _IPV4_HINT.search(text):
        for match in _IPV4.finditer(text):
            four = ipaddress.IPv4Address(match[0])
            before = text[max(0, match.start() - _BEFORE_VERSION) : match.start()]
            if four.is_global and not _VERSION.search(before):
                yield match.span()
    if _IPV6_HINT.search(text):
        for match in _IPV6.finditer(text):
            try:
                six = ipaddress.IPv6Address(match[0])
            except ValueError:
                continue
            if six in _GLOBAL and six.is_global:
                yield match.span()


def _ssns(text: str) -> Spans:
    return (match.span() for match in _SSN.finditer(text))


_WHOLE: dict[Kind, Callable[[str], Spans]] = {"email": _emails, "iban": _ibans, "ip": _addresses}


def find_phones(text: str) -> list[tuple[int, int]]:
    """Finds telephone numbers."""
    spans = [match.span() for match in _INTERNATIONAL.finditer(text) if _is_international(match[0])]
    spans += [match.span() for match in _NATIONAL.finditer(text) if _is_national(match[0])]
    spans += [match.span(1) for match in _AFTER_KEYWORD.finditer(text) if _is_phone_after_keyword(match[1])]
    return sorted(spans, key=lambda span: (span[0], -span[1]))


_NUMBERS: dict[Kind, Callable[[str], Spans]] = {
    "resident_id": _resident_ids,
    "card": _cards,
    "ssn": _ssns,
    "phone": find_phones,
}


def _is_international(number: str) -> bool:
    digits = re.sub(r"\D", "", number.removeprefix("00") if number.startswith("00") else number)
    code = _CODES.match(digits)
    if code is None or not 8 <= len(digits) <= 15:  # E.164: 15 digits at most
        return False
    if code[0] == "1":
        return re.fullmatch(r"1[2-9]\d{2}[2-9]\d{6}", digits) is not None
    # Grouped, or as long as a whole number: a short run after a plus may be a sum.
    return len(digits) >= 10 or re.search(r"\d[ .\-/(]", number) is not None


def _is_phone_after_keyword(number: str) -> bool:
    return number.count(".") != 1 and _ANY_DATE.fullmatch(number) is None  # with one point it is an amount


def _is_national(number: str) -> bool:
    digits = re.sub(r"\D", "", re.split(r"x|ext", number)[0])
    return 9 <= len(digits) <= 12 if digits.startswith("0") else True
