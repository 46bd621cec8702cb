"""Free-text answers of several models: a vote, re-scored candidates, or pooled probabilities of each next token."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posttrain.models.ensembles.members import Member
from posttrain.models.generate import Generation, answer_batches, generate, pad_left, read_answer
from posttrain.models.likelihood import answer_log_likelihoods
from posttrain.models.task import Turns
from posttrain.store.errors import UserError
from posttrain.store.progress import progress_bar
from posttrain.store.text_files import normalise_text

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel


def vote(members: Sequence[Member], weights: Sequence[float], prompts: Sequence[Turns]) -> list[Generation]:
    """Returns the answer with the most votes, compared as normalised texts; of equal ones the first model's.

    Args:
        members: M models, which answer greedily.
        weights: M numbers, each model's votes.
        prompts: N conversations.
    """
    answers = _answers(members, prompts)
    winners = []
    for proposed in zip(*answers, strict=True):
        votes: Counter[str] = Counter()
        for answer, weight in zip(proposed, weights, strict=True):
            votes[normalise_text(answer.text)] += weight  # type: ignore[assignment]
        # Rounded, so that weights of 0.1 and 0.2 are as many votes as one of 0.3.
        best = max(round(count, 9) for count in votes.values())
        winners.append(next(answer for answer in proposed if round(votes[normalise_text(answer.text)], 9) == best))
    return winners


def rescore(members: Sequence[Member], weights: Sequence[float], prompts: Sequence[Turns]) -> list[Generation]:
    """Returns the candidate with the highest weighted sum of the models' log-likelihoods a byte.

    Every model proposes its greedy answer, and every model scores each different one as a text of its own tokens: so
    tokenizers may differ. The log-likelihood is divided by the candidate's bytes in UTF-8, and one for the stop token.
    A total would choose the shortest answer, whatever it says, and a mean over tokens would depend on the tokenizer; a
    byte is the same for all (as in L. Gao et al., The Pile, 2020, section 3.1). Of equal candidates the first in the
    order of their texts wins. It is the best of the candidates under a product of experts, which chooses and writes
    nothing new.

    Arguments as `vote`.
    """
    answers = _answers(members, prompts)
    candidates: list[list[Generation]] = []
    for proposed in zip(*answers, strict=True):
        distinct: dict[str, Generation] = {}
        # A whole answer before one that was cut off and reads the same.
        for answer in sorted(proposed, key=lambda answer: (normalise_text(answer.text), not answer.finished)):
            distinct.setdefault(normalise_text(answer.text), answer)
        candidates.append(list(distinct.values()))
    # Where all models agree there is nothing to choose.
    pairs = [
        (row, answer)
        for row, distinct_answers in enumerate(candidates)
        if len(distinct_answers) > 1
        for answer in distinct_answers
    ]
    scores = [0.0] * len(pairs)
    for member, weight in zip(members, weights, strict=True):
        if not pairs or not weight:
            continue
        model = member.language_model("score a text")
        sums, _ = answer_log_likelihoods(
            model, [prompts[row] for row, _ in pairs], [answer.text for _, answer in pairs]
        )
        for index, (_, answer) in enumerate(pairs):
            scores[index] += weight * float(sums[index]) / (len(answer.text.encode()) + 1)
    best = {row: distinct_answers[0] for row, distinct_answers in enumerate(candidates)}
    best_score: dict[int, float] = {}
    for (row, answer), score in zip(pairs, scores, strict=True):
        if row not in best_score or score > best_score[row]:
            best[row], best_score[row] = answer, score
    return [best[row] for row in range(len(candidates))]


def _answers(members: Sequence[Member], prompts: Sequence[Turns]) -> list[list[Generation]]:
    """Returns each model's answers, [M][N]; one model is in memory at a time."""
    return [generate(member.language_model("write a text"), prompts) for member in members]


