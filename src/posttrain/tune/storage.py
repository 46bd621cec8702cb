"""The database of a study: Optuna's storage, in memory, in an SQLite file or in PostgreSQL; its dashboard opens it."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage
from optuna.trial import TrialState
from sqlalchemy import insert, text, update
from sqlalchemy.exc import SQLAlchemyError

from posttrain.store.config import expand_variables
from posttrain.store.database import hide_password
from posttrain.store.errors import LockedError, StorageError, UserError, WorkError
from posttrain.store.files import make_folder, write_atomically
from posttrain.store.installation import install_command
from posttrain.tune.parameters import Choice, Float, Int, Parameter

STUDY_FILE = "study.db"
"""The SQLite file of a study, in its folder."""

TRIALS_FOLDER, LOCK = "trials", "lock"
"""The folder of a study's trials, and in it the lock of the process that works on the study."""

_URL_KEY = "storage"

_NAME_FILE = "name.txt"
"""The file with the name of a study in a database that others share, in its folder."""

_LOCK = 0x74756E65  # "tune" in ASCII: the first key of PostgreSQL's advisory locks

# It logs every study and trial otherwise.
optuna.logging.set_verbosity(optuna.logging.WARNING)


def open_storage(folder: Path | None, url: str | None = None) -> BaseStorage:
    """Opens a study's storage: by the URL, else in the folder's file, else in memory.

    ``${NAME}`` in a URL is replaced from the environment, as in ``store.database``.

    Raises:
        UserError: the URL or the file is not a database.
        StorageError: the disk refused.
    """
    if url is None and folder is None:
        return InMemoryStorage()
    location = describe_location(folder, url)
    if url is None:
        assert folder is not None
        make_folder(folder)
        file = folder / STUDY_FILE
        _use_write_ahead_log(file)
        url = f"sqlite:///{file.resolve()}"
    else:
        url = expand_variables(url, _URL_KEY).replace("postgresql://", "postgresql+psycopg://", 1)
    try:
        with storage_errors(location):
            return RDBStorage(url)
    except ImportError:
        raise UserError(
            "PostgreSQL needs a package that is not installed", where=location, fix=install_command("psycopg[binary]")
        ) from None


def describe_location(folder: Path | None, url: str | None, where: str = _URL_KEY) -> str:
    """Returns the location of a study for errors: its folder, or the URL of its database without the password.

    Args:
        folder: of the study.
        url: of its database.
        where: the key of the URL, named in errors.

    Raises:
        UserError: the URL is not a database, or a variable in it is not set.
    """
    return str(folder) if url is None else hide_password(expand_variables(url, where), where)


def begin_name(folder: Path | None, url: str | None) -> str:
    """Returns the name of a study in its database; where others share that, one that no other folder has.

    Raises:
        UserError: there is a database, and no folder.
    """
    if url is None:
        return "tune"
    if folder is None:
        raise UserError("a database needs a folder for the trials' checkpoints", where="storage", fix="give out")
    file = folder / _NAME_FILE
    if not file.is_file():
        write_atomically(file, f"{folder.resolve().name}-{uuid4().hex[:12]}".encode())
    return file.read_text(encoding="utf-8")


def read_name(folder: Path, url: str | None) -> str:
    """Returns the name of a study that was begun.

    Raises:
        UserError: the folder holds no study that is in a database.
    """
    file = folder / _NAME_FILE
    if url is not None and not file.is_file():
        raise UserError("holds no study that is in a database", where=str(folder), fix="leave --storage out")
    return begin_name(folder, url)


def _use_write_ahead_log(file: Path) -> None:
    """Has an SQLite file synced once a commit, in place of three times."""
    try:
        with sqlite3.connect(file) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        connection.close()
    except sqlite3.DatabaseError as error:
        what = "is damaged" if "malformed" in str(error) else "is not a study"
        fix = "name another --out; with this folder as warm_start it begins with what trials.jsonl has"
        raise UserError(f"{what} ({error})", where=str(file), fix=fix) from None


