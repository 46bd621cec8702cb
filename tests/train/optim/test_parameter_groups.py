from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from posttrain.train.optim.parameter_groups import NamedParameter, parameter_groups, parameter_locations

CopyParameters = Callable[[nn.Module], list[NamedParameter]]

LLAMA_LAYER = {
    "self_attn.q_proj.weight": "matrix",
    "self_attn.k_proj.weight": "matrix",
    "self_attn.v_proj.weight": "matrix",
    "self_attn.o_proj.weight": "matrix",
    "mlp.gate_proj.weight": "matrix",
    "mlp.up_proj.weight": "matrix",
    "mlp.down_proj.weight": "matrix",
    "input_layernorm.weight": "norm",
    "post_attention_layernorm.weight": "norm",
}
LLAMA = {
    "model.embed_tokens.weight": ("embedding", -1),
    **{f"model.layers.{n}.{name}": (kind, n) for n in (0, 1) for name, kind in LLAMA_LAYER.items()},
    "model.norm.weight": ("norm", None),
}
GPT2_LAYER = {
    "ln_1.weight": "norm",
    "ln_1.bias": "norm",
    "attn.c_attn.weight": "matrix",
    "attn.c_attn.bias": "bias",
    "attn.c_proj.weight": "matrix",
    "attn.c_proj.bias": "bias",
    "ln_2.weight": "norm",
    "ln_2.bias": "norm",
    "mlp.c_fc.weight": "matrix",
    "mlp.c_fc.bias": "bias",
    "mlp.c_proj.weight": "matrix",
    "mlp.c_proj.bias": "bias",
}
GPT2 = {
    "transformer.wte.weight": ("embedding", -1),
    "transformer.wpe.weight": ("embedding", -1),
    **{f"transformer.h.{n}.{name}": (kind, n) for n in (0, 1) for name, kind in GPT2_LAYER.items()},
    "transformer.ln_f.weight": ("norm", None),
    "transformer.ln_f.bias": ("norm", None),
    "lm_head.weight": ("head", None),
}


def test_locations_in_llama(llama: nn.Module) -> None:
    assert parameter_locations(llama) == LLAMA


def test_locations_in_gpt2(gpt2: nn.Module) -> None:
    assert parameter_locations(gpt2) == GPT2


def test_locations_in_a_decoder_without_a_head(gpt2: nn.Module) -> None:
    decoder = gpt2.get_submodule("transformer")
    expected = {
        name.removeprefix("transformer."): location for name, location in GPT2.items() if name != "lm_head.weight"
    }
    assert parameter_locations(decoder) == expected


def test_locations_in_an_encoder_with_a_classifier() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(
        BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    )
    result = parameter_locations(model)
    assert result["bert.embeddings.word_embeddings.weight"] == ("embedding", -1)
    assert result["bert.embeddings.LayerNorm.weight"] == ("norm", -1), "below the first layer, as the embeddings"
    assert result["bert.encoder.layer.1.output.dense.weight"] == ("matrix", 1)
    assert result["bert.encoder.layer.1.output.dense.bias"] == ("bias", 1)
    assert result["bert.encoder.layer.1.output.LayerNorm.bias"] == ("norm", 1)
    assert result["bert.pooler.dense.weight"] == ("matrix", None)
    assert result["classifier.weight"] == ("head", None)
    assert result["classifier.bias"] == ("bias", None)


def test_locations_in_a_model_with_an_adapter() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    )
    settings = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    result = parameter_locations(get_peft_model(model, settings))
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    assert result[f"{layer}.lora_A.default.weight"] == ("matrix", 1)
    assert result[f"{layer}.lora_magnitude_vector.default.weight"] == ("other", 1)
    assert result["base_model.model.model.embed_tokens.weight"] == ("embedding", -1)
    assert result["base_model.model.model.norm.weight"] == ("norm", None)
    assert result["base_model.model.lm_head.weight"] == ("head", None)


@pytest.mark.parametrize("saved", [False, True])
def test_locations_in_a_state_space_model(tmp_path: Path, saved: bool) -> None:
    from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

    settings = MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4)
    model: nn.Module = MambaForCausalLM(settings)
    if saved:
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    result = parameter_locations(model)
    assert dict(model.named_parameters())["backbone.layers.0.mixer.A_log"].ndim == 2
    assert result["backbone.layers.0.mixer.A_log"] == ("other", 0)
    assert result["backbone.layers.0.mixer.D"] == ("other", 0)
    for name in ("conv1d", "in_proj", "x_proj", "dt_proj", "out_proj"):
        assert result[f"backbone.layers.0.mixer.{name}.weight"] == ("matrix", 0)


def test_locations_of_unusual_parameters() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.zeros(3, 4, 4))
            self.experts_bias = nn.Parameter(torch.zeros(3, 4))
            self.state = nn.Parameter(torch.zeros(4, 2))
            self.state._no_weight_decay = True
            self.convolution = nn.Conv1d(4, 4, 3)
            self.scale = nn.Parameter(torch.zeros(()))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 7, bias=False)
            self.embedding = nn.Embedding(7, 4)
            self.blocks = nn.ModuleList([Block()])
            self.head.weight = self.embedding.weight

    assert parameter_locations(Model()) == {
        "head.weight": ("embedding", -1),  # tied, under the name that comes first
        "blocks.0.experts": ("matrix", 0),
        "blocks.0.experts_bias": ("bias", 0),
        "blocks.0.state": ("other", 0),
        "blocks.0.convolution.weight": ("matrix", 0),
        "blocks.0.convolution.bias": ("bias", 0),
        "blocks.0.scale": ("other", 0),
    }


def test_only_matrices_and_heads_decay(gpt2: nn.Module, copy_parameters: CopyParameters) -> None:
    parameters = copy_parameters(gpt2)
    decays = {}
    for group in parameter_groups(parameters, 0.1):
        for name, tensor in group["params"]:
            assert tensor is next(parameter.tensor for parameter in parameters if parameter.name == name)
            decays[name] = group["weight_decay"]
    assert decays == {name: (0.1 if kind in ("matrix", "head") else 0.0) for name, (kind, _) in GPT2.items()}
    assert len(parameter_groups(parameters, 0.0)) == 1, "as few groups as there are settings"
