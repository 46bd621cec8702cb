"""Personal data in a text: where it stands and of which kind it is."""

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from posttrain.data.pii.checksums import IBAN_LENGTHS, is_card, is_iban, is_old_resident_id, is_resident_id
from posttrain.data.pii.phones import phones

Kind = Literal["email", "iban", "resident_id", "card", "ip", "ssn", "phone"]
KINDS: tuple[Kind, ...] = ("email", "iban", "resident_id", "card", "ip", "ssn", "phone")
"""In the order in which they are looked for: what one has taken, those after it do not see."""

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
"""What every text with personal data holds, as an expression that RE2 runs in one pass."""


class Found(NamedTuple):
    """A piece of personal data: ``text[start:end]``."""

    kind: Kind
    start: int
    end: int


def detect(text: str, kinds: Sequence[Kind] = KINDS, *, reserved: bool = False) -> list[Found]:
    """The pieces of personal data in a text, from left to right; none overlaps another.

    Args:
        kinds: which are looked for.
        reserved: whether IP addresses count that reach nobody: private, loopback, link-local, for documentation.
    """
    found: list[Found] = []
    stretches = [match.span() for match in _DIGITS.finditer(text)]
    for kind in KINDS:
        if kind not in kinds:
            continue
        spans = _WHOLE[kind](text, reserved) if kind in _WHOLE else _among(stretches, text, _NUMBERS[kind])
        for start, end in spans:
            if all(end <= one.start or one.end <= start for one in found):
                found.append(Found(kind, start, end))
    return sorted(found, key=lambda one: one.start)


def mask(text: str, kinds: Sequence[Kind] = KINDS, *, reserved: bool = False) -> tuple[str, dict[Kind, int]]:
    """The text with a placeholder for each piece of personal data, and how many of each kind there were.

    The outcome holds none: what comes to light beside a placeholder is masked in turn.
    """
    counts: dict[Kind, int] = {}
    while found := detect(text, kinds, reserved=reserved):
        parts, end = [], 0
        for one in found:
            parts += [text[end : one.start], PLACEHOLDERS[one.kind]]
            end = one.end
            counts[one.kind] = counts.get(one.kind, 0) + 1
        text = "".join([*parts, text[end:]])
    return text, counts


Spans = Iterable[tuple[int, int]]

# Numbers are looked for around such a stretch alone: most of a text is none.
_DIGITS = re.compile(r"[0-9](?:[ .()/\-]{0,4}[0-9]){7,}")
_SEEN_BEFORE, _SEEN_BEHIND, _OPENING = 48, 24, 4


def _among(stretches: Sequence[tuple[int, int]], text: str, look: Callable[[str], Spans]) -> Spans:
    """What ``look`` finds in stretches of digits, shown with the characters around them that it asks for."""
    for first, last in stretches:
        shown = max(0, first - _SEEN_BEFORE)
        for start, end in look(text[shown : last + _SEEN_BEHIND]):
            if first - _OPENING <= start + shown < last:
                yield start + shown, end + shown


# Borders are of ASCII letters and digits: in Chinese no space stands between a word and a number.
_START, _END = r"(?<![0-9A-Za-z])", r"(?![0-9A-Za-z])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
# The characters of RFC 5322's dot-atom that people do use; names that are not written in ASCII are left out.
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+'\-])[A-Za-z0-9_%+'\-]{1,64}(?:\.[A-Za-z0-9_%+'\-]{1,64}){0,8}"
    rf"@((?:{_LABEL}\.){{1,6}}(xn--[A-Za-z0-9\-]{{2,59}}|[A-Za-z]{{2,24}})){_END}"
)
# ``logo@2x.png`` is a picture.
_FILES = frozenset(
    ("png", "jpg", "jpeg", "gif", "svg", "webp", "bmp", "ico", "css", "js", "json", "html", "pdf", "txt")
)
# Capitals may have spaces anywhere; what is not all capitals, or has hyphens, stands in fours or in one piece: words
# between single spaces would else be tried too.
_IBAN = re.compile(
    _START
    + "(?=[A-Za-z]{2}[0-9]{2})(?:"
    + "|".join(
        f"(?:{its})[0-9]{{2}}(?:[ \u00a0]?[A-Z0-9]){{{length - 4}}}{_END}"
        + "".join(
            f"|(?i:(?:{its})[0-9]{{2}}(?:{gap}[A-Z0-9]{{4}}){{{length // 4 - 1}}}"
            + (f"{gap}[A-Z0-9]{{{length % 4}}}" if length % 4 else "")
            + f"{_END})"
            for gap in ("", " ", "\u00a0", "-")
        )
        for length in sorted(set(IBAN_LENGTHS.values()))
        for its in ("|".join(sorted(one for one, characters in IBAN_LENGTHS.items() if characters == length)),)
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
_FOUR = re.compile(r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]")
_COLONS = re.compile(r":[0-9A-Fa-f]{0,4}:")
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


def _emails(text: str, reserved: bool) -> Spans:
    if "@" in text:
        for match in _EMAIL.finditer(text):
            if match[2].lower() not in _FILES:
                yield match.span()


def _ibans(text: str, reserved: bool) -> Spans:
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


def _addresses(text: str, reserved: bool) -> Spans:
    if _FOUR.search(text):
        for match in _IPV4.finditer(text):
            four = ipaddress.IPv4Address(match[0])
            before = text[max(0, match.start() - _BEFORE_VERSION) : match.start()]
            if (four.is_global or reserved) and not _VERSION.search(before):
                yield match.span()
    if _COLONS.search(text):
        for match in _IPV6.finditer(text):
            try:
                six = ipaddress.IPv6Address(match[0])
            except ValueError:
                continue
            known = six in _GLOBAL and six.is_global
            if known or (reserved and (six.is_private or six.is_link_local) and not six.is_unspecified):
                yield match.span()


def _ssns(text: str) -> Spans:
    return (match.span() for match in _SSN.finditer(text))


_WHOLE: dict[Kind, Callable[[str, bool], Spans]] = {"email": _emails, "iban": _ibans, "ip": _addresses}
_NUMBERS: dict[Kind, Callable[[str], Spans]] = {
    "resident_id": _resident_ids,
    "card": _cards,
    "ssn": _ssns,
    "phone": phones,
}
