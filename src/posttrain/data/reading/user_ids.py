"""The ids that users gave their records: one id is one content."""

import hashlib

import pyarrow as pa

_LINE_BITS = 40


class UserIds:
    """Remembers which content had an id first, in about 200 bytes an id."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def clash(self, user_id: str | int, record_id: str, line: int) -> int | None:
        """The line of the record that had the id first, if its content is another; None if all is well."""
        key = int.from_bytes(hashlib.blake2b(str(user_id).encode(), digest_size=12).digest())
        content = int(record_id, 16)
        first = self._seen.setdefault(key, content << _LINE_BITS | line)
        return None if first >> _LINE_BITS == content else first & ((1 << _LINE_BITS) - 1)

    def __len__(self) -> int:
        return len(self._seen)

    def table(self) -> pa.Table:
        """All ids: ``key`` (a hash of the id, 12 bytes), ``content`` (of the record's id, 10 bytes) and ``line``."""
        keys = [key.to_bytes(12) for key in self._seen]
        contents = [(first >> _LINE_BITS).to_bytes(10) for first in self._seen.values()]
        lines = [first & ((1 << _LINE_BITS) - 1) for first in self._seen.values()]
        columns = (pa.array(keys, pa.binary(12)), pa.array(contents, pa.binary(10)), pa.array(lines, pa.int64()))
        return pa.table(columns, names=["key", "content", "line"])
