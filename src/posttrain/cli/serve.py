"""``posttrain serve``: collects feedback over HTTP."""

import os
from typing import Annotated

import typer

from posttrain.cli.output import print_line
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_store
from posttrain.loop.config import read_config
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError

TOKEN_VARIABLE = "POSTTRAIN_TOKEN"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8600,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name under which clients reach this server, besides its address and localhost; repeatable.",
        ),
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Collect feedback at POST /v1/feedback; with POSTTRAIN_TOKEN set, only from clients that send it.

    A right answer outside the closed label set of posttrain.yaml, as it is at the start, is refused.
    """
    token = _read_token()
    # Without a token, anyone on the network could poison the training data.
    if token is None and host not in _LOOPBACK:
        fix = f"set {TOKEN_VARIABLE}, or listen on 127.0.0.1"
        raise UserError("anyone who reaches this address could post", where=f"--host {host}", fix=fix)
    try:
        # Imported now, so that a missing extra is reported before the inbox is created.
        import uvicorn  # noqa: F401

        from posttrain.web.feedback import feedback_app
        from posttrain.web.server import host_name
        from posttrain.web.server import serve as run
    except ImportError as error:
        what = f"a package of the server is not installed ({error.name})"
        raise UserError(what, fix="pip install 'posttrain[serve]'") from None
    from posttrain.data.feedback.inbox import Inbox

    hosts = {name: host_name(name) for name in allowed_host or ()}
    if wrong := [name for name, host in hosts.items() if not host]:
        fix = "give the name as in a URL, such as feedback.example.com"
        raise UserError(f"`{wrong[0]}` is no name of a host", where="--allowed-host", fix=fix)
    if not workspace.is_dir():
        raise UserError("there is no such folder", where=str(workspace), fix="make it first")
    configured = (workspace / CONFIG_FILE).is_file()
    labels = read_config(workspace).task.with_labels_from(workspace).label_set if configured else ()
    # Creates the store if needed; the inbox itself needs no open database.
    with open_store(workspace, write=True) as store:
        home = store.home
    with Inbox(home / "inbox") as inbox:
        run(feedback_app(inbox, token=token, labels=labels), host, port, _announce, allowed_hosts=hosts.values())


def _read_token() -> str | None:
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        return None
    # A blank one would let everyone in or nobody, and other characters do not pass through a header as they are.
    if not token or not all("!" <= character <= "~" for character in token):
        what = "is blank" if not token.strip() else "holds spaces or characters other than visible ASCII"
        raise UserError(what, where=TOKEN_VARIABLE, fix="set a token of letters and digits, or unset it")
    return token


def _announce(address: str) -> None:
    print_line(f"listening on {address}")
