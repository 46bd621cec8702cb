"""``posttrain data``: records and dataset versions, one file a verb."""

from typing import ClassVar

import typer

from posttrain.cli.verbs import LazyGroup, LazyVerb


class _Verbs(LazyGroup):
    verbs: ClassVar = {
        "check": LazyVerb(
            "posttrain.cli.data.add",
            "Every problem of the files, with file and line; leaves with 2 if `data add` would refuse one for it.",
        ),
        "add": LazyVerb(
            "posttrain.cli.data.add",
            "With --name: run the pipeline and name the version. Without: copy files into the loop's pool.",
        ),
        "list": LazyVerb("posttrain.cli.data.versions", "All dataset versions."),
        "log": LazyVerb(
            "posttrain.cli.data.versions",
            "A dataset's versions, newest first: what came, what went, by which steps, and why.",
        ),
        "tag": LazyVerb("posttrain.cli.data.versions", "Have NAME@WORD lead to a version from now on."),
        "show": LazyVerb(
            "posttrain.cli.data.records", "A version's funnel and records, or what was rejected on the way to it."
        ),
        "why": LazyVerb(
            "posttrain.cli.data.records",
            "What became of a record: where it was read, what steps did to it, and why it stayed or went.",
        ),
        "diff": LazyVerb("posttrain.cli.data.versions", "What came and what went between two versions, and why."),
        "export": LazyVerb(
            "posttrain.cli.data.records",
            "Write a version's records to a new file, or to a folder that `datasets.load_from_disk` reads.",
        ),
        "report": LazyVerb(
            "posttrain.cli.data.records",
            "One self-contained page about a version: counts, lengths, balance, duplicates, rejections, drift.",
        ),
        "synthesize": LazyVerb(
            "posttrain.cli.data.synthesize",
            "Have a model write records like the seeds; what repeats them or each other is left out.",
        ),
        "gc": LazyVerb(
            "posttrain.cli.data.versions", "Remove shards that no version holds; with --keep also old versions."
        ),
    }


def add_to(app: typer.Typer) -> None:
    """Register the group."""
    group = typer.Typer(name="data", cls=_Verbs, help="Records and dataset versions.", no_args_is_help=True)
    app.add_typer(group)
