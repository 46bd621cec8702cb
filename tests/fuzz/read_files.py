"""Feeds bytes to every reader, guided by coverage: ``python tests/fuzz/read_files.py [libFuzzer options] [corpus]``.

The first byte chooses the format, the rest is the file. Reading must end in records or in a UserError of one line;
anything else stops the run and writes the bytes to a file named ``crash-...``.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["posttrain.data"]):
    from posttrain.data.reading.reader import find_problems, read
from posttrain.store.errors import UserError

NAMES = ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.jsonl.zst", "a.csv.gz")
FOLDER = Path(tempfile.mkdtemp(prefix="posttrain-fuzz-"))


def read_one_file(content: bytes) -> None:
    """Read and check one file; an AssertionError or any other exception is a finding."""
    if not content:
        return
    path = FOLDER / NAMES[content[0] % len(NAMES)]
    path.write_bytes(content[1:])
    try:
        for table in read(path, name=path.name):
            table.validate(full=True)
    except UserError as error:
        if not str(error).isprintable():
            raise AssertionError(f"more than one line: {str(error)!r}") from error
    for _ in find_problems(path, labels=["a"], name=path.name):
        pass


def seeds() -> list[bytes]:
    """One small file of each format and shape."""
    turns = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    lines = [
        '{"text": "a"}',
        '{"prompt": "a", "completion": "b", "id": 1, "group": "g", "meta": {"x": 1.5}}',
        f'{{"messages": {turns}}}',
        '{"chosen": "\\n\\nHuman: a\\n\\nAssistant: b", "rejected": "\\n\\nHuman: a\\n\\nAssistant: c"}',
        '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}',
        f'{{"request": {{"messages": {turns}}}, "response": {{"choices": [{{"message": {{"content": "a"}}}}]}}}}',
    ]
    return [
        *(b"\0" + f"{line}\n{line}\n".encode() for line in lines),
        b"\1" + f"[{', '.join(lines)}]".encode(),
        b'\2prompt,completion\n"a ""b""",c\n"d\ne",f\n',
        b"\3text\tid\na\t1\nb\t1\n",
    ]


def main() -> None:
    corpus = FOLDER / "seeds"
    corpus.mkdir()
    for number, seed in enumerate(seeds()):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([*sys.argv, str(corpus)], read_one_file)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
