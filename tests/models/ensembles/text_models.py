"""Models of free text: tiny ones that learn a few answers in seconds, and some with given answers in their place."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.models.ensembles import members as members_module
from posttrain.models.ensembles.config import EnsembleConfig
from posttrain.models.ensembles.ensemble import Ensemble
from posttrain.models.ensembles.members import Member
from posttrain.models.generator import Answer, FinishReason
from posttrain.models.language_model import LanguageModel, load_language_model, save_language_model
from posttrain.models.task import TaskConfig, Turns
from posttrain.models.tiny import write_tiny_model

SmallWorkspaces = Any

WORDS = ("late", "lost", "wrong", "slow", "blue", "high", "low", "odd", "new", "fine", "due", "gone", "cut", "old")

CARDS, CATS = ([f"{start} {word}" for word in WORDS] for start in ("my bank card is", "the little cat is"))

ROWS = [
    {"text": text, "label": label}
    for pair in zip(CARDS, CATS, strict=True)
    for text, label in zip(pair, ("bank", "home"), strict=True)
]
"""Records of two kinds in turn, each with its right answer."""

TASK = TaskConfig(max_new_tokens=6)


def ask(text: str) -> Turns:
    return [{"role": "user", "content": text}]


def taught(folder: Path, pairs: Sequence[tuple[str, str]], steps: int = 40, seed: int = 0) -> LanguageModel:
    """Writes and returns a tiny model after ``steps`` of Adam on prompts with answers, all in one batch."""
    lm = load_language_model(write_tiny_model(folder, seed=seed, width=64), TASK, "float32")
    examples = [lm.encode(ask(prompt), answer) for prompt, answer in pairs]
    width = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    targets = torch.full_like(ids, -100)
    for row, example in enumerate(examples):
        own = torch.tensor(example.ids)
        ids[row, : len(own)] = own
        targets[row, : len(own)] = own.where(torch.tensor(example.supervised), -100)
    optimizer = torch.optim.Adam(lm.model.parameters(), lr=3e-3)
    for _ in range(steps):
        lm.model(input_ids=ids, labels=targets).loss.backward()  # causal: padding is behind every token that counts
        optimizer.step()
        optimizer.zero_grad()
    save_language_model(lm, folder, "float32")
    return lm


@pytest.fixture(scope="session")
def specialists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, ``bank`` and ``home``, which answer just that to everything: half of `ROWS`."""
    folder = tmp_path_factory.mktemp("specialists")
    for seed, name in enumerate(("bank", "home")):
        taught(folder / name, [(row["text"], name) for row in ROWS[:4]], seed=seed)
    return folder


@pytest.fixture
def text_workspace(small: SmallWorkspaces, specialists: Path) -> Path:
    """A workspace of free text: `specialists` as ``models``, held-out records in ``held.csv`` and test records."""
    suites = {"test": {"scorer": "exact_match"}, "overlap": {"scorer": "token_f1"}}
    root: Path = small(task={"labels": None, "max_new_tokens": 6}, evaluate={"suites": suites})
    (root / "models").symlink_to(specialists)
    small.write(root / "held.csv", ROWS[:16])
    small.write(root / "test.csv", ROWS[16:])
    return root


class GivenTexts:
    """Models that write given answers; ``asked`` has the prompts that each was asked, by its name.

    A text that ends in ``…`` was cut off. The confidence of an answer is that of ``confidence``, and its length that of
    its text.
    """

    def __init__(self, patch: pytest.MonkeyPatch, texts: Sequence[Sequence[str]], confidence: np.ndarray) -> None:
        self.asked: dict[str, list[int]] = {}
        self.members = [Member(f"m{number}", _Model(number)) for number in range(len(texts))]  # type: ignore[arg-type]
        self._texts, self._confidence = texts, confidence
        patch.setattr(members_module, "greedy_answers", self._generate)

    def ensemble(self, **config: object) -> Ensemble:
        values = {"models": [member.name for member in self.members], **config}
        return Ensemble(EnsembleConfig.read(values, "ensemble.yaml"), self.members, TASK)

    def _generate(self, model: "_Model", prompts: Sequence[Turns], log_probabilities: bool) -> list[Answer]:
        rows = [int(prompt[0]["content"]) for prompt in prompts]
        self.asked.setdefault(f"m{model.number}", []).extend(rows)
        answers = []
        for row in rows:
            text, confidence = self._texts[model.number][row], self._confidence[model.number][row]
            finish: FinishReason = "length" if text.endswith("…") else "stop"
            ids, log_probabilities = tuple(range(len(text))), (float(np.log(confidence)),)
            answers.append(Answer(text.rstrip("…"), finish, ids, log_probabilities))
        return answers


class _Model:
    """A model of ten times as many weights as the one before, whose prompts have one token."""

    def __init__(self, number: int) -> None:
        self.number, self.decoder = number, torch.nn.Linear(10 ** (number + 1), 1, bias=False)
        self.decoder.get_input_embeddings = lambda: torch.nn.Embedding(0, 1)  # type: ignore[assignment]

    def __call__(self) -> "_Model":
        return self

    def prompt_ids(self, prompt: Turns) -> list[int]:
        return [0]
