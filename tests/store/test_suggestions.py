"""The closest name for a mistyped one."""

import itertools

from posttrain.store.errors import closest_match, share_words, suggest


def test_the_closest_name_does_not_depend_on_the_order() -> None:
    for names in itertools.permutations(["epochs", "epoch_size", "precision"]):
        assert closest_match("epoch", names) == "epochs"
        assert suggest("epoch", names) == "did you mean `epochs`?"


def test_only_a_cutoff_rules_out_dissimilar_names() -> None:
    assert closest_match("zzz", {"one": 1}) == "one"
    assert closest_match("zzz", ["one"], cutoff=0.75) is None
    assert closest_match("txet", ["text", "prompt"], cutoff=0.75) == "text"


def test_without_names_there_is_no_suggestion() -> None:
    assert closest_match("word", []) is None
    assert suggest("word", iter(())) is None


def test_share_words() -> None:
    assert share_words("batch_size", "train_batch_size")
    assert share_words("num_train_epochs", "epochs")
    assert not share_words("learning_rate", "rate_scale")
    assert not share_words("epoch", "epochs")


def test_a_name_that_is_not_similar_is_not_suggested() -> None:
    assert suggest("zzz", ["one", "two"]) == "one of one, two"
    assert suggest("zzz", ["one", "two"], listed=False) is None
    assert suggest("zzz", [f"a{number}" for number in range(12)]) == "one of a0, a1, a2, a3, a4, a5, a6, a7 and 4 more"
