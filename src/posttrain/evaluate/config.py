"""The config section ``evaluate``."""

import re

from pydantic import Field, field_validator, model_validator

from posttrain.store.section import Section


class SuiteConfig(Section):
    """One suite: a set of records with answers, and the scorer of the model's answers."""

    data: str = Field(default="test", description="The records: `test` for the workspace's test split, or a file.")
    scorer: str | None = Field(
        default=None,
        description="Scorer of the answers; null: that of `task.kind` (preference, rating, choices, spans), "
        "label_likelihood with a label set, else exact_match.",
    )
    sample: int | None = Field(
        default=None, ge=1, description="Number of records to score, a fixed sample; null: all of them."
    )
    pattern: str | None = Field(
        default=None,
        description="Pattern of scorer regex, which the answer must contain; a group picks the part to compare.",
    )
    function: str | None = Field(default=None, description="Function of scorer python, as package.module:function.")
    columns: dict[str, str] | None = Field(default=None, description="Column names of the file, by our name for each.")

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"no regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _scorer_has_what_it_needs(self) -> "SuiteConfig":
        # An option without its scorer would be ignored in silence.
        for scorer, option in (("regex", "pattern"), ("python", "function")):
            is_set = getattr(self, option) is not None
            if is_set != (self.scorer == scorer):
                raise ValueError(f"scorer {scorer} and `{option}` go together: set both or neither")
        if self.function is not None and not re.fullmatch(r"[\w.]+:\w+", self.function):
            raise ValueError(f"`{self.function}` is not a dotted path; write package.module:function")
        return self


class LatencyConfig(Section):
    """Latency of single requests, measured on candidate and champion side by side."""

    prompts: int = Field(
        default=32,
        ge=0,
        description="Test prompts that are timed, where a rule uses latency or this section is set; 0 leaves it out.",
    )
    repeats: int = Field(
        default=16,
        ge=1,
        description="At most so many repeats of a prompt; fewer once the 99th percentile is stable.",
    )


class BootstrapConfig(Section):
    """The interval of candidate minus champion, see `posttrain.evaluate.paired_interval`."""

    resamples: int = Field(default=10_000, ge=100, description="Bootstrap resamples.")
    level: float = Field(default=0.95, gt=0, lt=1, description="Coverage of the interval.")


class EvaluateConfig(Section):
    """Suites, latency and intervals of every evaluation. The first suite is the main one."""

    suites: dict[str, SuiteConfig] = Field(
        default={"test": SuiteConfig()},
        description="Suites by name; the first one's metrics have bare names.",
    )
    latency: LatencyConfig = Field(default=LatencyConfig(), description="Latency of single requests.")
    bootstrap: BootstrapConfig = Field(default=BootstrapConfig(), description="Interval against the champion.")
    final: bool = Field(
        default=True, description="After the last round, score the champion on all records, not the sample."
    )

    error_weight: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="How much evaluation steers the loss: a training record counts 1 + this * (1 - recall of its label "
        "by the champion on the first suite); 0: all records count alike.",
    )

    def without_latency(self) -> "EvaluateConfig":
        """Returns the section with latency left out."""
        return self.model_copy(update={"latency": self.latency.model_copy(update={"prompts": 0})})

    @field_validator("suites")
    @classmethod
    def _names_fit(cls, suites: dict[str, SuiteConfig]) -> dict[str, SuiteConfig]:
        if not suites:
            raise ValueError("at least one suite is needed")
        for name in suites:
            # The name stands in a gate's rules, where any other character would be read as an operator.
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(f"suite name `{name}`: use lower-case letters, digits and _")
        return suites
