"""The layout of a LoRA adapter: which tensors of the base become factors, and how peft names them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from posttrain.merge.lora_adapter import PREFIX
from posttrain.merge.low_rank import LowRank
from posttrain.merge.plan import MergePlan
from posttrain.merge.sources import HEAD, embedding_of
from posttrain.models.loading import load_config
from posttrain.models.shape import meta_model
from posttrain.store.errors import UserError, shorten


class AdapterLayout:
    """Which tensors of the base become factors, and how peft names them.

    Args:
        plan: the merge; its template is the base.

    Raises:
        UserError: transformers does not know the base's family.
    """

    def __init__(self, plan: MergePlan) -> None:
        self._plan = plan
        config = plan.template.config
        self.classifier = any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or [])
        self.model: nn.Module = meta_model(load_config(str(plan.template.folder)), classifier=self.classifier)
        self._tied = config.get("tie_word_embeddings") is True
        names = {tensor.name for tensor in plan.tensors}
        # Where no model has a head of its own, it changes with the embedding.
        self._head_of = embedding_of(names) if self._tied and HEAD not in names else None

    def module(self, tensor: str) -> nn.Module:
        """Returns the module that a tensor belongs to.

        Raises:
            UserError: there is none, as of experts that transformers keeps in one tensor.
        """
        name, _, attribute = tensor.rpartition(".")
        try:
            module = self.model.get_submodule(name)
        except AttributeError:
            module = None
        if module is None or not hasattr(module, attribute) or type(module).__name__ == "Conv1D":
            raise UserError(
                f"tensor {shorten(tensor)} is changed, and peft adapts no module that holds it",
                where=self._plan.template.name,
                fix="merge into a model, without as_adapter",
            )
        return module

    def is_factored(self, tensor: str) -> bool:
        """Returns whether a changed tensor is written as B A, which the weights of linear layers are."""
        module = self.module(tensor)
        # peft saves a classifier's head as a whole, and a head that is tied must change with the embedding.
        head = (tensor == HEAD and self._tied) or (self.classifier and "." not in tensor.removesuffix(".weight"))
        return isinstance(module, nn.Linear) and tensor.endswith(".weight") and not head

    def tensors(self, matrices: Mapping[str, LowRank], whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of the adapter's file by their names there; arguments are as of `config`."""
        tensors = {}
        for module, matrix in matrices.items():
            tensors[f"{PREFIX}{module}.lora_A.weight"] = matrix.down
            tensors[f"{PREFIX}{module}.lora_B.weight"] = matrix.up
        for name, value in whole.items():
            module, _, attribute = name.rpartition(".")
            tensors[PREFIX + (f"{module}.base_layer.{attribute}" if module in matrices else name)] = value
        if self._head_of is not None and self._head_of in whole:
            tensors[PREFIX + HEAD] = whole[self._head_of].clone()
        return tensors

    def config(self, matrices: Mapping[str, LowRank], whole: Sequence[str]) -> dict[str, Any]:
        """Returns the content of adapter_config.json.

        Args:
            matrices: the factors by module.
            whole: names of the tensors that are saved as a whole.
        """
        ranks = {module: matrix.rank for module, matrix in matrices.items()}
        common = Counter(ranks.values()).most_common(1)[0][0] if ranks else 1
        pattern = {module: rank for module, rank in ranks.items() if rank != common}
        modules = {name.rpartition(".")[0]: None for name in whole}
        saved = [module for module in modules if module not in matrices]
        if self._head_of in whole:
            saved.append(HEAD.removesuffix(".weight"))
        location = self._plan.template.location
        # A path of the Hub's cache means nothing elsewhere, and the name does.
        name = self._plan.template.name if "/snapshots/" in location else location
        return {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if self.classifier else "CAUSAL_LM",
            "base_model_name_or_path": name,
            "inference_mode": True,
            "r": common,
            "lora_alpha": common,
            "lora_dropout": 0.0,
            "rank_pattern": pattern,
            "alpha_pattern": pattern,
            "target_modules": self._targets(list(ranks)),
            "modules_to_save": saved or None,
            "bias": "lora_only" if len(modules) > len(set(modules) - set(matrices)) else "none",
        }

    def _targets(self, modules: Sequence[str]) -> list[str]:
        """Returns the last parts of the modules' names, where these mean no other module too."""
        linear = [name for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]
        endings = {name.rpartition(".")[2] for name in modules}
        clear = {end for end in endings if all(name in modules for name in linear if name.rpartition(".")[2] == end)}
        return sorted(clear | {name for name in modules if name.rpartition(".")[2] not in clear})
