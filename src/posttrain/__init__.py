"""posttrain keeps one loop turning for a language model.

collect → check → select → label → train → evaluate → decide → deploy
"""

__version__ = "0.1.0"
