"""Dialogues in one string, as Anthropic's HH-RLHF keeps its preference pairs.

Every turn starts with an empty line and its speaker: ``"\\n\\nHuman: ...\\n\\nAssistant: ..."`` (Bai et al. 2022,
"Training a Helpful and Harmless Assistant", the published ``chosen`` and ``rejected``).
"""

import re
from typing import Any

from posttrain.data.records.content import BadRecord, Content, checked_prompt, common_start
from posttrain.data.records.normalise import Turn

_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_dialogue(value: Any) -> bool:
    """Whether a cell holds such a dialogue, in which the human speaks first."""
    return isinstance(value, str) and value.startswith("\n\nHuman:")


def turns_in_dialogue(text: str) -> list[Turn]:
    """The turns without their outer whitespace; what one speaker says in several turns on end is one."""
    parts = _SPEAKER.split(text)
    turns: list[Turn] = []
    for speaker, said in zip(parts[1::2], parts[2::2], strict=True):
        role, content = _ROLES[speaker], said.strip()
        if turns and turns[-1]["role"] == role:
            content = "\n\n".join(part for part in (turns.pop()["content"], content) if part)
        turns.append({"role": role, "content": content})
    return turns


def preference_of_dialogues(chosen: str, rejected: str) -> Content:
    """The turns that both dialogues share are the prompt, the turn in which they differ the answers.

    An empty answer is left out with a note rather than refused: the published set has some.
    """
    better, worse = turns_in_dialogue(chosen), turns_in_dialogue(rejected)
    prompt = common_start(better, worse)
    answers = []
    for column, turns in (("chosen", better), ("rejected", worse)):
        rest = turns[len(prompt) :]
        if len(rest) != 1 or rest[0]["role"] != "assistant":
            message = f"`{column}` does not end in one answer to what both dialogues share"
            raise BadRecord("wrong role", message, "give both the same turns up to the last answer")
        if not rest[0]["content"]:
            raise BadRecord("empty answer", f"`{column}` ends in an empty answer", blocking=False)
        answers.append(rest[0]["content"])
    return Content(checked_prompt(prompt), answers[0], answers[1])
