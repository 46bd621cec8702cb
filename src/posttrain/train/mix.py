"""How much of each kind of records a pass has: shares by weights or sizes, with a temperature and caps."""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from posttrain.store.errors import UserError
from posttrain.store.nearest import did_you_mean
from posttrain.store.section import Section
from posttrain.train.passes import Part


class MixConfig(Section):
    """How the kinds of records are mixed.

    The share of a kind is w^(1/T) over the sum of all kinds' w^(1/T), where w is its weight, or with ``sizes`` the
    smaller of its number of records and ``mix_limit``: examples-proportional and temperature-scaled mixing as in T5
    (Raffel et al. 2020, arXiv:1910.10683, section 3.5.2; mT5, Xue et al. 2021, arXiv:2010.11934, calls 1/T alpha).
    """

    mix: dict[str, float] | Literal["sizes"] | None = Field(
        None,
        description="Weight of each kind of records by name, or `sizes`: every kind by its number of records; "
        "none: all records as they are.",
    )
    mix_by: str = Field("source", description="What those names are: `source`, or another column of the data.")
    mix_temperature: float = Field(
        1.0, gt=0, description="T of w^(1/T): above 1 shares are more alike, mT5's 3.33 is usual with sizes."
    )
    mix_limit: int | None = Field(
        None, ge=1, description="Records of one kind that a pass has, and that sizes count, at most; none: any number."
    )
    mix_epochs: int | None = Field(
        None, ge=1, description="How often the stage meets a record at most; other kinds get the rest. None: any."
    )

    @field_validator("mix", mode="before")
    @classmethod
    def _are_weights(cls, value: Any) -> Any:
        if value is None or value == "sizes":
            return value
        if not isinstance(value, Mapping) or not value:
            raise ValueError("a mix is weights by name, or `sizes`")
        for name, weight in value.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < inf:
                raise ValueError(
                    f"the share of `{name}` is `{weight}`; the shares of a mix are above 0: leave out what is not to "
                    "be met"
                )
        return value

    @model_validator(mode="after")
    def _is_a_mix(self) -> Self:
        given = {"mix_temperature", "mix_limit", "mix_epochs"} & self.model_fields_set
        for name in sorted(given):
            if self.mix is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for a mix, and there is none")
        return self


def parts_of(
    config: MixConfig, kinds: np.ndarray, rows: np.ndarray, where: str, passes: Callable[[int], int] | None = None
) -> list[Part]:
    """The kinds that a mix names, with shares of a pass that is as long as there are records of them.

    Shares are whole numbers of records by largest remainders; what a cap takes from a kind goes to the others by their
    weights.

    Args:
        config: with a mix.
        kinds: str [records], what each is.
        rows: int64, the records that come into question.
        where: what errors name.
        passes: into how many passes of so many records the stage goes; needed with ``mix_epochs``.

    Raises:
        UserError: no record is of a kind, its share of a pass is less than a record, or the caps leave too little.
    """
    known = sorted(set(kinds[rows].tolist()))
    names = known if config.mix == "sizes" else list(config.mix or {})
    found = [rows[kinds[rows] == name] for name in names]
    for name, own in zip(names, found, strict=True):
        if not len(own):
            raise UserError(f"no record is of `{name}`", where=where, fix=did_you_mean(name, known))
    sizes = np.array([len(own) for own in found], np.int64)
    limited = sizes if config.mix_limit is None else np.minimum(sizes, config.mix_limit)
    total = int(limited.sum())
    weights = np.array(list(config.mix.values()) if isinstance(config.mix, dict) else limited, np.float64)
    logs = np.log(weights) / config.mix_temperature
    caps = np.full(len(names), total if config.mix_limit is None else config.mix_limit)
    if config.mix_epochs is not None and passes is not None:
        count = passes(total)
        caps = np.minimum(caps, sizes * config.mix_epochs // count)
        if caps.sum() < total:
            raise UserError(
                f"{count} passes of {total} records meet some more than {config.mix_epochs} times",
                where=f"{where}_epochs",
                fix="raise it, or train for fewer epochs or steps",
            )
    shares = apportioned(total, logs, caps)
    for name, share in zip(names, shares, strict=True):
        if share == 0:
            raise UserError(f"the share of `{name}` is less than a record", where=where, fix="raise it or leave it out")
    return [Part(own, share) for own, share in zip(found, shares, strict=True)]


def apportioned(total: int, logs: np.ndarray, caps: np.ndarray | None = None) -> list[int]:
    """``total`` in whole numbers by weights, the largest remainders rounded up (Hamilton's method).

    Args:
        logs: float64, natural logarithms of the weights, so that none is too small beside another.
        caps: int64, what no number is above; what they take off is shared among the others by weight. Together they
            are ``total`` at least.
    """
    shares = np.zeros(len(logs), np.int64)
    free = np.ones(len(logs), bool)
    while free.any():
        left = total - int(shares.sum())
        # Beside the largest of those that still get something: what vanishes beside a full one does not among others.
        weights = np.where(free, np.exp(np.minimum(logs - logs[free].max(), 0.0)), 0.0)
        exact = weights / weights.sum() * left
        full = np.zeros(0, bool) if caps is None else free & (exact >= caps)
        if not full.any():
            whole = np.floor(exact).astype(np.int64)
            first = np.argsort(np.where(free, whole - exact, np.inf), kind="stable")
            whole[first[: left - whole.sum()]] += 1
            shares += whole
            break
        assert caps is not None
        shares[full] = caps[full]
        free &= ~full
    found: list[int] = shares.tolist()
    return found
