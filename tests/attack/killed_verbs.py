"""The commands that `kills.py` kills: their workspaces, and the outcomes that must not differ."""

import hashlib
import random
from pathlib import Path
from typing import Any

import yaml
from kills import Verb

# A hook that writes down each call, in the order in which the champion changes.
_HOOK = 'echo "$POSTTRAIN_ACTION $POSTTRAIN_MODEL $(cat "$POSTTRAIN_CHAMPION/name")" >> calls\n'


def prepare_models(root: Path) -> None:
    """Writes a workspace of three rounds: the base model and two champions; models consist only of their name."""
    from posttrain.loop.model_registry import ModelRegistry
    from posttrain.loop.state import RoundState, save_state
    from posttrain.store.stage_runner import run_stage
    from posttrain.store.workspace import Workspace

    config = {"model": "tiny", "data": {"pool": ["p.csv"], "test": ["t.csv"]}, "deploy": {"command": "sh hook.sh"}}
    (root / "posttrain.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (root / "hook.sh").write_text(_HOOK, encoding="utf-8")
    with Workspace.create(root) as store:
        for number in range(4):

            def work(out: Path, scratch: Path, name: str = f"model {number}") -> dict[str, Any]:
                (out / "name").write_text(name)
                return {}

            model = run_stage(store, f"{number}", 1, kind="model", inputs={}, config={}, seed=0, round=None, work=work)
            if number == 3:  # trained by hand, and never in service
                break
            store.metadata.open_round(number, None)
            decision = {"action": "deploy" if number else "baseline"}
            metrics = {"accuracy": 0.1 + number / 4}
            state = RoundState(candidate=model.id, decision=decision, metrics=metrics)
            save_state(store.metadata, number, state, status="done")
            action = "promote" if number else "baseline"
            ModelRegistry(store).promote(model.id, round=number, action=action)


def registry_outcome(root: Path) -> dict[str, Any]:
    """Reads the deployments, the model behind the link, and the calls of the hook."""
    from posttrain.store.workspace import Workspace

    with Workspace.open(root, write=False) as store:
        rows = [(row.model_id, row.round, row.action, row.reason, row.hook) for row in store.metadata.deployments()]
        champion = (store.champion_path / "name").read_text()
        assert store.artifacts.verify(rows[-1][0]) == []
    calls = (root / "calls").read_text().splitlines() if (root / "calls").exists() else []
    # A hook is called at least once: again if its process was killed before the call was recorded.
    once = [call for number, call in enumerate(calls) if number == 0 or call != calls[number - 1]]
    left = sorted(
        path.name for path in (root / ".posttrain").iterdir() if path.name.startswith(".") or ".new" in path.name
    )
    return {"deployments": rows, "champion": champion, "calls": once, "left": left}


def _model(root: Path, number: int) -> str:
    from posttrain.store.workspace import Workspace

    with Workspace.open(root, write=False) as store:
        names = {
            (store.artifacts.path(row.id) / "name").read_text(): row.id for row in store.metadata.artifacts("model")
        }
    return names[f"model {number}"]


def prepare_loop(root: Path) -> None:
    """Writes a workspace of the tiny model with one round of six labels."""
    topics = ("card", "cash", "loan", "rate")
    words = ("late", "lost", "wrong", "slow", "blue", "high", "low", "odd", "new", "fine")
    rows = [f"my {topic} was {word},{topic}" for word in words for topic in topics]
    random.Random(0).shuffle(rows)
    for name, part in {"answers": rows, "test": rows[30:]}.items():
        (root / f"{name}.csv").write_text("\n".join(["text,label", *part]) + "\n", encoding="utf-8")
    pool = ["text", *(row.partition(",")[0] for row in rows[:30])]
    (root / "pool.csv").write_text("\n".join(pool) + "\n", encoding="utf-8")
    config = {
        "model": "tiny",
        "rounds": 1,
        "task": {"labels": list(topics)},
        "data": {"pool": "pool.csv", "test": "test.csv", "columns": {"prompt": "text", "completion": "label"}},
        "label": {"annotator": "oracle", "file": "answers.csv", "per_round": 6},
        "train": {"epochs": 2, "precision": "float32", "checkpoint": {"every_steps": 2}},
        "precision": "float32",
        "evaluate": {"latency": {"prompts": 0}, "bootstrap": {"resamples": 100}},
        "gate": {"deploy": ["accuracy >= 0"]},
    }
    (root / "posttrain.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def loop_outcome(root: Path) -> dict[str, Any]:
    """Reads the rounds, their artifacts and the champion, and verifies the workspace."""
    from posttrain.inspect.verify import verify
    from posttrain.store.config import StoreConfig
    from posttrain.store.workspace import Workspace

    with Workspace.open(root, write=False) as store:
        rounds = [(row.number, row.status, row.candidate, row.champion_before) for row in store.metadata.rounds()]
        champion = store.champion_path.resolve().name
        artifacts = [row.id for row in store.metadata.artifacts()]
        names = [(named.name, named.version, named.artifact_id) for named in store.metadata.names()]
        finished = sorted((run.stage, run.output) for run in store.metadata.runs() if run.status == "done")
    findings = [finding.line for finding in verify(root, StoreConfig()).findings]
    return {
        "rounds": rounds,
        "champion": champion,
        "artifacts": artifacts,
        "names": names,
        "finished": finished,
        "findings": findings,
        "left": _left(root),
    }


def _left(root: Path) -> list[str]:
    """Lists what a killed process left behind in `.posttrain`."""
    home = root / ".posttrain"
    return sorted(path.name for folder in (home / "tmp", home / "scratch") for path in folder.glob("*"))


def prepare_data(root: Path) -> None:
    """Writes a file of records with repeated ones."""
    lines = [f"question {number * 7919 % 300},c{number % 3}" for number in range(120)]
    (root / "records.csv").write_text("\n".join(["prompt,completion", *lines]) + "\n", encoding="utf-8")


def data_outcome(root: Path) -> dict[str, Any]:
    """Reads the dataset versions, and verifies the workspace."""
    from posttrain.inspect.verify import verify
    from posttrain.store.config import StoreConfig
    from posttrain.store.workspace import Workspace

    with Workspace.open(root, write=False) as store:
        names = [(named.name, named.version, named.artifact_id) for named in store.metadata.names()]
        artifacts = [row.id for row in store.metadata.artifacts()]
    findings = [finding.line for finding in verify(root, StoreConfig()).findings]
    return {"names": names, "artifacts": artifacts, "findings": findings, "left": _left(root)}


def training_outcome(root: Path) -> dict[str, str]:
    """Reads the digests of the trained model's files."""
    files = [path for path in (root / "out").iterdir() if path.suffix in (".safetensors", ".json")]
    skipped = ("started.json", "summary.json")  # with times
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files) if path.name not in skipped
    }


