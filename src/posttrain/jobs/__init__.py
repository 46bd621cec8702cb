"""Runs functions and commands: in this process, in processes of this machine, on Slurm or on Ray.

A `task.Task` is what runs, and a runner starts it, waits for it and kills it. `local` runs tasks in processes of this
machine, `packing` decides how many fit into its memory, and `simulated` runs them by a clock of its own. `memory` and
`gpus` measure what a process takes.
"""
