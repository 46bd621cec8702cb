"""File systems behind fsspec URLs, and their errors as one clear line."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from posttrain.store.errors import UserError, WorkError
from posttrain.store.installation import file_system_hint


def open_file_system(protocol: str, where: str) -> Any:
    """Returns the fsspec file system of a protocol.

    Args:
        where: the config key or the URL that names it, for errors.

    Raises:
        UserError: nothing that is installed knows the protocol.
    """
    import fsspec

    try:
        # Without the cache: a remembered listing would hide what another process has committed meanwhile.
        return fsspec.filesystem(protocol, use_listings_cache=False)
    except ImportError as error:
        raise UserError(
            f"`{protocol}://` needs a package that is not installed ({error})",
            where=where,
            fix=file_system_hint(protocol),
        ) from None
    except ValueError:
        raise UserError(f"`{protocol}://` is not known", where=where, fix="such as s3://bucket") from None


@contextmanager
def remote_errors(url: str, what: str, *, missing: str) -> Iterator[None]:
    """Translates the remote side's errors into one clear line.

    Args:
        url: for the line.
        what: the thing that cannot be reached.
        missing: what to do where something does not exist.

    Raises:
        UserError: access is denied, or there is no such thing.
        WorkError: it cannot be reached.
    """
    try:
        yield
    except PermissionError as error:
        raise UserError(f"access denied ({error})", where=url, fix="check the credentials") from error
    except FileNotFoundError as error:
        raise UserError(f"not found ({error})", where=url, fix=missing) from error
    except _error_types(url.partition("://")[0]) as error:
        raise WorkError(f"{url}: {what} cannot be reached ({error})") from error


def _error_types(protocol: str) -> tuple[type[Exception], ...]:
    """Returns the exception types that a file system of this protocol raises."""
    if protocol not in ("s3", "s3a"):
        return (OSError,)
    from botocore.exceptions import BotoCoreError, ClientError

    return OSError, BotoCoreError, ClientError
