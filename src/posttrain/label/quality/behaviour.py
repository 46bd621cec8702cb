"""Behaviour that makes answers worthless: bias to suggestions and places, haste, laziness, collusion.

Every test compares an annotator with the others, as items differ between tasks, and asks for an effect of a size that
matters besides a small p-value, since a long series of answers makes any difference significant. Each family of tests
is corrected by Holm's method. What an answer is compared with never contains the answer itself: the gold label, else
the majority of all others."""

from collections.abc import Collection, Mapping
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.label.answers import Integers, SharedItems, Votes, shared_items
from posttrain.label.quality.annotators import Outcomes
from posttrain.label.quality.consensus import pair_reference
from posttrain.label.quality.findings import Finding, count_exceeds, holm, share_exceeds, wilson

READING_WORDS = 10.0
"""Words a second that nobody reads: 2.5 times the 238 words a minute of M. Brysbaert (2019), 600 a minute."""

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
            # One error more, so that a short series without any is no proof of perfection. More than the own errors in
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


def position_bias(answers: pa.Table, rate: float, even: Collection[str] = ()) -> list[Finding]:
    """Finds annotators who choose one place too often, among labels or among candidates.

    Only where each place is right equally often, however skilled an annotator is: among shuffled labels, and candidates
    in a random order. Where each label has its place, a bias to a place is one to a label; see `one_answer`. An
    annotator must exceed both the even share and the share that all others have at that place.

    Args:
        answers: Table of the schema `posttrain.label.answers.ANSWERS`.
        rate: False-alarm rate.
        even: Batches whose candidates are in a random order.
    """
    rows = answers.filter(answers["position"].is_valid())
    is_even = compute.is_in(rows["batch"], pa.array(list(even), pa.string()))
    candidates, tests = [], 0
    for part in (rows.filter(is_even), rows.filter(compute.invert(is_even))):
        if part.num_rows and (_is_shuffled(part) or part["batch"][0].as_py() in even):
            findings, number = _preferred_places(part)
            candidates += findings
            tests += number
    return _surest(holm(candidates, rate, tests))


def _preferred_places(rows: pa.Table) -> tuple[list[Finding], int]:
    """Returns the candidates for findings, and the number of tests."""
    names = np.array(rows["annotator"].to_pylist(), object)
    places = rows["position"].to_numpy()
    number = max(2, int(places.max()) + 1)
    candidates, tests = [], 0
    for name in sorted(set(names)):
        own, others = (np.bincount(places[part], minlength=number) for part in (names == name, names != name))
        if own.sum() < LEAST_EVIDENCE:
            continue
        at = int(own.argmax())
        even = max(1 / number, others[at] / others.sum() if others.sum() else 0.0)
        share, threshold = own[at] / own.sum(), even + 0.1
        tests += number
        if share >= threshold:
            sentence = (
                f"{name} chose place {at + 1} of {number} in {share:.0%} of {own.sum()} answers, where {even:.0%} is "
                "expected"
            )
            p_value = count_exceeds(int(own[at]), int(own.sum()), even)
            candidates.append(
                Finding("position_bias", (name,), float(share), threshold, int(own.sum()), p_value, sentence)
            )
    return candidates, tests


def _is_shuffled(rows: pa.Table) -> bool:
    pairs = set(zip(rows["answer"].to_pylist(), rows["position"].to_pylist(), strict=True))
    return len(pairs) > len({label for label, _ in pairs})


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
            # Of all labels together too: whoever clicks at random gives every label where it is wrong.
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
        # Half the team's kappa, and still little in itself: somebody mediocre is no random clicker.
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