def restored_outcome(root: Path) -> dict[str, Any]:
    """Reads the workspace that is restored from the latest backup."""
    from posttrain.store.backup_repository import open_repository
    from posttrain.store.config import StoreConfig
    from posttrain.store.restore import choose_backup, restore_backup

    copy = root / "restored"
    with open_repository(str(root / "backups"), copy) as repository:
        report = restore_backup(repository, choose_backup(repository, None, ""), copy, StoreConfig)
    left = [path.name for path in (root / "backups" / ".tmp").glob("*") if path.suffix != ".lock"]
    return {**registry_outcome(copy), "missing": report.missing, "left in the repository": left}


def prepare_restore(root: Path) -> None:
    """Backs up the workspace of three rounds, and leaves only the backup."""
    from posttrain.store.backup import create_backup
    from posttrain.store.backup_repository import create_repository
    from posttrain.store.workspace import Workspace

    original = root / "original"
    original.mkdir()
    prepare_models(original)
    with Workspace.open(original) as store, create_repository(str(root / "one.tar"), store.home) as repository:
        create_backup(store, repository)


VERBS: dict[str, Verb] = {
    "rollback": Verb(prepare_models, lambda root: ["models", "rollback", "-w", str(root)], registry_outcome),
    "rollback --to": Verb(
        prepare_models,
        lambda root: ["models", "rollback", "--to", "round 0", "--yes", "-w", str(root)],
        registry_outcome,
    ),
    "promote": Verb(
        prepare_models,
        lambda root: ["models", "promote", _model(root, 3), "-w", str(root)],
        registry_outcome,
    ),
    "run": Verb(
        prepare_loop,
        lambda root: ["run", "-w", str(root)],
        loop_outcome,
    ),
    "data add": Verb(
        prepare_data,
        lambda root: ["data", "add", str(root / "records.csv"), "--name", "set", "-w", str(root)],
        data_outcome,
    ),
    "train": Verb(
        prepare_data,
        lambda root: [
            *("train", "--model", "tiny", "--data", str(root / "records.csv"), "--out", str(root / "out")),
            *("--set", "train.epochs=1", "--set", "train.checkpoint.every_steps=2"),
        ],
        training_outcome,
    ),
    "backup": Verb(
        prepare_models,
        lambda root: ["backup", f"{root / 'backups'}/", "-w", str(root)],
        restored_outcome,
    ),
    "restore": Verb(
        prepare_restore,
        lambda root: ["restore", str(root / "one.tar"), "-w", str(root / "restored")],
        lambda root: registry_outcome(root / "restored"),
        codes=(0, 2),
    ),
}
