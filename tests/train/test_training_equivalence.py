"""For any layout of rows, loss and gradient are those of transformers' own forward; and the log of steps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.models.chat import TokenizedExample
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Unit, micro_batches, pack, packed_attention
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.objectives.sft import SftObjective
from posttrain.train.optim.schedule import scheduled_lr

pytestmark = pytest.mark.slow

IGNORED = -100
UNDROPPED = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0, "layerdrop": 0}
Fresh = Callable[..., LanguageModel]
Fit = Callable[..., list[StepValues]]


def targets(example: TokenizedExample) -> torch.Tensor:
    ids = torch.tensor(example.ids)
    return ids.where(torch.tensor(example.supervised), IGNORED)


def padded_loss(lm: LanguageModel, examples: Sequence[TokenizedExample]) -> tuple[torch.Tensor, int]:
    """transformers' loss over right-padded rows, as a sum, and the tokens in it."""
    width = max(len(example.ids) for example in examples)
    ids = torch.stack([_pad(torch.tensor(example.ids), width, 0) for example in examples])
    mask = torch.stack([_pad(torch.ones(len(example.ids), dtype=torch.long), width, 0) for example in examples])
    label_ids = torch.stack([_pad(targets(example), width, IGNORED) for example in examples])
    count = int((label_ids[:, 1:] != IGNORED).sum())
    return lm.model(input_ids=ids, attention_mask=mask, labels=label_ids).loss * count, count


def _pad(row: torch.Tensor, width: int, filler: int) -> torch.Tensor:
    return torch.nn.functional.pad(row, (0, width - len(row)), value=filler)


def gradients(lm: LanguageModel) -> dict[str, torch.Tensor]:
    result = {name: weight.grad.clone() for name, weight in lm.model.named_parameters() if weight.grad is not None}
    lm.model.zero_grad()
    return result


def backward_micro_batches(
    lm: LanguageModel, examples: Sequence[TokenizedExample], tokens: int, units: Sequence[Unit] | None = None
) -> tuple[float, int]:
    total, count = 0.0, 0
    with packed_attention(lm, max(len(example.ids) for example in examples)) as packs:
        for part in micro_batches(units or [[example] for example in examples], tokens):
            loss = SftObjective(part, TrainConfig()).loss(lm, pack(part, padded=not packs), range(len(part)))
            loss.sum.backward()
            total, count = total + loss.sum.item(), count + int(loss.count)
    return total, count


@pytest.mark.parametrize("tokens", [1, 130, 100_000])
def test_loss_and_gradient_do_not_depend_on_the_layout_of_rows(
    fresh: Fresh, examples: list[TokenizedExample], tokens: int
) -> None:
    lm = fresh()
    total, count = padded_loss(lm, examples)
    total.backward()
    padded_gradients = gradients(lm)
    separate_total = 0.0
    for example in examples:
        loss, _ = padded_loss(lm, [example])
        loss.backward()
        separate_total += loss.item()
    separate_gradients = gradients(lm)
    result, counted = backward_micro_batches(lm, examples, tokens)
    actual = gradients(lm)
    assert counted == count == sum(sum(example.supervised) for example in examples)
    assert result == pytest.approx(total.item(), rel=1e-5) == pytest.approx(separate_total, rel=1e-5)
    assert actual.keys() == padded_gradients.keys()
    for name in padded_gradients:
        for reference in (padded_gradients[name], separate_gradients[name]):
            scale = reference.abs().max()
            torch.testing.assert_close(actual[name] / scale, reference / scale, atol=3e-5, rtol=0)
            assert abs(float((actual[name] - reference).mean() / scale)) < 1e-6


def test_a_shared_prefix_is_read_once(fresh: Fresh, examples: list[TokenizedExample]) -> None:
    lm = fresh()
    system = len(lm.tokenizer("<|system|>Name the intent.<|end|><|user|>")["input_ids"])
    packed = pack([[example] for example in examples])
    assert packed.ids.shape[1] == sum(len(example.ids) - 1 for example in examples) - 9 * system
    assert packed.tokens == sum(len(example.ids) for example in examples)
    # Without a shared prefix, or with only supervised tokens, nothing is shared.
    for sequences in (
        [examples[0], TokenizedExample(examples[1].ids[1:], examples[1].supervised[1:])],
        [text(b"ab"), text(b"abc")],
    ):
        assert pack([[example] for example in sequences]).ids.shape[1] == sum(
            len(example.ids) - 1 for example in sequences
        )
        expected, count = padded_loss(lm, sequences)
        assert backward_micro_batches(lm, sequences, 100_000) == (pytest.approx(expected.item(), rel=1e-5), count)


