"""Maps the name of each step to its class, which is imported on first use."""

from posttrain.data.steps.step import DataStep
from posttrain.store.extensions import Registry

BUILT_IN = {
    "answers": "posttrain.data.steps.validity:Answers",
    "augment": "posttrain.data.steps.augment:Augment",
    "balance": "posttrain.data.steps.balance:Balance",
    "c4": "posttrain.data.steps.web_pages:C4",
    "conflicts": "posttrain.data.steps.duplicates:Conflicts",
    "decontaminate": "posttrain.data.steps.decontaminate:Decontaminate",
    "difficulty": "posttrain.data.steps.model_scores:Difficulty",
    "drop": "posttrain.data.steps.drop:Drop",
    "exact": "posttrain.data.steps.duplicates:Exact",
    "fineweb": "posttrain.data.steps.web_pages:Fineweb",
    "gopher": "posttrain.data.steps.gopher:Gopher",
    "gopher_repetition": "posttrain.data.steps.gopher:GopherRepetition",
    "label_errors": "posttrain.data.steps.label_errors:LabelErrors",
    "language": "posttrain.data.steps.language:Language",
    "length": "posttrain.data.steps.validity:Length",
    "minhash": "posttrain.data.steps.duplicates:Minhash",
    "normalise": "posttrain.data.steps.normalise:Normalise",
    "perplexity": "posttrain.data.steps.model_scores:Perplexity",
    "pii": "posttrain.data.steps.pii:PersonalData",
    "quality": "posttrain.data.steps.quality:Quality",
    "schema": "posttrain.data.steps.validity:Schema",
    "semantic": "posttrain.data.steps.duplicates:Semantic",
    "toxicity": "posttrain.data.steps.toxicity:Toxicity",
}

STEPS: Registry[type[DataStep]] = Registry("step", "posttrain.steps", BUILT_IN, DataStep)
