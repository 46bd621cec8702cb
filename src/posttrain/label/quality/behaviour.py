"""Behaviour that makes answers worthless: bias to suggestions and places, haste, one answer, random ones, new errors.

Every test asks for an effect of a size that matters besides a small p-value, since a long series of answers makes any
difference significant. Each family of tests is corrected by Holm's method. What an answer is compared with never
contains the answer itself: the gold label, else the majority of all others."""

from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.label.answers import Integers, Votes
from posttrain.label.quality.annotators import Outcomes
from posttrain.label.quality.findings import Finding, count_exceeds, holm, share_exceeds, wilson

READING_WORDS = 10.0
"""Words per second that nobody reads: 2.5 times the 238 words per minute of M. Brysbaert (2019), 600 per minute."""

HASTE = 1 / 3
"""An answer is hasty if it took less than this part of the median time of the others."""

LEAST_EVIDENCE = 20
"""Answers on which a test is made, at least."""


def suggestion_bias(answers: pa.Table, outcomes: Outcomes, rate: float) -> list[Finding]:
    """Finds annotators who accept planted wrong suggestions.

    Two controls, as each fails where the other works: the others' acceptance, which is high where the whole team is
    biased; and the annotator's own errors on items whose answer is known, which may be few. An annotator who ignores
    suggestions gives the planted answer at most as often as any wrong one.
    """
    names = np.array(answers["annotator"].to_pylist(), object)
    planted = answers["planted"].to_numpy(zero_copy_only=False)
    pairs = zip(answers["answer"].to_pylist(), answers["suggestion"].to_pylist(), strict=True)
    accepted = np.array([answer == suggestion for answer, suggestion in pairs], bool) & planted
    of_outcomes = names[outcomes.row]
    candidates, tests = [], 0
    for name in sorted(set(names[planted])):
        by_annotator = names == name
        share = wilson(int(accepted[by_annotator].sum()), int(planted[by_annotator].sum()))
        errors = ~outcomes.right[of_outcomes == name]
        own = (int(errors.sum()) + 1) / (len(errors) + 2) if len(errors) else 0.0
        controls = (
            ("the others accepted", int(accepted[~by_annotator].sum()), int(planted[~by_annotator].sum())),
            ("without suggestions the annotator errs on", int(errors.sum()), len(errors)),
        )
        for control, count, n in controls:
            tests += 1
            # One error more, so that a short series without any does not prove perfection. More than the own errors in
            # any case: who clicks at random accepts wrong suggestions too, and is found as that.
            usual = max(own, (count + 1) / (n + 2))
            if n and share.value >= usual + 0.15:
                sentence = (
                    f"{name} accepted {share.count} of {share.n} planted wrong suggestions ({share.low:.0%} to "
                    f"{share.high:.0%}); {control} {count / n:.0%} of {n}"
                )
                p_value = share_exceeds(share.count, share.n, count, n)
                candidates.append(
                    Finding("suggestion_bias", (name,), share.value, usual + 0.15, share.n, p_value, sentence)
                )
    return _surest(holm(candidates, rate, tests))


def position_bias(answers: pa.Table, rate: float, even: Collection[str]) -> list[Finding]:
    """Finds annotators who choose the first or the second of two candidates too often.

    Args:
        answers: Table of the schema `posttrain.label.answers.ANSWERS`.
        rate: False-alarm rate.
        even: Batches of preferences whose two candidates are in a random order, so that each is as often the better.
    """
    rows = answers.filter(compute.is_in(answers["batch"], pa.array(list(even), pa.string())))
    names = np.array(rows["annotator"].to_pylist(), object)
    chosen = np.array(rows["answer"].to_pylist(), object)
    candidates, tests = [], 0
    for name in sorted(set(names)):
        counts = [int((chosen[names == name] == place).sum()) for place in ("0", "1")]
        n, most = sum(counts), max(counts)
        if n < LEAST_EVIDENCE:
            continue
        tests += 2
        if most / n >= 0.6:
            sentence = f"{name} chose the first of two answers in {most / n:.0%} of {n}, where 50% is expected"
            if counts[1] == most:
                sentence = sentence.replace("the first", "the second")
            p_value = count_exceeds(most, n, 0.5)
            candidates.append(Finding("position_bias", (name,), most / n, 0.6, n, p_value, sentence))
    return holm(candidates, rate, tests)


def haste(
    answers: pa.Table, kinds: Mapping[str, str], word_counts: Mapping[int, int] | None, rate: float
) -> list[Finding]:
    """Finds annotators of whose answers most took a small part of the others' time, or no time to read the item.

    Args:
        answers: Table of the schema `posttrain.label.answers.ANSWERS`.
        kinds: Kind of answer of each batch, as times differ between kinds.
        word_counts: Words of the text by item, if known.
        rate: False-alarm rate.
    """
    rows = answers.filter(answers["seconds"].is_valid())
    names = np.array(rows["annotator"].to_pylist(), object)
    seconds = rows["seconds"].to_numpy()
    groups = np.array([kinds.get(batch, "label") for batch in rows["batch"].to_pylist()], object)
    unread = np.zeros(len(seconds), bool)
    if word_counts:
        unread = seconds < np.array([word_counts.get(item, 0) for item in rows["item"].to_pylist()]) / READING_WORDS
    medians: dict[str, dict[str, float]] = {kind: {} for kind in set(groups)}
    for name, kind in set(zip(names, groups, strict=True)):
        medians[kind][name] = float(np.median(seconds[(names == name) & (groups == kind)]))
    candidates, tests = [], 0
    for name in sorted(set(names)):
        hasty, limits = unread.copy(), []
        for kind, usual in medians.items():
            others = [time for other, time in usual.items() if other != name]
            if name in usual and others:
                # The median of medians: one slow or fast colleague must not move what is usual.
                limits.append(HASTE * float(np.median(others)))
                hasty |= (groups == kind) & (seconds < limits[-1])
        by_annotator = names == name
        if by_annotator.sum() < LEAST_EVIDENCE or not (limits or word_counts):
            continue
        tests += 1
        count, n = int(hasty[by_annotator].sum()), int(by_annotator.sum())
        if count / n > 0.25:
            sentence = (
                f"{name} answered {count} of {n} items in less than a third of the others' time, or than reading takes "
                f"(median {np.median(seconds[by_annotator]):.1f} s)"
            )
            candidates.append(Finding("speed", (name,), count / n, 0.25, n, count_exceeds(count, n, 0.25), sentence))
    return holm(candidates, rate, tests)


