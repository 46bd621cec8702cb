"""``posttrain data``: builds, inspects and exports dataset versions."""

from typing import ClassVar

import typer

from posttrain.cli.verbs import LazyGroup, LazyVerb


class _Verbs(LazyGroup):
    elsewhere: ClassVar = {"build": "posttrain data add FILES --name NAME"}
    verbs: ClassVar = {
        "check": LazyVerb(
            "posttrain.cli.data.add:check",
            "List the problems of the files, with file and line; exit with 2 if `data add` would refuse one.",
        ),
        "add": LazyVerb(
            "posttrain.cli.data.add:add",
            "Add files to the loop's pool; with --name, clean them by `data.steps` and store a dataset version.",
        ),
        "list": LazyVerb(
            "posttrain.cli.data.versions:list_versions",
            "List all dataset versions; of those up to 100,000 records what they added to their parent, by kind.",
        ),
        "log": LazyVerb(
            "posttrain.cli.data.versions:log",
            "Show a dataset's versions, newest first: records added and removed, by which steps, and why.",
        ),
        "tag": LazyVerb("posttrain.cli.data.versions:tag", "Make NAME@WORD refer to a version."),
        "show": LazyVerb(
            "posttrain.cli.data.records:show",
            "Show a version's funnel and records, the records that were rejected, or labels that are likely wrong.",
        ),
        "why": LazyVerb(
            "posttrain.cli.data.records:why",
            "Show a record's history: where it was read, what steps changed, why it was kept or rejected.",
        ),
        "diff": LazyVerb(
            "posttrain.cli.data.versions:diff", "Show the records added and removed between two versions, and why."
        ),
        "export": LazyVerb(
            "posttrain.cli.data.records:export",
            "Write a version's records to a new file, or to a folder that `datasets.load_from_disk` reads.",
        ),
        "report": LazyVerb(
            "posttrain.cli.data.records:report",
            "Write one self-contained page about a version: counts, lengths, balance, duplicates, drift.",
        ),
        "synthesize": LazyVerb(
            "posttrain.cli.data.synthesize:synthesize",
            "Have a model write records like the seeds; drop near copies of seeds and of each other.",
        ),
        "gc": LazyVerb(
            "posttrain.cli.data.versions:gc", "Remove shards that no version uses; with --keep also old versions."
        ),
    }


app = typer.Typer(
    name="data",
    cls=_Verbs,
    help="Check files, build versions of datasets from them (add --name), inspect and export these.",
    no_args_is_help=True,
)
