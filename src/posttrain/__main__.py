"""``python -m posttrain`` is the command ``posttrain``."""

from posttrain.cli.main import main

main()