@contextmanager
def storage_errors(location: str) -> Iterator[None]:
    """Turns a database's refusals into one clear line.

    Raises:
        StorageError: the disk is full.
        WorkError: anything else, such as a lost connection.
    """
    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        reason = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        message = " ".join(str(getattr(reason, "orig", None) or reason).split())
        if "disk is full" in message or "No space left" in message:
            raise StorageError("no space left on device", where=location, fix="free some space") from error
        raise WorkError(f"{location}: the study's database failed: {message}") from error


@contextmanager
def exclusive(storage: BaseStorage, name: str) -> Iterator[None]:
    """Keeps other processes from working on a study of a PostgreSQL; the server ends it when this process dies.

    Raises:
        LockedError: another process works on it.
    """
    if not isinstance(storage, RDBStorage) or storage.engine.dialect.name != "postgresql":
        yield  # the lock of the study's folder is enough
        return
    # A connection of its own, as the lock belongs to it; autocommit, as a transaction would stay open for hours.
    with storage.engine.connect() as plain:
        connection = plain.execution_options(isolation_level="AUTOCOMMIT")
        keys = {"first": _LOCK, "name": name}
        if not connection.scalar(text("SELECT pg_try_advisory_lock(:first, hashtext(:name))"), keys):
            raise LockedError("another process works on this study", where=name, fix="wait for it to end, or end it")
        try:
            yield
        finally:
            connection.execute(text("SELECT pg_advisory_unlock(:first, hashtext(:name))"), keys)


def add_event(
    storage: BaseStorage, trial: int, key: str, event: Mapping[str, Any], shown: tuple[int, float] | None = None
) -> None:
    """Writes an event of a trial, and what Optuna shows of a report, in one transaction.

    Args:
        storage: the database.
        trial: Optuna's id of the trial, which has not ended.
        key: the event's attribute, which is a new one.
        event: JSON values.
        shown: step and value of a report.
    """
    if not isinstance(storage, RDBStorage):
        storage.set_trial_system_attr(trial, key, dict(event))
        if shown is not None:
            storage.set_trial_intermediate_value(trial, *shown)
        return
    from optuna.storages._rdb import models

    # Optuna's own methods are a transaction each, of several queries: they took most of the time of a report.
    with storage.engine.begin() as connection:
        row = {"trial_id": trial, "key": key, "value_json": json.dumps(event)}
        connection.execute(insert(models.TrialSystemAttributeModel), row)
        if shown is not None:
            model = models.TrialIntermediateValueModel
            value, kind = model.intermediate_value_to_stored_repr(shown[1])
            row = {"trial_id": trial, "step": shown[0], "intermediate_value": value, "intermediate_value_type": kind}
            connection.execute(insert(model), row)


def show_running(storage: BaseStorage, trial: int, state: TrialState) -> None:
    """Writes the state of a trial that has not ended, as Optuna has it."""
    if not isinstance(storage, RDBStorage):
        storage.set_trial_state_values(trial, state)
        return
    from optuna.storages._rdb import models

    with storage.engine.begin() as connection:
        connection.execute(update(models.TrialModel).where(models.TrialModel.trial_id == trial).values(state=state))


def close_storage(storage: BaseStorage) -> None:
    """Closes the connections."""
    if isinstance(storage, RDBStorage):
        storage.remove_session()
        storage.engine.dispose()


def to_distribution(parameter: Parameter) -> BaseDistribution:
    """Returns Optuna's form of a parameter."""
    if isinstance(parameter, Float):
        return FloatDistribution(parameter.low, parameter.high, log=parameter.log)
    if isinstance(parameter, Int):
        return IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)
    assert isinstance(parameter, Choice)
    return CategoricalDistribution([_to_category(value) for value in parameter.values])


def to_optuna(parameters: Mapping[str, Parameter], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Returns drawn values as Optuna has them."""
    return {
        name: _to_category(value) if isinstance(parameters[name], Choice) else value for name, value in drawn.items()
    }


def _to_category(value: Any) -> Any:
    """Returns a choice as Optuna stores it: lists and mappings as JSON."""
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value, sort_keys=True)
