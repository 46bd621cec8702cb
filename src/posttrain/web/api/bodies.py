"""Types that the bodies and paths of the API share."""

import math
from datetime import datetime
from typing import Annotated, Any

from fastapi import Depends, Path
from pydantic import BaseModel, ConfigDict, StringConstraints, field_validator

from posttrain.label.tokens import RANKS
from posttrain.store.section import MAX_INTEGER
from posttrain.web.translations import Translator, translator_of


class Body(BaseModel):
    """The body of a request: an unknown field is an error, and a number in quotes is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _text_without_nul(cls, value: Any) -> Any:
        if isinstance(value, str) and "\x00" in value:
            raise ValueError("holds a NUL character, which is not text")
        return value


class Refusal(BaseModel):
    """Says in one line what is wrong."""

    error: str


AccountName = Annotated[str, Path(max_length=80, pattern=r"^[^\x00-\x1f]+$", description="Name of an account.")]
TokenId = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="Id of a token, as lists show it.")]
ItemId = Annotated[int, Path(ge=1, le=MAX_INTEGER, description="Id of an item.")]

Language = Annotated[Translator, Depends(translator_of)]

Name = Annotated[str, StringConstraints(min_length=1, max_length=80)]
Note = Annotated[str, StringConstraints(max_length=2000)]
Role = Annotated[str, StringConstraints(pattern=f"^({'|'.join(RANKS)})$")]


def _refusal(description: str) -> dict[str, Any]:
    """Describes an error; as a schema, because FastAPI would build a validator of a model for each route and status."""
    return {"description": description, "content": {"application/json": {"schema": Refusal.model_json_schema()}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    status: _refusal(description)
    for status, description in (
        (400, "The body is not a JSON object."),
        (401, "There is no valid session or token."),
        (403, "The role is too low, or another site sent the request."),
        (404, "There is no such thing."),
        (409, "The change contradicts the present state."),
        (413, "The body is too long."),
        (415, "The body is not `application/json`."),
        (422, "A field does not fit."),
        (503, "The database or an artifact failed; try again later."),
    )
}
"""What every operation may answer besides its result."""

TOO_MANY: dict[int | str, dict[str, Any]] = {429: _refusal("Too many attempts or streams.")}


class Changed(BaseModel):
    """The change is stored."""

    changed: bool = True


class Secret(BaseModel):
    """A secret, which is shown this once."""

    id: str
    secret: str
    expires_at: datetime


def plain(value: Any) -> Any:
    """Returns a value with null in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
