"""The objectives' functions by name, for every name of the registry.

How they are called goes by shape, output and need of a reference:
``sft(sequences, config, row_weights=...)``;
pairs with a reference ``f(chosen, rejected, reference_chosen, reference_rejected, config, row_weights=...)``;
pairs without one ``f(chosen, rejected, config, tokens_per_pair=..., row_weights=...)``;
``kto(policy, reference, desirable, kl, config)``;
``reward(chosen, rejected, config, margin=..., row_weights=...)``;
``classification(logits, targets, config, weights=..., row_weights=...)``;
``distill(student, teacher, config, targets=...)``;
``distill_hidden(student, teacher, config, projection=...)``.
"""

from collections.abc import Callable

from posttrain.train.objectives.classification import classification
from posttrain.train.objectives.distillation import distill, distill_hidden
from posttrain.train.objectives.dpo import dpo, hinge, ipo, robust_dpo
from posttrain.train.objectives.kto import kto
from posttrain.train.objectives.loss import Loss
from posttrain.train.objectives.reference_free import cpo, orpo, simpo
from posttrain.train.objectives.reward import reward
from posttrain.train.objectives.sft import sft

FUNCTIONS: dict[str, Callable[..., Loss]] = {
    "sft": sft,
    "dpo": dpo,
    "cdpo": dpo,
    "robust_dpo": robust_dpo,
    "ipo": ipo,
    "hinge": hinge,
    "orpo": orpo,
    "simpo": simpo,
    "cpo": cpo,
    "kto": kto,
    "reward": reward,
    "classification": classification,
    "distill": distill,
    "distill_hidden": distill_hidden,
}
