"""A Slurm cluster of one node, on this machine, as a person without rights can start it."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/node.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm_cluster() -> Iterator[Path]:
    """Starts the daemons and yields their config, which ``SLURM_CONF`` is to name; ends them after."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # the path of a socket must be short
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir()
    (folder / "munge").chmod(0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    config = folder / "slurm.conf"
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    ports = _free_ports(2)
    host = socket.gethostname().split(".")[0]
    config.write_text(_CONFIG.format(folder=folder, user=user, host=host, controller_port=ports[0], node_port=ports[1]))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    munge = [f"--{name}={folder}/munge/{file}" for name, file in _MUNGE_FILES.items()]
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    environment = os.environ | {"SLURM_CONF": str(config), "PATH": path}
    pids = [folder / "node.pid", folder / "controller.pid", folder / "munge" / "pid"]
    try:
        for command in (["munged", *munge, "--force"], ["slurmctld", "-f", str(config)], ["slurmd", "-f", str(config)]):
            program = shutil.which(command[0], path=path)
            assert program, f"{command[0]} is not installed: Debian's slurm-wlm has it"
            subprocess.run([program, *command[1:]], check=True, env=environment, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while (
            "idle"
            not in subprocess.run(
                ["sinfo", "--noheader"], check=False, capture_output=True, text=True, env=environment
            ).stdout
        ):
            assert time.monotonic() < until, (folder / "node.log").read_text()
            time.sleep(0.1)
        yield config
    finally:
        for file in pids:
            if file.exists():
                os.kill(int(file.read_text()), signal.SIGTERM)
        until = time.monotonic() + 20
        while any(file.exists() for file in pids) and time.monotonic() < until:
            time.sleep(0.05)
        shutil.rmtree(folder, ignore_errors=True)


_MUNGE_FILES = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