def repeated_answers(votes: Votes, reference: Integers, rate: float) -> list[Finding]:
    """Finds annotators who repeat their last answer where it is wrong.

    The control is how often they give that label on all items where it is wrong, as somebody who prefers a label, or
    clicks at random, repeats it by chance; or how often the others repeat themselves, if that is more.
    """
    given, asked = _wrong_labels(votes, reference)
    repeats, changes, usual = [], [], []
    for index in range(len(votes.annotators)):
        by_annotator = np.flatnonzero(votes.annotator == index)
        before, after = by_annotator[:-1], by_annotator[1:]
        changed = (reference[after] >= 0) & (votes.label[before] != reference[after])
        last = votes.label[before][changed]
        repeats.append(int((last == votes.label[after][changed]).sum()))
        changes.append(len(last))
        usual.append(float((given[index, last] / np.maximum(asked[index, last], 1)).mean()) if len(last) else 0.0)
    candidates, tests = [], 0
    for index, name in enumerate(votes.annotators):
        n, others = changes[index], sum(changes) - changes[index]
        if n < LEAST_EVIDENCE or not others:
            continue
        tests += 1
        chance = max(usual[index], (sum(repeats) - repeats[index]) / others)
        share = repeats[index] / n
        if share >= chance + 0.1:
            sentence = (
                f"{name} repeated the last answer on {share:.0%} of {n} items where it is wrong, and {chance:.0%} is "
                "expected"
            )
            p_value = count_exceeds(repeats[index], n, chance)
            candidates.append(Finding("repeats", (name,), share, chance + 0.1, n, p_value, sentence))
    return holm(candidates, rate, tests)


def collusion(votes: Votes, expected: Integers, rate: float) -> list[Finding]:
    """Finds pairs who give the same wrong answer far more often than their errors explain.

    Two annotators who err on their own with rates e and f give the same wrong answer to about e f r of their items,
    where r is above the share of one wrong label as some items mislead everybody. How far above is taken from all other
    pairs. The items are those with a gold label, or with a majority of annotators besides the two.

    Args:
        votes: The answers.
        expected: int64 [U] of `posttrain.label.quality.consensus.gold_labels`.
        rate: False-alarm rate.
    """
    pairs: list[tuple[int, int, int, int, float, int]] = []
    shared = shared_items(votes, LEAST_EVIDENCE)
    # A hundred at once: of a large team there are thousands, and each has few items.
    while block := list(islice(shared, 100)):
        pairs += _same_errors(votes, expected, block)
    total_same, total_explained = sum(pair[3] for pair in pairs), sum(pair[2] * pair[4] for pair in pairs)
    candidates = []
    for first, second, n, same, explained, either in pairs:
        # At least one: independent errors of a pair never agree more often than both are wrong.
        lift = (total_same - same + 1) / (total_explained - n * explained + 1)
        chance = min(0.5, explained * max(1.0, lift))
        # A third of their errors, besides: some items mislead two of two annotators.
        if same >= 3 and same >= either / 3 and same / n >= 2 * chance:
            names = (votes.annotators[first], votes.annotators[second])
            sentence = (
                f"{names[0]} and {names[1]} gave the same wrong answer to {same} of {n} items, and their errors "
                f"explain {n * chance:.1f}"
            )
            p_value = count_exceeds(same, n, chance)
            candidates.append(Finding("collusion", names, same / n, 2 * chance, n, p_value, sentence))
    return holm(candidates, rate, len(pairs))


def _same_errors(
    votes: Votes, expected: Integers, block: list[SharedItems]
) -> list[tuple[int, int, int, int, float, int]]:
    """Counts the errors of pairs on items whose answer is known; pairs with too few such items are left out.

    Returns:
        Both annotators, the items, same wrong answers, the share that independent errors explain, errors of either.
    """
    items, left, right = (
        np.concatenate([getattr(each, name) for each in block]) for name in ("items", "left", "right")
    )
    pair = np.repeat(np.arange(len(block)), [len(each.items) for each in block])
    reference = pair_reference(votes, expected, items, left, right)
    known = reference >= 0
    wrong_left, wrong_right = (left != reference) & known, (right != reference) & known

    def count(rows: np.ndarray) -> list[int]:
        return [int(number) for number in np.bincount(pair[rows], minlength=len(block))]

    same, either = wrong_left & wrong_right & (left == right), wrong_left | wrong_right
    counts = zip(block, *map(count, (known, same, wrong_left, wrong_right, either)), strict=True)
    return [
        # One error more on each side, so that nobody counts as infallible.
        (each.first, each.second, n, both, (first + 1) / (n + 1) * (second + 1) / (n + 1), any_wrong)
        for each, n, both, first, second, any_wrong in counts
        if n >= LEAST_EVIDENCE
    ]


def _surest(findings: list[Finding]) -> list[Finding]:
    """Keeps one finding for each annotator, that with the lowest p-value, of findings in the order of `holm`."""
    kept: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        kept.setdefault(finding.annotators, finding)
    return list(kept.values())