@torch.inference_mode()
def generate_pooled(
    method: Literal["probability", "logit"],
    members: Sequence[Member],
    weights: npt.ArrayLike,
    prompts: Sequence[Turns],
) -> list[Generation]:
    """Writes answers greedily, each token by the pool of all models' probabilities of it.

    All models are in memory at once. Each reads the prompt by its own chat template; a stop token of the first ends an
    answer.

    Args:
        method: ``probability`` for the linear pool, ``logit`` for the logarithmic one.
        members: M models with the same tokenizer.
        weights: float [M], or [N, M] for weights of each prompt; add up to 1 over M.
        prompts: N conversations.

    Raises:
        UserError: the tokenizers differ.
    """
    models = [member.language_model("write a text") for member in members]
    _check_tokenizers(members, models)
    limit = models[0].task.max_new_tokens
    ids = [[model.prompt_ids(prompt) for prompt in prompts] for model in models]
    lengths = [max(len(own[row]) for own in ids) for row in range(len(prompts))]
    answers: list[Generation | None] = [None] * len(prompts)
    factors = torch.tensor(np.broadcast_to(np.asarray(weights, np.float64), (len(prompts), len(models))))
    with progress_bar("answering together", len(prompts), "records") as advance:
        for rows in answer_batches(lengths, limit):
            batches = [[own[row] for row in rows] for own in ids]
            for row, tokens in zip(rows, _decode(method, models, factors[rows], batches, limit), strict=True):
                answers[row] = read_answer(models[0], tokens)
            advance(len(rows))
    return [answer for answer in answers if answer is not None]


def _decode(
    method: str, models: "Sequence[LanguageModel]", weights: Tensor, prompts: list[list[list[int]]], limit: int
) -> list[list[int]]:
    """Returns the tokens of the answers to B prompts, given as each model's ids; weights are float64 [B, M]."""
    states: list[dict[str, Any]] = []
    for model, own in zip(models, prompts, strict=True):
        ids, mask = pad_left(model, own)
        states.append({"ids": ids, "mask": mask, "cache": None})
    stops = torch.tensor(sorted(models[0].chat.stop_ids))
    written: list[Tensor] = []
    done = torch.zeros(len(prompts[0]), dtype=torch.bool)
    while len(written) < limit and not done.all():
        logs = [_next_token(model, state) for model, state in zip(models, states, strict=True)]
        mixed = torch.stack(logs)
        factors = weights.T[:, :, None]
        # The logarithmic pool is not normalised, which the largest is the same without.
        pooled = (mixed + factors.log()).logsumexp(0) if method == "probability" else (factors * mixed).sum(0)
        tokens = pooled.argmax(-1)
        written.append(tokens)
        done |= torch.isin(tokens, stops)
        for model, state in zip(models, states, strict=True):
            state["ids"] = tokens[:, None].to(model.device)
            state["mask"] = torch.cat([state["mask"], torch.ones_like(state["mask"][:, :1])], 1)
    return torch.stack(written, 1).tolist() if written else [[] for _ in prompts[0]]


def _next_token(model: "LanguageModel", state: dict[str, Any]) -> Tensor:
    """Returns the log-probabilities of the next token, float64 [B, V] on the CPU; updates the cache in ``state``."""
    positions = (state["mask"].cumsum(1) - 1).clamp(min=0)[:, -state["ids"].shape[1] :]
    output = model.decoder(
        input_ids=state["ids"],
        attention_mask=state["mask"],
        position_ids=positions,
        past_key_values=state["cache"],
        use_cache=True,
    )
    state["cache"] = output.past_key_values
    logits = model.logits(output.last_hidden_state[:, -1])
    # Embedding tables are padded to different sizes, behind the tokens that there are.
    return logits[:, : len(model.tokenizer)].double().log_softmax(-1).cpu()


def _check_tokenizers(members: Sequence[Member], models: "Sequence[LanguageModel]") -> None:
    first = models[0].tokenizer.get_vocab()
    for member, model in zip(members, models, strict=True):
        if model.tokenizer.get_vocab() != first:
            raise UserError(
                f"`{members[0].name}` and `{member.name}` have different tokenizers, so the probabilities of their "
                "tokens cannot be averaged",
                where="method",
                fix="use method `rescore`",
            )
