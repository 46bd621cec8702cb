"""The quality report of a version: exact counts in bounded memory, whatever the order of the records."""

import itertools
import json
import math
import random
from collections import Counter
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.records.outcome import Rejection, reject_rows
from posttrain.data.records.record import FACT, RECORD, assign_ids, concat, input_texts, records
from posttrain.data.report.counts import FactCounts, input_column, label_balance
from posttrain.data.report.distribution import Distribution, DistributionBuilder, histograms, round_significant
from posttrain.data.report.ngrams import display_words, ngram_counts, word_count
from posttrain.data.report.profile import Profile, build_profile, profile_version
from posttrain.data.report.sample import BottomKSample, id_hashes
from posttrain.store.hashing import canonical_json
from posttrain.testing.steps import table_of

WORDS = ["card", "lost", "bank", "transfer", "cash", "my", "is", "the", "where", "refund", "how", "account"]


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))


@pytest.fixture(scope="module")
def table() -> pa.Table:
    rng = random.Random(1)
    rows = [
        {"prompt": f"{number} {text(rng)}", "completion": rng.choice("abcd"), "source": rng.choice(["f", "g"])}
        for number in range(400)
    ]
    return table_of(*rows)


@pytest.fixture(scope="module")
def split_names(table: pa.Table) -> list[str]:
    return ["train" if id < "c" else "test" for id in table["id"].to_pylist()]


@pytest.fixture(scope="module")
def rejected_rows(table: pa.Table) -> pa.Table:
    """Every tenth record is too short, and some are duplicates of two clusters."""
    rejections = {row: Rejection("too short", "3 words", 3.0) for row in range(0, 200, 10)}
    for row in (1, 2, 3, 5):
        rejections[row] = Rejection("near duplicate", "like f:300", 0.9, cluster="one", kept="x")
    rejections[7] = Rejection("near duplicate", "like f:301", 0.9, cluster="two", kept="y")
    return reject_rows(table, "minhash", rejections).rejected


def facts_of(table: pa.Table, step: str, name: str, values: list[Any]) -> pa.Table:
    is_text = any(isinstance(value, str) for value in values)
    nulls = [None] * len(values)
    columns = [table["id"].to_pylist()[: len(values)], [step] * len(values), [name] * len(values)]
    columns += [nulls, values] if is_text else [values, nulls]
    return pa.table([pa.array(column, kind.type) for column, kind in zip(columns, FACT, strict=True)], schema=FACT)


def test_a_profile_counts_everything(table: pa.Table, split_names: list[str], rejected_rows: pa.Table) -> None:
    facts = [
        facts_of(table, "language", "language", ["en"] * 300 + ["de"] * 100),
        facts_of(table, "quality", "quality", [0.25] * 100 + [0.75] * 300),
        facts_of(table, "pii", "pii", [0.0, 3.0, 1.0]),
        facts_of(table, "pii", "pii_email", [2.0, 1.0]),
    ]
    summary = build_profile([table], [split_names], [rejected_rows], facts=facts)
    assert summary.records == summary.answered == 400
    assert summary.splits == dict(Counter(split_names).most_common())
    assert summary.sources == dict(Counter(table["source"].to_pylist()).most_common())
    assert summary.labels == dict(
        sorted(Counter(table["completion"].to_pylist()).items(), key=lambda item: (-item[1], item))
    )
    assert sum(summary.balances["train"].counts.values()) == split_names.count("train")
    texts = input_texts(table)
    assert summary.totals["input characters"] == sum(map(len, texts))
    assert summary.totals["input words"] == sum(len(item.split()) for item in texts)
    assert summary.languages == {"en": 300, "de": 100}
    assert summary.scores["quality"].mean == pytest.approx(0.625)
    assert {kind: tuple(item) for kind, item in summary.pii.items()} == {"any kind": (4, 2), "email": (3, 2)}
    assert {(item.reason, item.count, len(item.examples)) for item in summary.rejected} == {
        ("too short", 20, 5),
        ("near duplicate", 5, 5),
    }
    assert summary.clusters["minhash"].sizes == {5: 1, 2: 1}
    assert (summary.clusters["minhash"].number, summary.clusters["minhash"].removed) == (2, 5)
    assert [(item.name, item.size, len(item.texts)) for item in summary.clusters["minhash"].largest] == [
        ("one", 5, 3),
        ("two", 2, 1),
    ]
    assert [row["count"] for row in summary.funnel if row["reason"] in ("in", "kept")] == [425, 400]
    word_counts = Counter(word for item in texts for word in item.split())
    assert dict(summary.ngrams["input"][0][:5]) == dict(word_counts.most_common(5))
    assert canonical_json(summary.to_json())
    assert json.loads(json.dumps(summary.to_json()))["labels"]["all"]["counts"] == summary.labels


