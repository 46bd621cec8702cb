"""Reads every file that a config names, and reports what is in them before anything is computed."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.data.reading.columns import is_closed_set
from posttrain.data.reading.conversion import hide_answer, read_answers
from posttrain.data.reading.data_files import DataPath, locate_file
from posttrain.data.reading.formats import read_rows
from posttrain.data.reading.reader import scan_records, unused_columns
from posttrain.data.reading.rows import Problem, Row, group_problems, join_names, list_command
from posttrain.data.records.record import RECORD
from posttrain.data.versions.named_versions import Versions, resolve_versions
from posttrain.evaluate.metric_names import right_or_wrong_gains
from posttrain.evaluate.paired_interval import score_interval
from posttrain.loop.config import Config
from posttrain.loop.stages.collect import with_added_files
from posttrain.models.answer_form import AnswerForm
from posttrain.models.task import TaskConfig
from posttrain.store.errors import SIMILAR, closest_match, shorten
from posttrain.store.expression import Rule, parse
from posttrain.store.paths import locate_path
from posttrain.store.workspace import Workspace

_NAMES = 3
"""Labels that a note names."""

_MOST_RECORDS = 1_000_000
"""Test records that a note asks for."""


@dataclass
class FileReport:
    """The content of one file or dataset version.

    Args:
        name: The name in the config.
        role: ``pool``, ``labelled``, ``test``, ``suite NAME`` or ``answers``.
        columns: The columns of its first row; empty for a version.
        unused: The columns that only ``meta`` keeps.
        records: The number of its records.
        answers: The number of its records with an answer.
        labels: The number of records by answer, or of the parts of answers by label; empty for a pool, whose answers
            are hidden.
        inputs: The line of each input, by the input's id.
        problems: One for each kind of problem that makes a run stop.
    """

    name: str
    role: str
    columns: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    records: int = 0
    answers: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    inputs: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns names and counts, without the inputs."""
        values = {name: getattr(self, name) for name in ("name", "role", "columns", "unused", "records")}
        return {**values, "labels": dict(self.labels)}


@dataclass(frozen=True)
class DataReport:
    """Report on the content of a config's files.

    Args:
        files: A report for each file and role.
        labels: The closed label set; empty for free text.
        errors: Problems that end a run before it begins.
        notes: Facts to know that end nothing, one line each.
    """

    files: list[FileReport]
    labels: list[str]
    errors: list[Problem]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {
            "files": [file.to_json() for file in self.files],
            "label_set": self.labels,
            "errors": [str(problem.error()) for problem in self.errors],
            "notes": self.notes,
        }


def check_data(config: Config, root: Path, store: Workspace | None) -> DataReport:
    """Reads every file and version that the config names: pool, labelled, test, suites and the file of answers.

    Args:
        config: The workspace's config, with its labels read.
        root: The workspace's folder.
        store: The workspace; None if it has never run.

    Raises:
        UserError: a name is neither a file's nor a version's.
    """
    data = with_added_files(config.data, root)
    versions = resolve_versions(data.files, root, store)
    labels = config.task.label_names
    files = []
    for name, role, columns in _sources(config, root):
        if name in versions:
            files.append(_read_version(versions, name, role, config.task))
        else:
            files.append(_read_file(locate_file(root, name), name, role, columns, config))
    errors = [problem for file in files for problem in file.problems]
    if not data.pool and not data.labelled:
        errors.append(Problem("data.pool", None, "no file", "no file of records is named", "name a file of inputs"))
    if data.test is None:
        fix = "name a file or a dataset version, or a share of `labelled`"
        errors.append(Problem("data.test", None, "no file", "there is no record to test on", fix))
    for file in files:
        if labels and file.role != "pool" and (unknown := _unknown_labels(file, labels)):
            errors.append(unknown)
    measured = [file for file in files if file.role == "test" or file.role.startswith("suite")]
    pool = {id for file in files if file.role == "pool" for id in file.inputs}
    if pool and all(any(id in file.inputs for file in measured) for id in pool):
        text = f"all {len(pool):,} inputs are also in what models are measured on, so none is left to learn from"
        errors.append(Problem("data.pool", None, "shared inputs", text, "name other files"))
    shared = list(_shared_inputs(files, measured))
    if not any(step.removes_leaks for step in data.steps):
        fix = "list the step `decontaminate` in `data.steps`, which removes them from training"
        errors += [Problem(where, None, "shared inputs", text, fix) for where, text in shared]
        shared = []
    notes = [f"{where}: {text}; `decontaminate` removes them from training" for where, text in shared]
    return DataReport(
        files, labels, errors, [*_label_notes(files, labels, data.test), *notes, *_gate_notes(config, files)]
    )


