"""An annotator by file: a CSV goes out, people fill its ``label`` column, the next run takes it in."""

import pyarrow as pa

from posttrain.label.annotator import Annotator, Request, answered
from posttrain.label.batch_file import export_labels, import_labels
from posttrain.store.errors import Waiting
from posttrain.store.files import write_atomically, writing


class FileAnnotator(Annotator):
    """Writes ``labels/round-N.csv`` once, waits until every label is filled in, and never writes over it."""

    name = "file"

    def annotate(self, batch: pa.Table, request: Request) -> pa.Table:
        name = f"labels/round-{request.round}.csv"
        path = request.folder / name
        if not batch.num_rows:
            return batch
        if not path.exists():
            with writing(path):
                path.parent.mkdir(exist_ok=True)
            write_atomically(path, export_labels(batch, request.suggestions).encode())
            raise Waiting(
                f"labels for round {request.round}: fill the label column of {name} "
                f"({batch.num_rows} records), then run again"
            )
        answers = import_labels(path, batch, request.labels, name=name)
        given = [answer for answer in answers if answer is not None]
        if len(given) < len(answers):
            raise Waiting(
                f"labels for round {request.round}: {len(given)} of {len(answers)} are filled in {name}; "
                "fill the rest, then run again"
            )
        return answered(batch, given, self.name, request.round)
