"""The files of a study beside its database: ``best.yaml``, the configs of the front, and ``trials.jsonl``."""

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from posttrain.store.files import make_folder, write_atomically
from posttrain.tune.study import Study
from posttrain.tune.trial import Trial, lineage, schedule_to_json

BEST_FILE = "best.yaml"
"""The best settings so far, in a study's folder."""

FRONT_FOLDER = "front"
"""The configs of all trials of the front, in the folder of a study with several objectives."""

_EXPORT_SECONDS = 1.0  # between exports, at least

_EXPORT_SHARE = 50  # times as long as an export takes pass before the next, as it grows with the study

_CHANGED = """\
The settings of the best trial, {number}, changed while it ran, as it went on from checkpoints of others.
Below are the last ones, which alone do not give its result again. trials/{number:04d} has what it ended with.
"""

_CHOSEN = """\
{trial}
Chosen of the {count} trials of the front by the rule: {rule}. {folder}/ has a config of each; take another from there.
"""


class StudyFiles:
    """Keeps ``best.yaml`` and ``trials.jsonl`` up to date; to be called with each trial that has reported or ended."""

    def __init__(self, study: Study, folder: Path | None, to_config: Callable[[Trial], Mapping[str, Any]]) -> None:
        self._study, self._folder, self._to_config = study, folder, to_config
        self._written: Trial | None = None
        self._written_front: list[Trial] = []
        self._last, self._pause = 0.0, _EXPORT_SECONDS

    def __call__(self, trial: Trial) -> None:
        # Whole files are written again: not for each of a thousand short trials.
        is_due = time.monotonic() - self._last >= self._pause
        if trial.ended or is_due:
            self._write_best()
        if is_due:
            began = time.monotonic()
            self._study.export()
            self._last = time.monotonic()
            self._pause = max(_EXPORT_SECONDS, _EXPORT_SHARE * (self._last - began))

    def write(self) -> None:
        """Writes both."""
        self._write_best()
        self._study.export()

    def _write_best(self) -> None:
        best = self._study.best
        front = self._study.front
        if self._folder is None:
            return
        if best is None:  # these are of a space that has changed, and holds none of the trials
            (self._folder / BEST_FILE).unlink(missing_ok=True)
            shutil.rmtree(self._folder / FRONT_FOLDER, ignore_errors=True)
            return
        if best is self._written and front == self._written_front:
            return
        content = _to_yaml(self._to_config(best))
        if self._study.front:
            content = self._comment(best) + content
            self._write_front(self._folder / FRONT_FOLDER)
        spans = lineage(self._study.trials, best.number)
        if len(spans) > 1:
            # As a comment: a config of `posttrain train` has one value of each key.
            schedule = _CHANGED.format(number=best.number) + _to_yaml({"schedule": schedule_to_json(spans)})
            content = "".join(f"# {line}\n" for line in schedule.splitlines()) + content
        write_atomically(self._folder / BEST_FILE, content.encode())
        self._written, self._written_front = best, list(front)

    def _write_front(self, folder: Path) -> None:
        """Writes the config of each trial of the front; that of one which is there already stays as it is."""
        make_folder(folder)
        configs = {f"{trial.number:04d}.yaml": trial for trial in self._study.front}
        for path in folder.iterdir():
            if path.name not in configs:
                path.unlink()
        for name, trial in configs.items():
            if not (folder / name).exists():
                text = f"# {self._describe(trial)}\n{_to_yaml(self._to_config(trial))}"
                write_atomically(folder / name, text.encode())

    def _describe(self, trial: Trial) -> str:
        return f"trial {trial.number}: {self._study.objectives.describe(trial.values or ())}"

    def _comment(self, best: Trial) -> str:
        objectives, count = self._study.objectives, len(self._study.front)
        rule = objectives.choose
        if not objectives.meets_limits(best):
            rule += "; no trial meets the limits"
        text = _CHOSEN.format(trial=self._describe(best), count=count, rule=rule, folder=FRONT_FOLDER)
        return "".join(f"# {line}\n" for line in text.splitlines())


def _to_yaml(content: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
    return text
