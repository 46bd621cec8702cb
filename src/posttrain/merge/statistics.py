"""Statistics of one model on its data: the diagonal Fisher information, and Gram matrices of linear layers' inputs."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from posttrain.merge.recipe import Answers
from posttrain.models.head import token_log_probabilities
from posttrain.models.language_model import LanguageModel
from posttrain.models.likelihood import context_length
from posttrain.models.task import Turns
from posttrain.store.errors import UserError
from posttrain.store.message import counted
from posttrain.store.progress import progress_bar

log = logging.getLogger("posttrain")

Example = tuple[Turns, str]
"""A conversation, and its answer."""


@dataclass(frozen=True)
class ModelStatistics:
    """Statistics of one model on its data.

    Attributes:
        tensors: float32, by the name of the parameter: the Fisher information, of the parameter's shape, or the Gram
            matrix of a linear layer's inputs, [inputs, inputs].
        shared: for layers that read what another one reads, as keys do what queries do, the name of that one's tensor.
        buffers: tensors of the model that are not parameters, and have no statistics.
        examples: number of examples.
        tokens: number of their answers' tokens.
        log_likelihood: of the answers, in nats; NaN where it was not computed.
    """

    tensors: dict[str, Tensor]
    examples: int
    tokens: int
    log_likelihood: float = float("nan")
    shared: dict[str, str] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)

    @property
    def norm(self) -> float:
        """Returns the sum of all elements: of Fisher information its trace, the mean squared norm of the gradients."""
        return sum(float(tensor.sum(dtype=torch.float64)) for tensor in self.tensors.values())


@dataclass(frozen=True)
class TokenSequence:
    """Token ids of an example, whose last ``answer`` ones are the answer with its stop token."""

    ids: list[int]
    answer: int


def fisher_information(
    lm: LanguageModel, examples: Sequence[Example], *, answers: Answers = "data", seed: int = 0
) -> ModelStatistics:
    """Computes the diagonal of the Fisher information of every parameter.

    F = mean over examples of (d log p(answer | prompt) / d theta)^2, element by element, one example at a time
    (Matena and Raffel 2022, arXiv:2111.09832, section 2). The log-likelihood of an answer is the sum over its tokens,
    the stop token included.

    With the answers of the data this is the empirical Fisher information, which is that of the model only where it has
    the distribution of the data (Kunstner et al. 2019, arXiv:1905.12558). With ``sampled`` answers each token is drawn
    from the model, after the data's tokens before it: an unbiased estimate of the model's own at these contexts. A
    parameter that two layers share counts once, with the sum of its gradients.

    Args:
        lm: the model, in float32; it takes as much memory again for the sums.
        examples: conversations with answers.
        answers: ``data`` or ``sampled``.
        seed: of sampled answers.

    Raises:
        UserError: no example fits the model's context, or a gradient is NaN or infinite.
    """
    sequences = encode(lm, examples)
    parameters = dict(lm.model.named_parameters())
    sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    log_likelihood = 0.0
    with _squared_gradients(parameters, sums), progress_bar("Fisher", len(sequences), "examples") as advance:
        for number, sequence in enumerate(sequences):
            states, targets = _predicting_states(lm, sequence)
            log_probabilities = token_log_probabilities(lm, states, targets)
            log_likelihood += float(log_probabilities.detach().double().sum())
            if answers == "sampled":
                log_probabilities = token_log_probabilities(lm, states, _sample(lm, states, seed + number))
            log_probabilities.sum().backward()  # type: ignore[no-untyped-call]
            advance(1)
    for name, total in sums.items():
        if not torch.isfinite(total.div_(len(sequences))).all():
            raise UserError(f"the gradient of {name} is NaN or infinite", where="data", fix="use an undamaged model")
    return ModelStatistics(
        {name: total.cpu() for name, total in sums.items()},
        len(sequences),
        sum(sequence.answer for sequence in sequences),
        log_likelihood,
        buffers=[name for name, _ in lm.model.named_buffers()],
    )


@torch.inference_mode()
def input_grams(lm: LanguageModel, examples: Sequence[Example]) -> ModelStatistics:
    """Computes the Gram matrix X^T X of the inputs of every linear layer.

    X has a row for each token that the model reads of prompt and answer (Jin et al. 2023, arXiv:2212.09849, algorithm
    1). The output head counts, unless it shares its weights with the embedding, which is not a linear layer. The
    products of one example are summed in float32, and those of the examples in float64.

    Args:
        lm: the model.
        examples: conversations with answers.

    Raises:
        UserError: the model has no linear layers, or no example fits its context.
    """
    sequences = encode(lm, examples)
    sums: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    last: tuple[Tensor | None, str] = (None, "")

    def add(name: str, inputs: Tensor) -> None:
        nonlocal last
        # The same object, not equal numbers: keys and values read what queries read.
        if inputs is last[0] and name not in sums:
            shared[name] = last[1]
        if name in shared:
            return
        last = inputs, name
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        if name not in sums:
            sums[name] = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
        sums[name].add_(rows.T @ rows)

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, inputs: add(name, inputs[0])

    head, embedding = lm.model.get_output_embeddings(), lm.model.get_input_embeddings()
    names = {module: f"{name}.weight" for name, module in lm.model.named_modules() if isinstance(module, nn.Linear)}
    with ExitStack() as hooks, progress_bar("Gram matrices", len(sequences), "examples") as advance:
        for module, name in names.items():
            hooks.callback(module.register_forward_pre_hook(watch(name)).remove)
        for sequence in sequences:
            hidden = hidden_states(lm, sequence)
            if head in names and head.weight is not embedding.weight:
                # By hand: the head's own forward pass would compute logits of all tokens.
                add(names[head], hidden)
            advance(1)
    if not sums:
        raise UserError(
            f"models of type {lm.model.config.model_type} have no linear layers that regmean knows",
            where="method",
            fix="use fisher, or another method",
        )
    tensors = {name: total.float().cpu() for name, total in sums.items()}
    return ModelStatistics(tensors, len(sequences), sum(sequence.answer for sequence in sequences), shared=shared)


def encode(lm: LanguageModel, examples: Sequence[Example]) -> list[TokenSequence]:
    """Returns the examples as tokens, without those that are longer than the model's context.

    Raises:
        UserError: none is left.
    """
    sequences = []
    for prompt, answer in examples:
        before, after = lm.prompt_ids(prompt), lm.answer_ids(answer)
        # The last token is only predicted.
        if before and len(before) + len(after) - 1 <= context_length(lm):
            sequences.append(TokenSequence([*before, *after], len(after)))
    if sequences and (left_out := len(examples) - len(sequences)):
        log.warning("left out: %d of %d records that are longer than the model's context", left_out, len(examples))
    if not sequences:
        raise UserError(
            f"none of {counted(len(examples), 'record')} fits the model's context", where="data", fix="use others"
        )
    return sequences


def hidden_states(lm: LanguageModel, sequence: TokenSequence) -> Tensor:
    """Returns the hidden states [S, D] of all tokens but the last one, which is only predicted."""
    ids = torch.tensor([sequence.ids[:-1]], device=lm.device)
    hidden: Tensor = lm.decoder(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[0]


def _predicting_states(lm: LanguageModel, sequence: TokenSequence) -> tuple[Tensor, Tensor]:
    """Returns the hidden states [S, D] before the answer's tokens, and those tokens [S]."""
    targets = torch.tensor(sequence.ids[-sequence.answer :], device=lm.device)
    return hidden_states(lm, sequence)[-sequence.answer :], targets


@torch.no_grad()
def _sample(lm: LanguageModel, states: Tensor, seed: int) -> Tensor:
    """Draws a token [S] after each hidden state from the model's distribution."""
    # On the processor, whose generator gives the same numbers everywhere.
    shares = lm.logits(states).softmax(-1).cpu()
    return torch.multinomial(shares, 1, generator=torch.Generator().manual_seed(seed))[:, 0].to(states.device)


@contextmanager
def _squared_gradients(parameters: dict[str, nn.Parameter], sums: dict[str, Tensor]) -> Iterator[None]:
    """Adds the square of each parameter's gradient to its sum as soon as it is known, and frees the gradient."""

    def add(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            sums[name].addcmul_(parameter.grad, parameter.grad)
            parameter.grad = None

        return hook

    hooks = [
        parameter.register_post_accumulate_grad_hook(add(name))  # type: ignore[no-untyped-call]
        for name, parameter in parameters.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
