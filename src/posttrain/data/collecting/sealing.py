"""Asking for an inbox's open segment to be sealed, also of another process that writes to it."""

import time
from pathlib import Path

from posttrain.data.collecting.inbox import LOOK_SECONDS, Inbox
from posttrain.store.errors import UserError
from posttrain.store.files import write_atomically


def seal(folder: Path, *, patience: float = 10.0) -> None:
    """Have all that is acknowledged by now in sealed segments, whether a server has the inbox open or none.

    Args:
        patience: seconds to wait for the process that has it open.

    Raises:
        UserError: that process does not answer, or the disk refused.
    """
    open_ones = [path for path in (folder / "segments").glob("[0-9]*.open") if path.stat().st_size]
    if not open_ones:
        return
    wish = folder / "seal"
    write_atomically(wish, b"")
    end = time.monotonic() + patience
    while wish.exists():
        try:
            with Inbox(folder):
                pass  # closing it grants the wish
        except UserError:
            if time.monotonic() > end:
                raise
            time.sleep(LOOK_SECONDS / 2)
    if left := [path for path in open_ones if path.exists()]:
        raise UserError("cannot be sealed", where=str(left[0]), fix="free some space and run the same command again")