def _sources(config: Config, root: Path) -> Iterator[tuple[str, str, Mapping[str, str] | None]]:
    """Yields name, role and columns of everything that the config names.

    Not of missing files of suites and answers, which the checks of these sections report with their key.
    """
    data = with_added_files(config.data, root)
    tests = data.test if isinstance(data.test, list) else []
    for role, names in (("pool", data.pool), ("labelled", data.labelled), ("test", tests)):
        for name in names:
            yield name, role, data.columns
    for suite_name, suite in config.evaluate.suites.items():
        if suite.data != "test" and locate_path(root, suite.data).exists():
            yield suite.data, f"suite {suite_name}", suite.columns or data.columns
    answers = config.label.file if config.label.annotator == "oracle" else None
    if answers is not None and locate_path(root, answers).exists():
        yield answers, "answers", data.columns


def _read_version(versions: Versions, name: str, role: str, task: TaskConfig) -> FileReport:
    version = versions[name]
    report = FileReport(name, role)
    # As the loop takes them: the test split where records are held out, and the training split for all else.
    split = None if version.whole or len(version.splits) == 1 else "test" if role == "test" else version.splits[0]
    read_answer = None if role == "pool" else task.read_answer
    for table in version.tables(split, RECORD.names if read_answer else ["input_id", "completion", "line"]):
        _count(report, (read_answers(table, read_answer) if read_answer else table).to_pylist(), task.form)
    return report


def _read_file(path: DataPath, name: str, role: str, columns: Mapping[str, str] | None, config: Config) -> FileReport:
    report = FileReport(name, role)
    first = next(read_rows(path, name), None) if not isinstance(path, Path) or path.exists() else None
    if isinstance(first, Row):
        report.columns = list(first.values)
        report.unused = unused_columns(path, name, columns)
    problems = []
    needs_answers = role != "pool"
    suite = config.evaluate.suites[role.removeprefix("suite ")] if role.startswith("suite ") else None
    # The answers of a suite with another scorer are texts as they are.
    task = TaskConfig() if suite and suite.scorer != config.task.kind else config.task
    read_answer = hide_answer if task.read_answer and role == "pool" else task.read_answer

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal needs_answers
        for item in scan_records(path, columns, name=name, answers=role != "pool", read_answer=read_answer):
            if not isinstance(item, Problem):
                # Plain text is measured by its perplexity.
                needs_answers &= item["text"] is None
                yield item
            elif item.blocking:
                problems.append(item)

    _count(report, rows(), task.form)
    if needs_answers and report.records and not report.answers and not problems:
        fix = f"the columns are {join_names(report.columns)}: name that of the answers in `data.columns`"
        problems.append(Problem(name, None, "no answer", "no record has an answer", fix))
    report.problems = list(group_problems(problems))
    return report


def _count(report: FileReport, rows: Iterable[Mapping[str, Any]], form: AnswerForm | None) -> None:
    for row in rows:
        report.records += 1
        report.answers += row["completion"] is not None
        report.inputs.setdefault(row["input_id"], row["line"])
        answer = row["completion"]
        if report.role != "pool" and answer is not None:
            report.labels.update([answer] if form is None else form.labels_of(answer))


