"""The config section ``store``: the locations of metadata and artifacts."""

import os
import re

from pydantic import Field

from posttrain.store.errors import UserError
from posttrain.store.section import Section

CONFIG_FILE = "posttrain.yaml"

_VARIABLE = re.compile(r"\$\{(\w+)\}")


class StoreConfig(Section):
    """The ``store`` section of ``posttrain.yaml``; the default needs nothing but a disk.

    ``${NAME}`` in a URL is replaced from the environment, so that no password stands in the file. The value is
    inserted unchanged: reserved characters in a password must be percent-encoded in the variable.
    """

    database: str | None = Field(
        default=None,
        description="URL of the metadata database, such as postgresql://user:${PASSWORD}@host/name, one "
        "database a workspace; null: SQLite in .posttrain/store.db.",
    )
    artifacts: str | None = Field(
        default=None,
        description="URL of the artifact store, such as s3://bucket/prefix, or a store of your own, "
        "`my_module:Class` or `my_module:Class://LOCATION`; null: the folder .posttrain/artifacts.",
    )


def expand_variables(url: str, where: str) -> str:
    """Replaces each ``${NAME}`` in ``url`` by the environment's value.

    Args:
        where: The config key that the URL comes from.

    Raises:
        UserError: a variable is not set.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        # An error, not an empty text: `user:@host` would be tried without a password and fail far from its cause.
        if name not in os.environ:
            raise UserError(f"environment variable `{name}` is not set", where=where, fix=f"export {name}=...")
        return os.environ[name]

    return _VARIABLE.sub(value, url)
