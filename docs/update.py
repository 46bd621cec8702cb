"""Write the generated part of configuration.md anew: python docs/update.py."""

import re
from pathlib import Path

from posttrain.loop.config import Config
from posttrain.loop.config_reference import reference

page = Path(__file__).with_name("configuration.md")
block = f"```yaml\n{reference(Config)}\n```\n"
page.write_text(
    re.sub(r"```yaml\n# Fixes.*?^```\n", lambda _: block, page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE),
    "utf-8",
)
