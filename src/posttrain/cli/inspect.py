"""Examples as a model will see them in training, coloured by mask."""

import itertools
from typing import Any

import pyarrow as pa
from rich.text import Text

from posttrain.cli.shared import console
from posttrain.models.chat import Encoded
from posttrain.train.alone import AloneConfig
from posttrain.train.examples import encode, encoder_of
from posttrain.train.lessons.make import learned_from, shape_of
from posttrain.train.objectives.registry import OBJECTIVES
from posttrain.train.tokens.fit import check_template

_STYLES = {"trained": "bold green", "context": "dim", "cut off": "red strike"}
_RESULTS = {"reward": "read to its end for one reward", "classes": "read to its end for its class"}


def print_examples(config: AloneConfig, source: str, records: pa.Table) -> None:
    """Print every record's sequences: what is trained, what is context, and what is cut off.

    Where a whole text has one result, such as a reward, no token is trained, and the title says what it is read for.
    """
    result = _RESULTS.get(OBJECTIVES[config.train.objective].output)
    encoder = encoder_of(source, config.task)
    shape, limit = shape_of(config.train, records), config.train.max_length
    check_template(encoder.chat)
    encode(encoder, records, limit, shape)  # says what is wrong with them
    whole, _ = encode(encoder, records, max(limit, 1 << 30), shape)
    for number, (unit, record) in enumerate(zip(whole, records["id"].to_pylist(), strict=True), 1):
        learned = learned_from(config.train, unit)
        sides = ("chosen", "rejected") if shape == "pair" else ("",)
        for side, sequence, before in zip(sides, learned, unit, strict=True):
            title = f"{number} {side}".rstrip()
            use = result or f"{sum(sequence.supervised)} trained"
            console.rule(f"{title}  {record}  {len(sequence.ids)} tokens, {use}", align="left")
            cut = max(0, len(before.ids) - limit)  # a class has a token behind the text, which counts
            console.print(_coloured(encoder.chat.tokenizer, sequence, cut), soft_wrap=True)


def _coloured(tokenizer: Any, sequence: Encoded, cut: int) -> Text:
    kinds = ["cut off" if at < cut else "trained" if on else "context" for at, on in enumerate(sequence.supervised)]
    text = Text()
    for kind, run in itertools.groupby(zip(kinds, sequence.ids, strict=True), key=lambda pair: pair[0]):
        words = tokenizer.decode([token for _, token in run])
        if not console.is_terminal:
            text.append(f"[{kind}] ")
            words += "\n"
        text.append(words, _STYLES[kind])
    return text
