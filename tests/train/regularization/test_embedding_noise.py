"""NEFTune's noise on packed, padded and plain rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from posttrain.models.chat import TokenizedExample
from posttrain.models.head import predicting_states
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Unit, pack, packed_attention
from posttrain.train.regularization.embedding_noise import inverse_lengths, neftune

Fresh = Callable[..., LanguageModel]


def sequence(first: int, length: int, supervised: int = 1) -> TokenizedExample:
    """Tokens that count up from ``first``."""
    return TokenizedExample(
        [first + position for position in range(length)], [False] * (length - supervised) + [True] * supervised
    )


def pair(prompt: int, chosen: int, rejected: int) -> Unit:
    """Two answers of these lengths to one prompt."""
    start = list(range(20, 20 + prompt))
    return [
        TokenizedExample(start + list(range(100, 100 + chosen)), [False] * prompt + [True] * chosen),
        TokenizedExample(
            start + [150 + position % 50 for position in range(rejected)], [False] * prompt + [True] * rejected
        ),
    ]


@contextmanager
def layer_inputs(lm: LanguageModel) -> Iterator[list[Tensor]]:
    """The input of the first layer in each forward pass."""
    result: list[Tensor] = []
    layer = lm.decoder.layers[0]
    hook = layer.register_forward_pre_hook(lambda module, arguments: result.append(arguments[0].detach()))
    try:
        yield result
    finally:
        hook.remove()


def noise_of(lm: LanguageModel, units: list[Unit], alpha: float, *, padded: bool) -> Tensor:
    """The noise added at each position: [T, D], or [N, T, D] with padding."""
    packed = pack(units, padded=padded)
    with packed_attention(lm, 512) as packs, layer_inputs(lm) as result:
        assert packs
        if padded:
            lm.model.set_attn_implementation("sdpa")
        result.clear()
        predicting_states(lm, packed)
        with neftune(lm, alpha):
            predicting_states(lm, packed)
    return (result[1] - result[0]).squeeze(0)


def test_the_scale_depends_on_each_sequences_length_when_packed(fresh: Fresh) -> None:
    torch.manual_seed(0)
    lm = fresh()
    lengths = [9, 40, 161]
    # Different first tokens, so that nothing is shared.
    noise = noise_of(lm, [[sequence(10 * n, length)] for n, length in enumerate(lengths, 1)], 7.0, padded=False)
    start = 0
    for length in lengths:
        sequence_noise = noise[start : start + length - 1]  # the last token is not read
        start += length - 1
        scale = 7.0 / ((length - 1) * 96) ** 0.5
        assert float(sequence_noise.abs().max()) == pytest.approx(scale, rel=0.02)
        assert float(sequence_noise.abs().max()) <= scale * (1 + 1e-4)
        assert float(sequence_noise.std()) == pytest.approx(scale / 3**0.5, rel=0.06)
        assert abs(float(sequence_noise.mean())) < 0.08 * scale
    assert start == len(noise)


def test_the_scale_depends_on_each_sequences_length_when_padded(fresh: Fresh) -> None:
    torch.manual_seed(0)
    lengths = [40, 161]
    noise = noise_of(fresh(), [[sequence(10 * n, length)] for n, length in enumerate(lengths, 1)], 7.0, padded=True)
    for row, length in enumerate(lengths):
        scale = 7.0 / ((length - 1) * 96) ** 0.5
        assert float(noise[row, : length - 1].abs().max()) == pytest.approx(scale, rel=0.02)


def test_shared_tokens_get_the_mean_variance(fresh: Fresh) -> None:
    torch.manual_seed(0)
    noise = noise_of(fresh(), [pair(30, 11, 171)], 7.0, padded=False)
    assert len(noise) == 29 + 11 + 171, "the prompt is shared, except for its last token"
    variance = 7.0**2 / 96 / 3 * (1 / 40 + 1 / 200) / 2
    assert float(noise[:29].var()) == pytest.approx(variance, rel=0.1)
    assert float(noise[29:40].var()) == pytest.approx(7.0**2 / 96 / 3 / 40, rel=0.1)
    assert float(noise[40:].var()) == pytest.approx(7.0**2 / 96 / 3 / 200, rel=0.1)


def test_lengths_of_shared_segments() -> None:
    units = [pair(6, 3, 5), [TokenizedExample([20, 21, 22, 9, 9], [False] * 4 + [True])]]
    packed = pack(units)
    lengths = inverse_lengths(packed.ids.shape, {"plan": packed.plan}, torch.device("cpu"))
    assert packed.ids.tolist() == [[20, 21, 22, 23, 24, 25, 100, 101, 25, 150, 151, 152, 153, 9]]
    first, second, third = 1 / 8, 1 / 10, 1 / 4
    shared_by_all, shared_by_two = (first + second + third) / 3, (first + second) / 2
    expected = [shared_by_all] * 3 + [shared_by_two] * 2 + [first] * 3 + [second] * 5 + [third]
    torch.testing.assert_close(lengths, torch.tensor([expected]))


def test_noise_of_a_plain_row_is_that_of_transformers(fresh: Fresh) -> None:
    from transformers.integrations.neftune import neftune_post_forward_hook

    lm = fresh()
    ids = torch.arange(30)[None]
    with layer_inputs(lm) as result:
        layer = lm.model.get_input_embeddings()
        layer.neftune_noise_alpha = 5.0
        hook = layer.register_forward_hook(neftune_post_forward_hook)
        torch.manual_seed(3)
        lm.decoder(input_ids=ids)
        hook.remove()
        torch.manual_seed(3)
        with neftune(lm, 5.0):
            lm.decoder(input_ids=ids)
        lm.decoder(input_ids=ids)
    expected, actual, without_noise = result
    torch.testing.assert_close(actual, expected)
    assert (actual - without_noise).abs().max() > 0.05


def test_noise_is_only_added_in_training(fresh: Fresh) -> None:
    lm = fresh()
    ids = torch.arange(30)[None]
    with layer_inputs(lm) as result, neftune(lm, 5.0):
        lm.decoder(input_ids=ids)
        with torch.no_grad():  # as in a pass of the reference
            lm.decoder(input_ids=ids)
        lm.model.eval()
        state = torch.get_rng_state()
        lm.decoder(input_ids=ids)
        assert torch.equal(torch.get_rng_state(), state), "no random number is drawn"
    assert not torch.equal(result[0], result[1])
    assert torch.equal(result[1], result[2])


def test_noise_is_removed_after_an_exception(fresh: Fresh) -> None:
    lm = fresh()
    ids = torch.arange(30)[None]
    with layer_inputs(lm) as result:
        lm.decoder(input_ids=ids)
        with pytest.raises(KeyError), neftune(lm, 5.0):
            raise KeyError
        lm.decoder(input_ids=ids)
    assert torch.equal(result[0], result[1])
    assert not lm.decoder._forward_pre_hooks
    assert not lm.model.get_input_embeddings()._forward_hooks
