"""The command line: one file a verb. `verbs.py` lists them, `main.py` turns errors into lines and exit codes."""
