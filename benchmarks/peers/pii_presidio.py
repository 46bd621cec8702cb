"""Presidio's recognisers that need no language model, on texts from standard input: what they find, and how long."""

import json
import sys
import time
from typing import Any

from presidio_analyzer.predefined_recognizers import (
    CreditCardRecognizer,
    EmailRecognizer,
    IbanRecognizer,
    IpRecognizer,
    PhoneRecognizer,
    UsSsnRecognizer,
)

_LEAST = 0.3  # below it a recogniser says that it is guessing


def main() -> None:
    """Run each recogniser on each text."""
    given = json.loads(sys.stdin.read())
    recognisers = [
        EmailRecognizer(),
        PhoneRecognizer(),
        IpRecognizer(),
        CreditCardRecognizer(),
        IbanRecognizer(),
        UsSsnRecognizer(),
    ]
    seconds = []
    found: list[Any] = []
    for _ in range(given["repeats"]):
        start = time.process_time()
        found = [
            (row, result.entity_type, result.start, result.end)
            for row, text in enumerate(given["texts"])
            for recogniser in recognisers
            for result in recogniser.analyze(text, recogniser.supported_entities, None)
            if result.score >= _LEAST
        ]
        seconds.append(time.process_time() - start)
    print(json.dumps({"found": found, "seconds": seconds}))


if __name__ == "__main__":
    main()
