"""The loop in Python: `posttrain.Workspace`, as the verbs of the command line are it in a terminal."""
