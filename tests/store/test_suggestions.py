"""One nearest name for every mistyped one."""

import itertools

from posttrain.store.errors import closest_match, share_words, suggest


def test_the_nearest_name_is_found_in_any_order() -> None:
    for known in itertools.permutations(["epochs", "epoch_size", "precision"]):
        assert closest_match("epoch", known) == "epochs"
        assert suggest("epoch", known) == "did you mean `epochs`?"


def test_the_least_alike_is_named_too_unless_a_cutoff_is_given() -> None:
    assert closest_match("zzz", {"one": 1}) == "one"
    assert closest_match("zzz", ["one"], cutoff=0.75) is None
    assert closest_match("txet", ["text", "prompt"], cutoff=0.75) == "text"


def test_nothing_is_known() -> None:
    assert closest_match("word", []) is None
    assert suggest("word", iter(())) is None


def test_names_share_words_whichever_is_longer() -> None:
    assert share_words("batch_size", "train_batch_size")
    assert share_words("num_train_epochs", "epochs")
    assert not share_words("learning_rate", "rate_scale")
    assert not share_words("epoch", "epochs")