@pytest.mark.parametrize("seed", range(3))
def test_chunks_and_order_of_tables_change_nothing(
    table: pa.Table, split_names: list[str], rejected_rows: pa.Table, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    facts = facts_of(table, "quality", "quality", rng.normal(size=400).tolist())
    expected = build_profile([table], [split_names], [rejected_rows], facts=[facts], sample=50)
    order = rng.permutation(400)
    shuffled_table, shuffled_names = table.take(order), [split_names[row] for row in order.tolist()]
    cuts = [0, *sorted(rng.choice(np.arange(1, 400), 5, replace=False).tolist()), 400]
    pieces = [shuffled_table.slice(start, end - start) for start, end in itertools.pairwise(cuts)]
    pieces.append(RECORD.empty_table())
    piece_names = [shuffled_names[start:end] for start, end in itertools.pairwise(cuts)] + [[]]
    shuffled_rejections = rejected_rows.take(rng.permutation(rejected_rows.num_rows))
    parts = [shuffled_rejections.slice(0, 7), shuffled_rejections.slice(7)]
    result = build_profile(pieces, piece_names, parts, facts=[facts.slice(200), facts.slice(0, 200)], sample=50)
    assert result.sample == expected.sample
    first, second = (_by_reason(item) for item in (expected, result))
    assert first == second


def _by_reason(summary: Profile) -> Any:
    json_of = summary.to_json()
    json_of["rejected"].sort(key=lambda item: item["reason"])
    json_of["funnel"].sort(key=lambda item: item["reason"])
    return json_of


def test_examples_show_no_personal_data() -> None:
    table = table_of({"prompt": "I am jane.doe@example.org", "completion": "jane@example.org"}, "mail a@example.org")
    rejections = {
        0: Rejection("personal data", "1 email"),
        1: Rejection("near duplicate", "like", 0.9, cluster="c", kept="k"),
    }
    summary = build_profile([], rejected=[reject_rows(table, "pii", rejections).rejected])
    assert "example.org" not in json.dumps(summary.to_json())
    assert summary.rejected[0].examples[0].text == "I am <EMAIL>"


def test_a_stored_version_is_read_table_by_table(
    table: pa.Table, split_names: list[str], rejected_rows: pa.Table
) -> None:
    class StoredVersion:
        meta = MappingProxyType({"funnel": [{"step": "read", "reason": "in", "count": 425}]})

        def tables_with_splits(self) -> Any:
            for start in range(0, 400, 100):
                yield table.slice(start, 100), split_names[start : start + 100]

        def rejected(self) -> Any:
            yield rejected_rows

        def facts(self) -> Any:
            yield facts_of(table, "quality", "quality", [0.5] * 400)

    summary = profile_version(cast(Any, StoredVersion()))
    assert summary.funnel == ({"set": "records", "step": "read", "reason": "in", "count": 425},)
    expected = build_profile(
        [table], [split_names], [rejected_rows], StoredVersion.meta["funnel"], StoredVersion().facts()
    )
    assert summary.to_json() == expected.to_json()


def test_a_column_can_name_the_splits_and_lengths_must_fit(table: pa.Table, split_names: list[str]) -> None:
    table_with_split = table.append_column("split", pa.array(split_names))
    assert build_profile([table_with_split], "split").to_json() == build_profile([table], [split_names]).to_json()
    with pytest.raises(ValueError, match="399 names of splits for 400 records"):
        build_profile([table], [split_names[:-1]])
    with pytest.raises(ValueError):
        build_profile([table, table], [split_names])


def test_empty_profiles() -> None:
    summary = build_profile([])
    assert (summary.records, summary.balances, summary.lengths, summary.sample) == (0, {}, {}, ())
    assert canonical_json(summary.to_json())
    assert canonical_json(build_profile([table_of({"prompt": "", "completion": None})]).to_json())


def test_answers_are_labels_only_if_they_repeat() -> None:
    distinct_answers = table_of(*({"prompt": f"q{row}", "completion": f"answer {row}"} for row in range(50)))
    summary = build_profile([distinct_answers])
    assert summary.open_ended
    assert summary.balances == {}
    assert set(summary.ngrams) == {"input", "answer"}
    many_labels = table_of(*({"prompt": f"q{row}", "completion": f"answer {row % 1001}"} for row in range(3003)))
    assert build_profile([many_labels]).open_ended
    assert not build_profile(
        [many_labels.slice(0, 2000).filter(pa.array([row % 1001 < 500 for row in range(2000)]))]
    ).open_ended


def test_tokens_are_counted_by_the_given_tokenizer(table: pa.Table) -> None:
    summary = build_profile([table], tokenizer=lambda texts: [list(range(len(item) // 3)) for item in texts])
    assert summary.totals["input tokens"] == sum(len(item) // 3 for item in input_texts(table))
    assert summary.lengths["answer tokens"].high == 0


def test_label_balance() -> None:
    even, uneven, single = label_balance({"a": 5, "b": 5}), label_balance({"a": 3, "b": 1}), label_balance({"a": 7})
    assert (even.entropy, even.evenness, even.imbalance) == (1.0, 1.0, 1.0)
    assert uneven.entropy == pytest.approx(0.25 * 2 + 0.75 * math.log2(4 / 3))
    assert uneven.imbalance == 3.0
    assert (single.entropy, single.evenness) == (0.0, 1.0)


def test_input_column_equals_input_texts() -> None:
    turns = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    system_turn = [{"role": "system", "content": "alone"}]
    table = table_of(
        {"prompt": turns, "completion": "x"}, "plain", {"prompt": system_turn}, {"prompt": "éa\nb"}, "last"
    )
    assert input_column(table).to_pylist() == input_texts(table)
    assert input_column(table.slice(1, 3)).to_pylist() == input_texts(table.slice(1, 3))
    assert input_column(concat([table, table])).to_pylist() == input_texts(table) * 2
    empty_record = dict.fromkeys(RECORD.names) | {"source": "f", "line": 1, "meta": "{}"}
    assert input_column(assign_ids(records([empty_record]))).to_pylist() == [None]


def test_words_in_any_script() -> None:
    assert word_count("I can't, well ...") == 4
    assert word_count("我要退款 please — now") == 4 + 3
    assert word_count(" \n") == 0
    assert display_words("I CAN'T log-in: 我要 42!") == ["i", "can't", "log", "in", "我", "要", "42"]


def distribution(values: Any) -> Distribution:
    collector = DistributionBuilder()
    collector.add(np.asarray(values, dtype=np.float64))
    return collector.distribution()


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=64), max_size=60))
@settings(max_examples=25, deadline=None)
def test_a_distribution_counts_every_number_to_three_digits(values: list[float]) -> None:
    result = distribution(values)
    finite = np.array([value for value in values if math.isfinite(value)])
    assert result.count == len(finite)
    assert result.missing == len(values) - len(finite)
    assert (np.diff(result.values) > 0).all()
    if len(finite):
        assert (result.low, result.high) == (finite.min(), finite.max())
        for share in (0.1, 0.5, 0.9):
            exact = np.quantile(round_significant(finite), share, method="inverted_cdf")
            assert result.quantile(share) == exact
    normal = finite[(np.abs(finite) > 1e-300) & (np.abs(finite) < 1e300)]
    assert np.allclose(round_significant(normal), normal, rtol=2.0**-11, atol=0)


def test_whole_numbers_are_exact_up_to_2048_and_the_mean_is_close() -> None:
    values = np.arange(-2048, 2049, dtype=np.float64)
    assert (round_significant(values) == values).all()
    numbers = np.random.default_rng(0).lognormal(3, 2, 20_000)
    result = distribution(numbers)
    assert result.mean == pytest.approx(numbers.mean(), rel=5e-4)
    assert result.deviation == pytest.approx(numbers.std(), rel=5e-4)
    assert len(result.values) < len(numbers)


@given(st.lists(st.integers(-5000, 5000) | st.floats(-1, 1), min_size=1, max_size=50))
@settings(max_examples=25, deadline=None)
def test_a_histogram_holds_every_number_once(values: list[float]) -> None:
    result = distribution(values)
    edges, (counts,), (above,) = histograms([result])
    assert counts.sum() + above == len(values)
    assert len(counts) <= 31
    assert np.allclose(np.diff(edges), edges[1] - edges[0])
    assert edges[0] <= result.values[0]
    exact = sum(value + 1e-9 * (edges[1] - edges[0]) >= edges[-1] for value in result.values.repeat(result.counts))
    assert above == exact


def test_ngrams_equal_a_plain_count() -> None:
    rng = random.Random(3)
    groups = [[text(rng) for _ in range(20)], [], [text(rng) for _ in range(10)] + ["", "one"]]
    for n, ngrams in enumerate(ngram_counts(groups, 3), 1):
        for position, group in enumerate(groups):
            plain = Counter(
                " ".join(words[start : start + n])
                for words in map(str.split, group)
                for start in range(len(words) - n + 1)
            )
            result = {ngrams.text(run): int(count) for run, count in enumerate(ngrams.counts[position]) if count}
            assert result == dict(plain)
            summary = ngrams.most_common(7, position)
            assert [count for _, count in summary] == [count for _, count in plain.most_common(7)]
            assert all(plain[run] == count for run, count in summary)
            if n == 1 and position == 0:
                assert ngrams.most_common(99) == plain.most_common(99), "ties in order of occurrence"


def test_the_sample_holds_the_smallest_hashes() -> None:
    ids = [str(number) for number in range(5000)]
    order = id_hashes(ids, 0)
    smallest: BottomKSample[str] = BottomKSample(30)
    for start in range(0, 5000, 100):
        for row in smallest.wanted(order[start : start + 100]).tolist():
            smallest.add(int(order[start + row]), ids[start + row], ids[start + row])
    assert smallest.rows() == [ids[row] for row in np.argsort(order)[:30].tolist()]
    assert id_hashes(["a"], 0) != id_hashes(["a"], 1)


def test_text_facts_with_too_many_values_are_not_counted(table: pa.Table) -> None:
    counts = FactCounts()
    counts.add(facts_of(table, "quality", "grade", ["good", "bad", "good"]))
    for start in range(0, 1200, 400):
        counts.add(facts_of(table, "quality", "hash", [str(start + row) for row in range(400)]))
    assert counts.categories == {"quality: grade": {"good": 2, "bad": 1}, "quality: hash": {}}
    counts.add(facts_of(table, "pii", "kinds", ["email, phone", "email"]))
    assert {kind: tuple(item) for kind, item in counts.pii.items()} == {"email": (2, 2), "phone": (1, 1)}
