"""datatrove's PIIFormatter on texts from standard input: what it would replace, and how long that takes."""

import json
import sys
import time
from typing import Any

from datatrove.pipeline.formatters.pii import PIIFormatter


def main() -> None:
    """Find with its own expressions and validators; time its whole format()."""
    given = json.loads(sys.stdin.read())
    formatter = PIIFormatter()
    found: list[Any] = []
    replacers = (("email", formatter.emails_replacer), ("ip", formatter.ip_replacer))
    for row, text in enumerate(given["texts"]):
        for kind, replacer in replacers:
            for match in replacer.regex.finditer(text):
                if replacer.validator is None or replacer.validator(match.group(0)):
                    found.append((row, kind, match.start(), match.end()))
    seconds = []
    for _ in range(given["repeats"]):
        start = time.process_time()
        for text in given["texts"]:
            formatter.format(text)
        seconds.append(time.process_time() - start)
    print(json.dumps({"found": found, "seconds": seconds}))


if __name__ == "__main__":
    main()