def test_a_pair_shares_its_prompt(fresh: Fresh, examples: list[TokenizedExample]) -> None:
    lm = fresh()
    units = [
        [
            TokenizedExample(ids + answer, [False] * len(ids) + [True] * len(answer))
            for answer in ([70, 71, 257], [72, 257])
        ]
        for ids in (example.ids[: example.supervised.index(True)] for example in examples)
    ]
    sequences = [sequence for unit in units for sequence in unit]
    chosen_tokens = sum(len(unit[0].ids) for unit in units)
    assert pack(units).ids.shape[1] < chosen_tokens + 4 * len(units)
    expected, count = padded_loss(lm, sequences)
    expected.backward()
    reference = gradients(lm)
    assert backward_micro_batches(lm, sequences, 100_000, units) == (pytest.approx(expected.item(), rel=1e-5), count)
    for name, gradient in gradients(lm).items():
        torch.testing.assert_close(gradient, reference[name], atol=2e-5, rtol=1e-3)


def text(content: bytes) -> TokenizedExample:
    """A plain text: all its tokens are supervised."""
    return TokenizedExample(list(content), [True] * len(content))


@pytest.mark.parametrize(
    "rows",
    [
        [TokenizedExample([5, 6, 7, 8], [False, False, True, True])],
        [TokenizedExample([5, 6, 7, 8], [False, False, True, True])] * 3,  # the same row repeated
        [
            TokenizedExample([5, 6, 7], [False, False, True]),
            TokenizedExample([5, 6, 7, 8, 9], [False, False, False, False, True]),
        ],
        [
            TokenizedExample([5, 6, 7, 8, 9], [False, True, True, False, True]),
            TokenizedExample([5, 6, 3], [False, False, True]),
        ],
        [TokenizedExample([5, 6], [False, True]), TokenizedExample([5, 4, 3], [False, True, True])],
        [text(b"plain"), TokenizedExample([5, 6, 7], [False, False, True])],
    ],
)
def test_unusual_batches_match_transformers(fresh: Fresh, rows: list[TokenizedExample]) -> None:
    lm = fresh()
    expected, count = padded_loss(lm, rows)
    expected.backward()
    reference = gradients(lm)
    actual, counted = backward_micro_batches(lm, rows, 100_000)
    assert (actual, counted) == (pytest.approx(expected.item(), rel=1e-5), count)
    for name, gradient in gradients(lm).items():
        torch.testing.assert_close(gradient, reference[name], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "settings", "packs"),
    [
        ("llama", {}, True),
        ("granite", {"logits_scaling": 8.0}, True),
        ("cohere", {}, True),
        ("qwen2", {}, True),
        ("qwen3", {"head_dim": 32}, True),
        ("gemma3_text", {"head_dim": 32, "sliding_window": 512}, True),
        ("phi3", {}, True),
        ("olmo2", {}, True),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, True),
        ("gpt_neox", {}, True),
        # Their attention has a window, a cap or its own code, so they get padded rows.
        ("gemma2", {"head_dim": 32}, False),
        ("stablelm", {}, False),
        ("xglm", {"d_model": 64, "ffn_dim": 96, "attention_heads": 2, "num_layers": 2} | UNDROPPED, False),
        ("gemma2", {"head_dim": 32, "sliding_window": 8}, False),
        ("gemma3_text", {"head_dim": 32, "sliding_window": 8}, False),
        ("mistral", {"sliding_window": 8}, False),
    ],
)
def test_other_model_families_match_transformers(
    fresh: Fresh, examples: list[TokenizedExample], kind: str, settings: dict[str, Any], packs: bool
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = fresh()
    common = {
        "vocab_size": len(tiny.tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 256,
        "eos_token_id": 257,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(common | settings))).float().train()
    lm = LanguageModel(model, tiny.tokenizer, tiny.task)
    expected, _ = padded_loss(lm, examples)
    expected.backward()
    reference = gradients(lm)
    with packed_attention(lm, max(len(example.ids) for example in examples)) as packs_rows:
        assert packs_rows == packs
    actual, _ = backward_micro_batches(lm, examples, 100_000)
    assert actual == pytest.approx(expected.item(), rel=1e-4)
    actual_gradients = gradients(lm)
    largest = max(float(gradient.abs().max()) for gradient in reference.values())
    for name in reference:
        torch.testing.assert_close(actual_gradients[name] / largest, reference[name] / largest, atol=1e-4, rtol=0)


def test_steps_log_epoch_rate_and_tokens(
    fresh: Fresh, examples: list[TokenizedExample], config: TrainConfig, tmp_path: Path, fit: Fit
) -> None:
    steps = fit(fresh(), examples, config, 7, tmp_path)
    assert [(step.step, step.epoch) for step in steps] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert [step.lr for step in steps] == [
        scheduled_lr(config.schedule, config.learning_rate, number, 6) for number in range(6)
    ]
    for epoch in (0, 1):
        assert sum(step.tokens for step in steps if step.epoch == epoch) == sum(len(e.ids) for e in examples)
        supervised = sum(sum(e.supervised) for e in examples)
        assert sum(step.supervised_tokens for step in steps if step.epoch == epoch) == supervised


def test_compile_without_a_compiler_is_refused_at_once(
    fresh: Fresh,
    examples: list[TokenizedExample],
    config: TrainConfig,
    tmp_path: Path,
    fit: Fit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"train\.compile: no C\+\+ compiler is installed"):
        fit(fresh(), examples, config.model_copy(update={"compile": True}), 7, tmp_path)
