"""Telephone numbers, in the ways people write them that nothing else looks like.

A run of digits alone is no telephone number: amounts, identifiers and dates are such too. What counts is a country code
after ``+`` or ``00``, a trunk ``0`` or an area code with separators, a Chinese mobile number, or, for looser
groupings, a word such as "phone" right before.
"""

import re

# Country calling codes of ITU-T E.164; no code is the beginning of another.
_CODES = re.compile(
    r"1|7|2[07]|2[1-689]\d|3[0-4]|3[578]\d|36|39|4[013-9]|42\d|5[1-8]|5[09]\d|6[0-6]|6[789]\d|8[1246]|8[05789]\d|9[0-58]|9[679]\d"
)
_BEFORE = r"(?<![0-9A-Za-z+$€£¥₹#=*/_%&@<.-])(?<![0-9][ ,:])"
_AFTER = r"(?![0-9A-Za-z%*=@]|[-./:,+*][0-9])"
_EXTENSION = r"(?:\s?(?:x|ext\.?)\s?\d{1,5})?"
_GROUPS = r"\d{1,15}(?:[ .\-/]{1,2}\d{1,12}|[ .\-]?\(\d{1,5}\)[ .\-]?\d{1,12}){0,6}"
_DATE = r"(?!\d{1,2}([./-])\d{1,2}\1\d{4})"

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
_INTRODUCED = re.compile(
    r"(?:\b(?:tel|telephone|phone|mobile|cell|fax|whatsapp|call(?: me)?(?: at| on)?|reach me (?:at|on))"
    r"(?: (?:number|no))?"
    r"|电话|手机|手机号|联系电话|传真)(?:\.|\b| (?:is|at|on)\b|[是为号码])*[:：]? ?"
    rf"({_BEFORE}\(?\d(?:[ .\-()]{{0,2}}\d){{7,11}}){_AFTER}",
    re.IGNORECASE | re.ASCII,
)
_ANY_DATE = re.compile(r"(?:19|20)\d\d([-./ ]?)\d\d\1\d\d|\d\d([-./ ])\d\d\2(?:19|20)\d\d", re.ASCII)


def phones(text: str) -> list[tuple[int, int]]:
    """Where telephone numbers begin and end."""
    found = [match.span() for match in _INTERNATIONAL.finditer(text) if _international(match[0])]
    found += [match.span() for match in _NATIONAL.finditer(text) if _national(match[0])]
    found += [match.span(1) for match in _INTRODUCED.finditer(text) if _introduced(match[1])]
    return sorted(found, key=lambda span: (span[0], -span[1]))


def _international(number: str) -> bool:
    digits = re.sub(r"\D", "", number.removeprefix("00") if number.startswith("00") else number)
    code = _CODES.match(digits)
    if code is None or not 8 <= len(digits) <= 15:  # E.164: 15 digits at most
        return False
    if code[0] == "1":
        return re.fullmatch(r"1[2-9]\d{2}[2-9]\d{6}", digits) is not None
    # Grouped, or as long as a whole number: a short run after a plus may be a sum.
    return len(digits) >= 10 or re.search(r"\d[ .\-/(]", number) is not None


def _introduced(number: str) -> bool:
    return number.count(".") != 1 and _ANY_DATE.fullmatch(number) is None  # with one point it is an amount


def _national(number: str) -> bool:
    digits = re.sub(r"\D", "", re.split(r"x|ext", number)[0])
    return 9 <= len(digits) <= 12 if digits.startswith("0") else True
