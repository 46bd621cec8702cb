"""Log lines: in a workspace's file without secrets, and other libraries quiet."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from posttrain.store.message import fit_log_number
from posttrain.store.secrets import mask_text

EVENT = {"event": True}
"""``extra`` of the log lines that say what the loop does by itself; a watcher prints these and warnings alone."""


def quiet_libraries() -> None:
    """Silences other libraries unless something is wrong, and their telemetry; the environment's settings stay."""
    # In the environment and now, since these libraries read it once when they are imported.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Otherwise tokenizers print a warning when a process forks after using them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        # A progress bar in a log file is thousands of lines.
        os.environ.setdefault("TQDM_DISABLE", "1")
    # Of transformers' own modules, at each evaluation.
    warnings.filterwarnings("ignore", "`?past_key_values`? is deprecated", FutureWarning)
    # torchao logs at import which GPU kernels do not load on a CPU, and torch logs deprecations in torchao.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Writes the program's log lines to a file, too, for the dashboard; the file of before a megabyte ago is kept."""
    handler = _QuietFileHandler(path, maxBytes=2**20, backupCount=1, encoding="utf-8", errors="replace", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    handler.addFilter(mask_secrets)
    logger = logging.getLogger("posttrain")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


class _QuietFileHandler(RotatingFileHandler):
    """A log file whose disk may be full: the work continues, and its output is not disturbed."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def mask_secrets(record: logging.LogRecord) -> bool:
    """Filters no line out; masks passwords and tokens in each, and puts nouns after a count of 1 in the singular."""
    if isinstance(record.msg, str) and isinstance(record.args, tuple):
        record.msg = fit_log_number(record.msg, record.args)
    record.msg, record.args = mask_text(record.getMessage()), None
    return True
