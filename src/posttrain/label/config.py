"""What the user says about labelling."""

from typing import Annotated, Literal

from pydantic import Field

from posttrain.store.section import Section


class LabelConfig(Section):
    """Who labels, how many records a round, and what becomes of labels whose model was refused."""

    annotator: Literal["oracle", "file"] = Field(
        default="file",
        description="who answers: a file of known answers (oracle) or people by an exported CSV (file)",
    )
    file: str | None = Field(default=None, description="oracle: the file of answers, relative to the workspace")
    columns: dict[str, str] | None = Field(
        default=None, description="oracle: which column of the file holds what; null: as in `data.columns`"
    )
    per_round: int = Field(default=100, ge=1, description="labels asked for in a round")
    budget: int | None = Field(
        default=None, ge=1, description="labels taken in all rounds together; null: as many as the rounds take"
    )
    error_rate: dict[int, Annotated[float, Field(ge=0, le=1)]] = Field(
        default={}, description="oracle: share of wrong labels by round, to rehearse a careless annotator"
    )
    when_refused: Literal["keep", "set_aside", "auto"] = Field(
        default="auto", description="labels of a round whose model was refused: train on them again, or not"
    )
