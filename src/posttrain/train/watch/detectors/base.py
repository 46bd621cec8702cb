"""What every detector offers."""

from typing import Any, Protocol, TypeVar

from posttrain.train.watch.findings import Finding, Kind

Values = TypeVar("Values", contravariant=True)


class Detector(Protocol[Values]):
    """Looks at one step after the other and speaks up.

    Its state is JSON, and a detector that loads it goes on as if it had never stopped.
    """

    @property
    def kind(self) -> Kind:
        """What it finds."""

    def observe(self, values: Values) -> Finding | None:
        """Take a step in; the finding, if there is one at this step."""

    def state(self) -> dict[str, Any]:
        """What the next findings depend on."""

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""
