"""Read, check, clean, split and version records.

`versions/build_version.py` shows a version from top to bottom:

    files     known by their content, cut into pieces: lines of one file, 1 to 16 MiB
    shards    pieces through the row steps, with a small sketch of every row
    global    steps that decide in view of all sketches, in one process: duplicates, the split, decontamination
    manifest  a split, or none, for every row of the last shards

A `RowStep` turns a table into kept, rejected, changed and measured rows, and tables can be cut anywhere. A
`GlobalStep` makes sketches on workers and then decides; a row that it removes is marked and logged with its reason
(`steps/`).

No id depends on time, path or engine: clusters are named by their smallest row, ties go to reading order, draws are
hashes. So the bytes are the same on every engine and after every kill, and a grown set equals one built at once,
unless new records link old clusters. A record keeps its parent's split; one that is linked to two splits is dropped.

`records/` has the schema and the outcomes of a step, `reading/` files of any format as tables, `sets/` the loop's own
pool, test and training sets, `feedback/` the inbox (lines with checksums, acknowledged after an fsync), `synthesis/`
new records from seeds, `report/` the profile of a version and the drift between two.
"""

from typing import TYPE_CHECKING

from posttrain.store.extensions import lazy_exports

if TYPE_CHECKING:
    from posttrain.data.reading.reader import read
    from posttrain.data.similarity.near_duplicates import near_duplicates
    from posttrain.data.versions.named_build import BuildConfig, build
    from posttrain.data.versions.version import Version

__all__ = ["BuildConfig", "Version", "build", "near_duplicates", "read"]

_HOMES = {
    "BuildConfig": "versions.named_build",
    "Version": "versions.version",
    "build": "versions.named_build",
    "near_duplicates": "similarity.near_duplicates",
    "read": "reading.reader",
}

__getattr__ = lazy_exports(__name__, _HOMES)