def one_answer(votes: Votes, reference: Integers, rate: float) -> list[Finding]:
    """Finds annotators who prefer one label: they give it where it is wrong, more than others and than other labels."""
    given, asked = _wrong_labels(votes, reference)
    candidates, tests = [], 0
    for index, name in enumerate(votes.annotators):
        for label in np.flatnonzero(asked[index] >= LEAST_EVIDENCE):
            tests += 1
            count, n = int(given[index, label]), int(asked[index, label])
            others, of = int(given[:, label].sum()) - count, int(asked[:, label].sum()) - n
            # Of all labels together too: somebody who clicks at random gives every label where it is wrong.
            rest = (given[index].sum() - count) / max(asked[index].sum() - n, 1)
            if not of:
                continue
            threshold = max(others / of + 0.1, 3 * rest)
            if count / n >= threshold:
                sentence = (
                    f"{name} answered `{votes.labels[label]}` on {count / n:.0%} of {n} items where it is wrong, and "
                    f"the others on {others / of:.0%}"
                )
                p_value = share_exceeds(count, n, others, of)
                candidates.append(Finding("one_answer", (name,), count / n, float(threshold), n, p_value, sentence))
    return _surest(holm(candidates, rate, tests))


def _wrong_labels(votes: Votes, reference: Integers) -> tuple[Integers, Integers]:
    """Counts by annotator and label: answers with it where it is wrong, and items where it is; int64 [W, C] each."""
    shape = (len(votes.annotators), len(votes.labels))
    given, right = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    known = reference >= 0
    wrong = known & (votes.label != reference)
    np.add.at(given, (votes.annotator[wrong], votes.label[wrong]), 1)
    np.add.at(right, (votes.annotator[known], reference[known]), 1)
    return given, right.sum(axis=1, keepdims=True) - right


def random_answers(votes: Votes, reference: Integers, rate: float) -> list[Finding]:
    """Finds annotators whose answers hardly depend on the item: kappa with the reference below half the team's.

    The p-value is the exact probability of as little agreement at half the team's median kappa.
    """
    sizes, agreed, chance = [], [], []
    for index in range(len(votes.annotators)):
        by_annotator = (votes.annotator == index) & (reference >= 0)
        n, shape = int(by_annotator.sum()), len(votes.labels)
        own, right = (np.bincount(part[by_annotator], minlength=shape) / max(n, 1) for part in (votes.label, reference))
        sizes.append(n)
        agreed.append(int((votes.label[by_annotator] == reference[by_annotator]).sum()))
        chance.append(float(own @ right))
    enough = [index for index, n in enumerate(sizes) if n >= LEAST_EVIDENCE and chance[index] < 1]
    if not enough:
        return []
    kappas = {index: (agreed[index] / sizes[index] - chance[index]) / (1 - chance[index]) for index in enough}
    half = float(np.median(list(kappas.values()))) / 2
    candidates = []
    for index in enough:
        # Half the team's kappa, and still little in itself: somebody mediocre does not click at random.
        if kappas[index] < min(half, 0.3):
            expected = chance[index] + min(half, 0.3) * (1 - chance[index])
            p_value = 1 - count_exceeds(agreed[index] + 1, sizes[index], expected)
            sentence = (
                f"{votes.annotators[index]} agrees with the others on {agreed[index]} of {sizes[index]} items, where "
                f"chance alone gives {chance[index] * sizes[index]:.0f}"
            )
            candidates.append(
                Finding(
                    "random_answers", (votes.annotators[index],), kappas[index], half, sizes[index], p_value, sentence
                )
            )
    return holm(candidates, rate, len(enough))


def new_errors(answers: pa.Table, outcomes: Outcomes, rate: float) -> list[Finding]:
    """Finds annotators who err more on the latest third of the items whose answer is known than on those before."""
    names = np.array(answers["annotator"].take(outcomes.row).to_pylist(), object)
    candidates, tests = [], 0
    for name in sorted(set(names)):
        right = outcomes.right[names == name]
        before, after = np.split(right, [len(right) - len(right) // 3])
        if len(after) < LEAST_EVIDENCE:
            continue
        tests += 1
        errors, usual = int((~after).sum()), int((~before).sum())
        value, threshold = errors / len(after), usual / len(before) + 0.1
        if value >= threshold:
            sentence = (
                f"{name} had {before.mean():.0%} of {len(before)} known items right, and {after.mean():.0%} of the "
                f"latest {len(after)}"
            )
            p_value = share_exceeds(errors, len(after), usual, len(before))
            candidates.append(Finding("new_errors", (name,), value, threshold, len(right), p_value, sentence))
    return holm(candidates, rate, tests)


def _surest(findings: list[Finding]) -> list[Finding]:
    """Keeps one finding for each annotator, that with the lowest p-value, of findings in the order of `holm`."""
    kept: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        kept.setdefault(finding.annotators, finding)
    return list(kept.values())
