"""The Hugging Face Hub: names of its datasets, and its errors as errors of one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from posttrain.store.errors import StorageError, UserError, shorten

HUB_PREFIX = "hub:"
"""Begins the name of a dataset on the Hub, where files could be named too."""


class UnreachableHubError(StorageError):
    """The Hub gives no reply: no network, a wrong endpoint, or its client works offline."""


@contextmanager
def hub_errors(where: str, kind: str) -> Iterator[None]:
    """Reports what the Hub refuses, and that it cannot be reached.

    Args:
        where: the name that the user gave.
        kind: ``dataset`` or ``model``.

    Raises:
        UnreachableHubError: there is no reply.
        UserError: the Hub knows no such repository, or does not let this token read or write it.
    """
    from huggingface_hub import errors

    # The errors of its HTTP library, which is another one in other versions.
    transport: Any = errors.HfHubHTTPError.__bases__[0]
    try:
        yield
    except errors.RevisionNotFoundError:
        fix = "download its files, and name them"
        raise UserError("the Hub has not converted this dataset to Parquet", where=where, fix=fix) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403, 404):
            what = f"the Hub has no such {kind}, or this token may not use it"
            raise UserError(what, where=where, fix="check the name, and sign in: hf auth login, or HF_TOKEN") from None
        raise StorageError(f"the Hub refused: {_first_line(error)}", where=where) from None
    except errors.HFValidationError as error:
        raise UserError(_first_line(error), where=where, fix="write OWNER/NAME") from None
    except (OSError, transport) as error:
        offline = isinstance(error, errors.OfflineModeIsEnabled)
        why = "HF_HUB_OFFLINE is set" if offline else shorten(_first_line(error), 120)
        raise UnreachableHubError(f"the Hub cannot be reached ({why})", where=where, fix="check the network") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
