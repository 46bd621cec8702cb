"""Engines that run independent work: in this process, in processes of this machine, on Ray."""
