"""Where work runs: in this process, in processes of this machine, on Ray."""
