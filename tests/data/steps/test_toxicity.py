"""Listed words are counted as whole words, and classifiers score texts."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from posttrain.data.quality.classifier import train_quality
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.step import DataStep
from posttrain.data.steps.toxicity import TermList, Toxicity, count_terms, read_terms
from posttrain.models.classifier import SequenceClassifier
from posttrain.models.tiny import byte_tokenizer
from posttrain.store.errors import UserError
from posttrain.testing.steps import StepContract, lines, reasons, table_of

TERMS = TermList.from_lines(["# said why", "", "darn", "Blast It", "ÄRGER", "坏词", "heck"])


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("a darn day", 1),
        ("DARN, darn: Darn!", 3),
        ("darned undarn darn_ ", 1),
        ("blast\n it", 1),
        ("blast the it", 0),
        ("blast it blast it", 2),
        ("so viel Ärger hier", 1),
        ("这是坏词吗", 1),
        ("坏 的 词", 0),
        ("d*rn", 0),
        ("", 0),
    ],
)
def test_terms_are_whole_words(text: str, result: int) -> None:
    assert count_terms([text], TERMS)[0, 0] == result


def test_words_are_counted() -> None:
    assert count_terms(["one two, three", "坏词x", ""], TERMS)[:, 1].tolist() == [3, 3, 0]


def test_the_built_in_list_holds_words() -> None:
    terms = read_terms(None)
    assert count_terms(["a piece of shit", "a piece of the cake in Scunthorpe"], terms)[:, 0].tolist() == [2, 0]


class TestWords(StepContract):
    @pytest.fixture
    def step(self, tmp_path: Path) -> DataStep:
        (tmp_path / "words.txt").write_text("darn\nblast it\n")
        return Toxicity(words="words.txt", max_hits=10).located(tmp_path)

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(
            "fine",
            "darn this",
            {"prompt": "a " * 30, "completion": "darn"},
            {"prompt": "hi", "completion": "ok", "rejected": "blast it"},
            {"prompt": "hi"},
            "",
        )

    def test_frequent_words_reject(self, step: DataStep, table: pa.Table) -> None:
        step.check()
        outcome = apply_step(step, table)
        assert reasons(outcome) == {2: "listed words", 4: "listed words"}
        assert outcome.facts["toxicity"].to_pylist() == pytest.approx([0, 50, 100 / 31, 25, 0, 0])

    def test_any_word_rejects_at_zero(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step.model_copy(update={"max_hits": 0.0}), table)
        assert lines(outcome.rejected) == [2, 3, 4]

    def test_a_report_rejects_nothing(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step.model_copy(update={"action": "report"}), table)
        assert outcome.kept.equals(table)
        assert outcome.facts["toxic_words"].to_pylist()[1] == 50

    def test_the_key_holds_the_content_of_the_list_not_its_name(self, step: Toxicity, tmp_path: Path) -> None:
        (tmp_path / "same.txt").write_bytes((tmp_path / "words.txt").read_bytes())
        (tmp_path / "other.txt").write_text("heck\n")
        copy, other_list = (Toxicity(words=name, max_hits=10).located(tmp_path) for name in ("same.txt", "other.txt"))
        assert copy.key() == step.key() != other_list.key()


def _write(folder: Path, problem: str | None) -> Path:
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = byte_tokenizer()
    config: Any = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        id2label={0: "clean", 1: "insult", 2: "threat"},
        label2id={"clean": 0, "insult": 1, "threat": 2},
        problem_type=problem,
        initializer_range=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


TEXTS = [
    "you are kind",
    "what a bad thing to say",
    "x",
    "",
    "a longer text of more than thirty-two characters",
    "z" * 150,
]


@pytest.fixture(scope="module", params=[None, "multi_label_classification"])
def classifier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("classifier"), request.param)


def _by_hand(folder: Path, text: str) -> float:
    """Probability of insult or threat, one window at a time, by transformers alone."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = tokenizer(text)["input_ids"] or [tokenizer.pad_token_id]
    result = []
    for start in range(0, len(ids), 64):
        with torch.no_grad():
            logits = model(torch.tensor([ids[start : start + 64]])).logits[0]
        if model.config.problem_type:
            result.append(float(logits.sigmoid()[1:].max()))
        else:
            result.append(float(logits.softmax(-1)[1:].sum()))
    return max(result)


def test_probabilities_equal_those_of_transformers(classifier: Path) -> None:
    model = SequenceClassifier.load(classifier)
    result = model.probabilities(TEXTS, model.label_indices(["insult", "threat"], "labels"))
    assert result == pytest.approx([_by_hand(classifier, text) for text in TEXTS], abs=1e-5)
    assert np.ptp(result) > 0.01


class TestAClassifier(StepContract):
    @pytest.fixture
    def step(self, classifier: Path) -> DataStep:
        result = SequenceClassifier.load(classifier).probabilities(TEXTS, [1, 2])
        threshold = float(np.median(result))
        return Toxicity(
            classifier=str(classifier), toxic_labels=["insult", "threat"], classifier_threshold=threshold, max_hits=None
        )

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(*TEXTS)

    def test_toxic_texts_are_rejected(self, step: Toxicity, table: pa.Table) -> None:
        step.check()
        outcome = apply_step(step, table)
        result = np.array(outcome.facts["toxicity"].to_pylist())
        assert lines(outcome.rejected) == (np.flatnonzero(result >= step.classifier_threshold) + 1).tolist()
        assert set(reasons(outcome).values()) == {"toxic"}
        assert outcome.facts["toxic_words"].to_pylist() == [0] * 6


@pytest.mark.slow
def test_a_linear_classifier_rejects_bad_texts(tmp_path: Path) -> None:
    good, bad = ([f"{word} {letter}" for letter in "abcdefgh"] for word in ("kind", "vile"))
    train_quality(good, bad).save(tmp_path)
    outcome = apply_step(Toxicity(classifier=str(tmp_path), max_hits=None), table_of("kind x", "vile x"))
    assert reasons(outcome) == {2: "toxic"}


def test_unknown_labels_of_the_classifier_raise(classifier: Path) -> None:
    with pytest.raises(UserError, match=r"no label `insults`.*did you mean `insult`"):
        Toxicity(classifier=str(classifier), toxic_labels=["insults"]).check()
    with pytest.raises(UserError, match="no toxic label is set"):
        Toxicity(classifier=str(classifier)).check()


def test_check_raises_for_missing_and_invalid_files(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("# nothing\n")
    (tmp_path / "bytes.txt").write_bytes(b"ok\n\xff\n")
    for name, message in (("empty.txt", "lists no term"), ("none.txt", "no such file"), ("bytes.txt", "bytes.txt:2")):
        with pytest.raises(UserError, match=message):
            Toxicity(words=name).located(tmp_path).check()
    with pytest.raises(UserError, match="there is no"):
        Toxicity(classifier="none").located(tmp_path).check()
