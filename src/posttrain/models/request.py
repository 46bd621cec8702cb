"""A record as a request to the model, one way everywhere."""

from collections.abc import Mapping
from typing import Any

from posttrain.models.task import Turns


def request(record: Mapping[str, Any]) -> Turns:
    """The turns that a model is asked with; plain text is asked as a user's turn; none where there is neither.

    Args:
        record: ``prompt`` and ``text`` by the record schema.
    """
    if record["prompt"]:
        return [{"role": turn["role"], "content": turn["content"]} for turn in record["prompt"]]
    return [{"role": "user", "content": record["text"]}] if record["text"] else []
