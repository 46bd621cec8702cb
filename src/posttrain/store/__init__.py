"""The open workspace: artifacts, metadata, lineage, lock, errors; nothing here knows a model or a record.

`stage_runner.py` runs cached work under its key. A commit is: checksums and manifest, everything fsynced; the
artifact's id noted with the run; one rename; one transaction, to whose end signals wait (`signals.py`). Killed before
the rename, the work runs again; killed after it, the next run finds the noted artifact. `workers.py` lets many
processes work in a workspace: equal work waits for the one that began it, and a run whose process died is found.

`artifacts.py` keeps immutable folders that prove themselves by their ids. Rows have no such proof, so `journal.py`
appends the changed columns of each transaction, synced before the commit, under a number that the database counts.
From it `verify.py` names a changed or deleted row, and `rebuild.py` makes a lost database again. A backup
(`backup.py`) is an artifact with all rows as one snapshot; `restore.py` fills a new workspace from it.

`section.py` is the base of every section of the config, `expression.py` parses rules, `extensions.py` loads parts by
dotted path or entry point, `errors.py` has the three ways in which work ends early (mistake, failure, waiting).
"""
