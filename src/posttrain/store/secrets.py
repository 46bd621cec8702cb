"""Masks passwords and keys in texts that are printed, logged or shown."""

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_WORDS = r"pass(?:word|wd)?|secret|token|api[-_]?key|access[-_]?key(?:[-_]?id)?|credentials?|signature"

_VARIABLE = r"\$\{\w+\}"  # no secret: its value comes from the environment

# All repetitions before a secret are bounded: a text of megabytes must not take minutes.
_IN_TEXT = (
    # `user:password@` in a URL, and a token alone before the host of a web address.
    rf"(?P<before>\b[a-z][a-z0-9+.-]{{,20}}://[^\s/:@]{{,200}}:)(?!{_VARIABLE}@)[^\s/]{{1,500}}(?=@)",
    rf"(?P<before>https?://)(?!{_VARIABLE}@)[^\s/:@]{{1,500}}(?=@)",
    # `?token=...` and `&X-Amz-Signature=...` in a URL.
    rf"(?P<before>[?&;](?:[\w-]{{,60}}[-_]|ssl)?(?:{_WORDS}|sig|key)=)(?!{_VARIABLE})[^&;#\s]+",
    # `API_TOKEN=...`, `--password ...` and `Bearer ...` in a command.
    rf"(?P<before>\b(?:\w{{1,60}}_)?(?:{_WORDS})=)(?!{_VARIABLE}|\$)[^\s'\"&;]+",
    rf"(?P<before>--?(?:[\w-]{{1,60}}-)?(?:{_WORDS})[ =])(?!{_VARIABLE}|\$)[^\s'\"&]+",
    rf"(?P<before>\b(?:Bearer|Basic) )(?!{_VARIABLE}|\$)[\w+/=.~-]{{8,}}",
)

_PATTERNS = [re.compile(pattern, re.IGNORECASE) for pattern in _IN_TEXT]

_SECRET_KEY = re.compile(rf"(?:.*[-_])?(?:{_WORDS})", re.IGNORECASE)

# Anybody who knows such a URL may call it: its path is the password.
_SECRET_URL_KEYS = ("webhook",)


def mask_text(text: str) -> str:
    """Masks passwords and keys in the URLs and commands of a text."""
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<before>{MASK}", text)
    return text


def mask_values(values: Any) -> Any:
    """Masks the secrets in JSON values: in URLs and commands, and texts under a key such as ``aws_secret``."""
    if isinstance(values, Mapping):
        return {key: _mask_entry(str(key), value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [mask_values(value) for value in values]
    return mask_text(values) if isinstance(values, str) else values


def _mask_entry(key: str, value: Any) -> Any:
    if not isinstance(value, str) or not value or re.fullmatch(_VARIABLE, value):
        return mask_values(value)
    if _SECRET_KEY.fullmatch(key):
        return MASK
    if key in _SECRET_URL_KEYS:
        value = re.sub(r"(?<=[^/]/)[^/].*", MASK, value, count=1)
    return mask_text(value)
