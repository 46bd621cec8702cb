"""Every step by the name that the config calls it."""

from posttrain.data.augment.augment import Augment
from posttrain.data.contamination.decontaminate import Decontaminate
from posttrain.data.steps.balance import Balance
from posttrain.data.steps.drop import Drop
from posttrain.data.steps.duplicates import Conflicts, Exact, Minhash, Semantic
from posttrain.data.steps.gopher import Gopher, GopherRepetition
from posttrain.data.steps.label_errors import LabelErrors
from posttrain.data.steps.language import Language
from posttrain.data.steps.model_scores import Difficulty, Perplexity
from posttrain.data.steps.normalise import Normalise
from posttrain.data.steps.pii import PersonalData
from posttrain.data.steps.quality import Quality
from posttrain.data.steps.step import Step
from posttrain.data.steps.substring import Substring
from posttrain.data.steps.toxicity import Toxicity
from posttrain.data.steps.validity import Answers, Length, Schema
from posttrain.data.steps.web_pages import C4, Fineweb

_ALL: tuple[type[Step], ...] = (
    Answers,
    Augment,
    Balance,
    C4,
    Conflicts,
    Decontaminate,
    Difficulty,
    Drop,
    Exact,
    Fineweb,
    Gopher,
    GopherRepetition,
    LabelErrors,
    Language,
    Length,
    Minhash,
    Normalise,
    Perplexity,
    PersonalData,
    Quality,
    Schema,
    Semantic,
    Substring,
    Toxicity,
)

STEPS: dict[str, type[Step]] = {step.name: step for step in _ALL}
