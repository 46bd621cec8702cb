"""``posttrain select adversarial``: finds prompts a few tokens from correctly answered ones that fool the champion."""

import json as to_json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_workspace
from posttrain.store.errors import UserError
from posttrain.store.files import check_new_file, write_atomically
from posttrain.store.message import Message


def adversarial(
    n: Annotated[int, typer.Option("--n", min=1, help="Maximum number of examples to keep.")] = 20,
    method: Annotated[str, typer.Option(help="gcg or fgsm.")] = "gcg",
    suite: Annotated[
        str | None, typer.Option(help="Start from this suite's records, which must not be trained on.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(help="Start from this file's labelled records; the loop's own by default.")
    ] = None,
    similarity: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Minimum cosine similarity of the sentence embeddings of the old and the new text."
        ),
    ] = 0.8,
    swaps: Annotated[int, typer.Option(min=1, help="Maximum number of tokens that differ.")] = 3,
    budget: Annotated[int, typer.Option(min=1, help="Maximum number of prompts that the champion reads.")] = 10_000,
    seed: Annotated[int | None, typer.Option(min=0, help="`seed` of the config by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="A new .jsonl file for the examples.")] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Find small changes of prompts that change the champion's answer, where that was correct."""
    from posttrain.inspect.adversarial_search import search_adversarial
    from posttrain.select.adversarial.examples import SearchSettings, to_json_row

    if suite is not None and records is not None:
        raise UserError("records come from one source", where="--records", fix="leave out --suite or --records")
    # Before the search, which takes minutes and would have nowhere to write.
    if out is not None:
        check_new_file(out, (".jsonl",))
    with open_workspace(workspace, write=True) as (store, config):
        settings = SearchSettings(n, method, similarity, swaps, budget, config.seed if seed is None else seed)
        result = search_adversarial(store, config, settings, suite=suite, file=records)
    outcome = result.outcome
    if out is not None and outcome.examples:
        rows = [to_json_row(example, method, result.columns) for example in outcome.examples]
        write_atomically(out, "".join(to_json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    closing = _closing(outcome.counts["kept"], outcome.passes, result.measured, suite, out)
    if json:
        report = {"champion": result.champion, "left_out": result.measured, "passes": outcome.passes, "advice": closing}
        print_json({**report, "counts": outcome.counts, "examples": [asdict(example) for example in outcome.examples]})
        return
    for example in outcome.examples:
        change = f"{example.answer_before} -> {example.answer}"
        losses = f"loss {example.loss_before:.3f} -> {example.loss:.3f}"
        numbers = f"similarity {example.similarity:.2f}, {losses}, record {example.original}"
        lines = [change, f"  before  {example.text_before}", f"  now     {example.text}", f"  {numbers}"]
        print_line("\n".join(lines))
    print_table("", ["what", "records"], [[name.replace("_", " "), count] for name, count in outcome.counts.items()])
    print_line(closing)


def _closing(count: int, passes: int, measured: int, suite: str | None, out: Path | None) -> str:
    line = f"{count} kept, {passes:,} prompts read."
    if measured:
        line += Message(" {count} records were left out: models are measured on them.", count=measured)
    if not count:
        line += "" if out is None else f" {out} was not written."
        return line + " Try a lower --similarity, more --swaps, another --method or a larger --budget."
    # Training on a changed test record gives away its answer, and the gate would judge by what the model has seen.
    if suite is not None:
        return line + " They are made of records that models are measured on: look at them, and train on none."
    # A few changed words may change the right answer too: the old answer is a claim until a person has read it.
    file = out or "FILE (name it with --out)"
    return (
        f"{line} A person should say whether the old answers still hold. To have them labelled: posttrain data add "
        f"{file}; to learn from them with the old answers: posttrain data add {file} --to labelled."
    )
