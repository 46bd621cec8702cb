"""Every step by the name that the config calls it."""

from posttrain.data.steps.answers import Answers
from posttrain.data.steps.augment import Augment
from posttrain.data.steps.balance import Balance
from posttrain.data.steps.c4 import C4
from posttrain.data.steps.conflicts import Conflicts
from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.data.steps.difficulty import Difficulty
from posttrain.data.steps.drop import Drop
from posttrain.data.steps.exact import Exact
from posttrain.data.steps.fineweb import Fineweb
from posttrain.data.steps.gopher import Gopher
from posttrain.data.steps.gopher_repetition import GopherRepetition
from posttrain.data.steps.label_errors import LabelErrors
from posttrain.data.steps.language import Language
from posttrain.data.steps.length import Length
from posttrain.data.steps.minhash import Minhash
from posttrain.data.steps.normalise import Normalise
from posttrain.data.steps.perplexity import Perplexity
from posttrain.data.steps.pii import PersonalData
from posttrain.data.steps.quality import Quality
from posttrain.data.steps.schema import Schema
from posttrain.data.steps.semantic import Semantic
from posttrain.data.steps.step import Step
from posttrain.data.steps.substring import Substring
from posttrain.data.steps.toxicity import Toxicity

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
