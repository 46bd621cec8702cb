"""``posttrain select hard``: lists the records that the champion finds hardest, and exports hard negatives."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.output import JsonOption, one_line, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.store.errors import UserError
from posttrain.store.files import check_new_file
from posttrain.store.message import counted

if TYPE_CHECKING:
    from posttrain.inspect.hard_records import HardPairs, HardRecords

_FORMATS = (".jsonl", ".csv", ".tsv", ".parquet")


def hard(
    percentile: Annotated[
        float | None, typer.Option(min=0, max=100, help="Percentile of losses and entropies; 90 by default.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Maximum number of rows shown per list; --json has all.")] = 20,
    pairs: Annotated[
        Path | None,
        typer.Option(help="New file of preference pairs, written in place of the lists."),
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """List training, pool and test records whose loss or entropy is above a percentile, the hardest first.

    With --pairs, write pairs for `posttrain train --objective dpo`. The chosen answer is a training record's label. The
    rejected answer is a label that the champion confuses with it: that of the nearest training record with such a
    label. Pairs near test errors come first. Test records are not among the pairs.
    """
    from posttrain.data.versions.export import export_file
    from posttrain.inspect.hard_records import hard_pairs, hard_records
    from posttrain.select.hard_cases import HIGH_LOSS_PERCENTILE

    if pairs is not None:
        if percentile is not None:
            raise UserError("pairs have no percentile", where="--percentile", fix="leave it out")
        check_new_file(pairs, _FORMATS)
        with open_workspace(workspace, write=True) as (store, config):
            mined = hard_pairs(store, config)
        export_file(mined.pairs, pairs)
        _show_pairs(mined, pairs, n, json)
        return
    with open_workspace(workspace, write=True) as (store, config):
        level = HIGH_LOSS_PERCENTILE if percentile is None else percentile
        records = hard_records(store, config, level)
    if json:
        lists = {"training": records.training, "pool": records.pool, "test": records.test}
        print_json({"champion": records.champion, "percentile": level, "counts": records.counts, **lists})
        return
    _show_records(records, level, n)


def _show_records(records: "HardRecords", level: float, n: int) -> None:
    lists: tuple[tuple[str, str, list[str], list[dict[str, Any]]], ...] = (
        ("training", "loss", ["completion", "input"], records.training),
        ("pool", "entropy", ["predicted", "input"], records.pool),
        ("test", "loss", ["expected", "predicted"], records.test),
    )
    for name, measure, columns, rows in lists:
        count = records.counts[name]
        title = f"{name}: {len(rows)} of {count} records have a higher {measure} than percentile {level:g}"
        if not rows:
            print_line(title)
            continue
        cells = [[row["id"], f"{row[measure]:.3f}", *(one_line(row.get(key) or "") for key in columns)] for row in rows]
        print_table(title, ["record", measure, *columns], cells[:n])


def _show_pairs(mined: "HardPairs", file: Path, n: int, json: bool) -> None:
    confused = [{"labels": list(pair), "errors": count} for pair, count in mined.confusions.items()]
    if json:
        print_json({"pairs": mined.pairs.num_rows, "file": str(file), "confused": confused})
        return
    if confused:
        rows = [[" / ".join(pair), count] for pair, count in list(mined.confusions.items())[:n]]
        print_table("", ["labels that the champion confuses", "test errors"], rows)
    which = "of labels that it confuses" if mined.is_confused else "of any two labels, as it confuses none of theirs"
    print_line(
        f"wrote {counted(mined.pairs.num_rows, 'pair')} to {file}, {which}; "
        f"posttrain train --objective dpo --data {file}"
    )
