"""Damage to files of a workspace: every kind of file, and every kind of damage."""

import os
import random
from collections.abc import Callable
from pathlib import Path

from posttrain.store.files import remove_tree

Names = tuple[str, ...]
"""Texts of which each finding must hold one."""


def flip(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, draw: random.Random) -> None:
    os.truncate(file, draw.randrange(1, file.stat().st_size))


def append(file: Path, draw: random.Random) -> None:
    with file.open("ab") as stream:
        stream.write(draw.randbytes(draw.randrange(1, 100)))


def append_line(file: Path, draw: random.Random) -> None:
    with file.open("ab") as stream:
        stream.write(draw.randbytes(8).hex().encode() + b"\n")


def empty(file: Path, draw: random.Random) -> None:
    os.truncate(file, 0)


def delete(file: Path, draw: random.Random) -> None:
    file.unlink()


def rename(file: Path, draw: random.Random) -> None:
    file.rename(file.with_name(f"{draw.randbytes(16).hex()}{file.suffix}"))


def overwrite_page(file: Path, draw: random.Random) -> None:
    """Overwrites the header or the root of a table, as a disk that returns another block."""
    with file.open("r+b") as stream:
        stream.seek(4096 * draw.randrange(2))
        stream.write(draw.randbytes(4096))


def halve(file: Path, draw: random.Random) -> None:
    os.truncate(file, file.stat().st_size // 2)


def remove_line(file: Path, draw: random.Random) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    del lines[draw.randrange(len(lines))]
    file.write_bytes(b"".join(lines))


def swap_lines(file: Path, draw: random.Random) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    first, second = draw.sample(range(len(lines)), 2)
    lines[first], lines[second] = lines[second], lines[first]
    file.write_bytes(b"".join(lines))


def damage_file(file: Path, damage: Callable[[Path, random.Random], None], draw: random.Random) -> None:
    file.chmod(0o644)
    damage(file, draw)


def artifact_files(root: Path) -> list[Path]:
    """Every file of every artifact that is not empty."""
    return [path for path in sorted(root.glob(".posttrain/artifacts/*/**/*")) if path.is_file() and path.stat().st_size]


def artifact_of(file: Path) -> str:
    return next(parent.name for parent in file.parents if parent.parent.name == "artifacts")


def on_artifact(damage: Callable[[Path, random.Random], None]) -> Callable[[Path, random.Random], Names]:
    def act(root: Path, draw: random.Random) -> Names:
        file = draw.choice(artifact_files(root))
        damage_file(file, damage, draw)
        return (artifact_of(file),)

    return act


def extra_file(root: Path, draw: random.Random) -> Names:
    folder = draw.choice(artifact_files(root)).parent
    (folder / f"extra-{draw.randrange(100)}.bin").write_bytes(draw.randbytes(draw.randrange(10)))
    return (artifact_of(folder / "any"),)


def swap_files(root: Path, draw: random.Random) -> Names:
    files = artifact_files(root)
    while True:
        first, second = draw.sample(files, 2)
        one, other = first.read_bytes(), second.read_bytes()
        if one != other:
            break
    for file, content in ((first, other), (second, one)):
        file.chmod(0o644)
        file.write_bytes(content)
    return artifact_of(first), artifact_of(second)


def remove_artifact(root: Path, draw: random.Random) -> Names:
    id = artifact_of(draw.choice(artifact_files(root)))
    remove_tree(root / ".posttrain" / "artifacts" / id)
    # What leads there leads nowhere now.
    return id, "/champion"


def on_file(
    pattern: str, damage: Callable[[Path, random.Random], None], *names: str
) -> Callable[[Path, random.Random], Names]:
    """Damages a file of the store that matches the pattern."""

    def act(root: Path, draw: random.Random) -> Names:
        file = draw.choice(sorted(path for path in (root / ".posttrain").glob(pattern) if path.stat().st_size))
        damage_file(file, damage, draw)
        return names or (file.name,)

    return act