def _unknown_labels(file: FileReport, labels: Collection[str]) -> Problem | None:
    """Returns one problem for all answers of a file outside the label set, with the nearest label of the first ones."""
    unknown = Counter({label: count for label, count in file.labels.items() if label not in labels})
    if not unknown:
        return None
    texts = []
    for label, count in unknown.most_common(_NAMES):
        near = closest_match(label[:100], labels, SIMILAR)
        meant = f", did you mean `{near}`?" if near else ""
        texts.append(f"`{shorten(label)}` ({count:,} {'record' if count == 1 else 'records'}{meant})")
    more = f" and {len(unknown) - _NAMES:,} more" if len(unknown) > _NAMES else ""
    what = "1 label is" if len(unknown) == 1 else f"{len(unknown):,} labels are"
    fix = f"correct them, or add them to task.labels; {list_command(file.name)}"
    return Problem(file.name, None, "unknown label", f"{what} not in the label set: {', '.join(texts)}{more}", fix)


def _label_notes(files: list[FileReport], labels: list[str], test: Any) -> Iterator[str]:
    """Yields which labels no record has, and which answers could be a label set."""
    for role in ("test", "labelled"):
        counts: Counter[str] = sum((file.labels for file in files if file.role == role), Counter())
        if not counts:
            continue
        if labels:
            missing = [label for label in labels if label not in counts]
            # Where test records are drawn from the labelled ones, these decide what can be measured.
            known = role == "test" or isinstance(test, float)
            effect = "no metric tells how well they are learned" if known else "only new labels can teach them"
            if missing:
                names = join_names(missing, _NAMES)
                yield f"{len(missing):,} of {len(labels):,} labels occur in no {role} record: {names}; {effect}"
        elif is_closed_set(counts):
            yield (
                f"the {role} records have only {len(counts):,} different answers: "
                "list them in `task.labels` if no others are allowed"
            )


def _gate_notes(config: Config, files: list[FileReport]) -> Iterator[str]:
    """Yields the rules of deployment that an equal candidate fails only because there are too few test records."""
    gains = right_or_wrong_gains(config.evaluate, bool(config.task.label_set))
    for text in config.gate.deploy:
        rule = parse(text, "gate.deploy")
        suites = {gains.get(name.removesuffix(".low").removesuffix(".high")) for name in rule.names}
        name = suites.pop() if len(suites) == 1 else None
        if name is None:
            continue
        suite = config.evaluate.suites[name]
        roles = ("test",) if suite.data == "test" else (f"suite {name}",)
        records = sum(file.records for file in files if file.role in roles)
        records = min(records, suite.sample or records)
        if not records or _holds_for_equal(rule, records, config.evaluate.bootstrap.level):
            continue
        sizes = range(1, _MOST_RECORDS + 1)
        needed = 1 + bisect_left(sizes, True, key=lambda n: _holds_for_equal(rule, n, config.evaluate.bootstrap.level))
        if needed <= _MOST_RECORDS:
            yield (
                f"gate.deploy: `{text}` holds for no candidate that is as good as the champion: {records:,} records of "
                f"suite {name} are too few, {needed:,} are enough where no answer differs"
            )


def _holds_for_equal(rule: Rule, records: int, level: float) -> bool:
    low, high = score_interval(0, 0, records, level)
    ends = {"low": low, "high": high}
    return rule.holds({name: ends.get(name.rpartition(".")[2], 0.0) for name in rule.names})


def _shared_inputs(files: list[FileReport], measured: list[FileReport]) -> Iterator[tuple[str, str]]:
    """Yields each training file that shares inputs with a file that models are measured on, and a line about them."""
    for file in files:
        for other in measured if file.role in ("pool", "labelled") else []:
            shared = [id for id in file.inputs if id in other.inputs]
            if shared:
                count = "1 input is" if len(shared) == 1 else f"{len(shared):,} inputs are"
                first = ""
                # The lines of a version are those of the files that it was built from.
                if file.columns and other.columns:
                    first = f", the first on line {file.inputs[shared[0]]:,}, there on line {other.inputs[shared[0]]:,}"
                yield file.name, f"{count} also in {other.name}{first}"
