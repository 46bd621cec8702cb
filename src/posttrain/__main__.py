"""The command ``posttrain``, also as ``python -m posttrain``."""

import gc
import signal


def main() -> None:
    """Runs the command line; see `posttrain.cli.main.main`."""
    # While the command line is imported, Python would answer Ctrl-C with a traceback. Nothing has begun yet.
    python_handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if python_handles:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from posttrain.cli.main import main

    if python_handles:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    finally:
        # Otherwise Python searches all that the libraries have left in memory for garbage before it exits: seconds.
        gc.freeze()


if __name__ == "__main__":
    main()
