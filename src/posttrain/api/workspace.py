"""A workspace in Python: run the loop, read its state, label, and write the report."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from posttrain.api import argument_names, open_call
from posttrain.api.models import Models
from posttrain.inspect.preview import preview_selection
from posttrain.inspect.status import status
from posttrain.label.webhook import webhook_calls
from posttrain.loop.config import Config, create_workspace
from posttrain.loop.loop import Loop
from posttrain.loop.open_batch import answer_batch, read_batch
from posttrain.loop.watch import loop_session
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError
from posttrain.store.logs import quiet_libraries
from posttrain.store.text_files import finite_json

Label = str | int | list[Any] | None
"""A label or a text; of the kinds of tasks that have them, a rating, or a list of labels or spans."""

Answers = Mapping[str, Label] | Iterable[Mapping[str, Any]] | Callable[[dict[str, Any]], Label]


class Workspace:
    """The loop of a folder with a ``posttrain.yaml``; each method does what the verb of its name does.

    Nothing is held open between two calls: a notebook, the command line and ``posttrain serve`` may use one workspace
    side by side, and each call reads the config again.

    Args:
        path: the workspace's folder.

    Attributes:
        path: the workspace's folder, absolute.
        models: lists, promotes, rolls back, loads and pushes its models (`posttrain.Models`).

    Raises:
        UserError: there is no ``posttrain.yaml`` in the folder. Every method raises one line like the command's: the
            mistake, where it is, and what to do.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        if not (self.path / CONFIG_FILE).is_file():
            fix = f"posttrain.Workspace.create({str(path)!r}, config), or posttrain init {path}"
            raise UserError(f"no {CONFIG_FILE} here", where=str(path), fix=fix)
        self.models = Models(self.path)

    def __repr__(self) -> str:
        return f"Workspace({str(self.path)!r})"

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> "Workspace":
        """Makes a folder a workspace, as ``posttrain init`` does, with a config of your own.

        Args:
            path: the folder; made if missing. Files may lie in it already.
            config: the keys of ``posttrain.yaml``, which docs/configuration.md lists, such as ``{"model": "tiny",
                "task": {"labels": "labels.txt"}, "data": {"pool": "inputs.csv", "test": "test.csv"}}``; paths are
                relative to the folder.

        Raises:
            UserError: a key or a value is wrong, or there is a workspace already; nothing is written.
        """
        values = _plain(config)
        checked = Config.read(values, "config")
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        create_workspace(Path(path), text.encode(), checked.store)
        return cls(path)

    def run(
        self, rounds: int | None = None, until: str | None = None, *, urgent: bool = False, partial: bool = False
    ) -> str | None:
        """Runs the loop until it is done or waits; resumes where it stopped, also after a kill.

        Args:
            rounds: number of the last round; ``rounds`` of the config by default.
            until: the stage of the round in progress to stop after.
            urgent: True to set ``urgent`` to 1 in the triggers.
            partial: True to continue with the labels given so far.

        Returns:
            What the loop waits for, such as labels (`batch` and `label` read and answer them); None if it is done.

        Raises:
            UserError: another process runs this loop, or the config or the data are wrong.
            WorkError: a stage failed.
        """
        quiet_libraries()
        with argument_names(), loop_session(self.path) as (store, config):
            return Loop(store, config).run(rounds, until, urgent, partial)

    def status(self) -> dict[str, Any]:
        """Returns where the loop stands: the dictionary that ``posttrain status --json`` prints.

        Its keys are those of `posttrain.inspect.status.status`, among them ``round``, ``champion``, ``waiting`` and
        ``rounds`` (with labels, metrics and decision of each).
        """
        with open_call(self.path, checked=False) as (store, config):
            state: dict[str, Any] = finite_json(status(store, config))
        return state

    def select(self, n: int | None = None, strategy: str | None = None) -> dict[str, Any]:
        """Chooses the pool records that the champion would have labelled next, without asking anyone.

        Args:
            n: number of records; ``label.per_round`` by default.
            strategy: strategy; ``select.strategy`` by default.

        Returns:
            The dictionary that ``posttrain select --json`` prints: ``records`` (best first, each with ``id``,
            ``input``, ``predicted``, ``reason``, ``why`` and ``scores`` by name), ``strategy``, ``outlook`` (the
            expected gain) and ``labels_left``.
        """
        if n is not None and n < 1:
            raise UserError(f"{n} records are none", where="n", fix="give 1 or more")
        quiet_libraries()
        with open_call(self.path, write=True) as (store, config):
            selection: dict[str, Any] = finite_json(preview_selection(store, config, strategy, n).to_json())
        return selection

    def evaluate(self, model: str | None = None, *, full: bool = False) -> dict[str, Any]:
        """Measures a model, or an ensemble of models, on the test suites of the config.

        Args:
            model: ``champion``, ``round 2``, the beginning of an id, or the file of an ensemble (``.yaml``); the
                champion by default.
            full: True to measure on all test records in place of the sample.

        Returns:
            The dictionary that ``posttrain eval --json`` prints: ``model``, ``evaluation`` and ``metrics``; of an
            ensemble also ``ensemble``, by suite: score and cost of each model alone, and a cascade's curve.

        Raises:
            UserError: there is no such model, or the ensemble's file is wrong.
        """
        from posttrain.inspect.evaluation import evaluate_model

        quiet_libraries()
        with open_call(self.path, write=True) as (store, config):
            result: dict[str, Any] = finite_json(evaluate_model(store, config, model, full))
        return result

    def batch(self) -> list[dict[str, Any]]:
        """Reads the batch that is out to be labelled, with the labels that it has so far.

        Returns:
            A dictionary a record: ``id``, ``input`` (a text), ``prompt`` (its turns), ``suggestion`` of the champion,
            ``reason`` of its choice, ``meta`` (its other columns), ``label`` (None without one); in a loop on
            preferences also ``a`` and ``b``, the two answers.

        Raises:
            UserError: no round waits for labels.
        """
        with open_call(self.path) as (store, config):
            return read_batch(store, config)

    def label(self, answers: Answers) -> tuple[int, int]:
        """Gives labels to records of the batch that is out, as ``posttrain label import`` does from a file.

        The labels stand in ``labels/round-N.csv`` and in the queue; labels that are not given stay as they are.

        Args:
            answers: a mapping from a record's id to its label; dictionaries with ``id`` and ``label``; or a function of
                a record of `batch` that returns its label. None leaves a record as it is. In a loop on preferences a
                label is ``a``, ``b`` or ``tie``.

        Returns:
            The number of labels that are in, and of records in the batch; once all are in, `run` continues.

        Raises:
            UserError: no round waits for labels, an id is not in the batch, or a label is not in the label set; nothing
                is stored.
        """
        with open_call(self.path, write=True) as (store, config):
            if callable(answers) and not isinstance(answers, Mapping):
                answer_of = {record["id"]: answers(record) for record in read_batch(store, config)}
            else:
                answer_of = _by_id(answers)
            types = (str,) if config.task.read_answer is None else (str, int, list)
            for id, label in answer_of.items():
                if label is not None and type(label) not in types:
                    raise UserError(f"the label of record {id} is {type(label).__name__} and no text", where="labels")
            labels = {str(id): label for id, label in answer_of.items() if label is not None}
            with webhook_calls(store.metadata, config.label.webhook):
                return answer_batch(store, config, labels)

    def report(self, file: str | Path = "report.html") -> Path:
        """Writes one self-contained HTML page that works offline; returns its path.

        Args:
            file: the page, relative to the current folder; an earlier one is replaced.

        Raises:
            UserError: it cannot be written there.
        """
        from posttrain.web.loop_report import write_report
        from posttrain.web.page import check_page_file

        page = Path(file)
        check_page_file(page)
        with open_call(self.path) as (store, config):
            write_report(page, store, config)
        return page


def _plain(value: Any) -> Any:
    """Converts mappings, tuples and paths to what YAML writes without tags."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _by_id(answers: Any) -> dict[Any, Any]:
    """Returns labels by record id.

    Raises:
        UserError: they are neither a mapping nor dictionaries with ``id`` and ``label``, or an id occurs twice.
    """
    if isinstance(answers, Mapping):
        return dict(answers)
    if isinstance(answers, str | bytes) or not isinstance(answers, Iterable):
        fix = "give a mapping from id to label, dictionaries with `id` and `label`, or a function"
        raise UserError(f"{type(answers).__name__} holds no labels", where="labels", fix=fix)
    labels: dict[Any, Any] = {}
    for index, answer in enumerate(answers):
        where = f"labels[{index}]"
        if not isinstance(answer, Mapping) or "id" not in answer or "label" not in answer:
            raise UserError("is not a dictionary with `id` and `label`", where=where)
        if answer["id"] in labels:
            raise UserError(f"record {answer['id']} has a label already", where=where)
        labels[answer["id"]] = answer["label"]
    return labels
