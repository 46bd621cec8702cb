"""``posttrain serve``: serves the pages and the API, and collects feedback over HTTP."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import error_console, print_line
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_store
from posttrain.loop.config import read_config
from posttrain.store.config import CONFIG_FILE
from posttrain.store.errors import UserError

TOKEN_VARIABLE = "POSTTRAIN_TOKEN"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

HostOption = Annotated[str, typer.Option(help="The address to listen on.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")]
AllowedHostOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A name under which clients reach this server, besides its address and localhost; repeatable.",
    ),
]
PlainHttpOption = Annotated[
    bool, typer.Option("--plain-http", help="Let people on other machines sign in without TLS.")
]
TrustedProxyOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS", help="Address of a proxy whose X-Forwarded-For says who sends a request; repeatable."
    ),
]


def serve(
    host: HostOption = "127.0.0.1",
    port: PortOption = 8600,
    allowed_host: AllowedHostOption = None,
    plain_http: PlainHttpOption = False,
    trusted_proxy: TrustedProxyOption = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Serve the pages and the API, and collect feedback at POST /v1/feedback.

    On this machine alone, a link in the terminal signs you in; bound to another address, it needs accounts with
    passwords (posttrain accounts). With POSTTRAIN_TOKEN set, feedback is taken only from clients that send it. A right
    answer outside the closed label set of posttrain.yaml, as it is at the start, is refused.
    """
    run_server(host, port, allowed_host or (), plain_http, trusted_proxy or (), workspace)


def serve_labelling(
    host: HostOption = "127.0.0.1",
    port: PortOption = 8600,
    allowed_host: AllowedHostOption = None,
    plain_http: PlainHttpOption = False,
    trusted_proxy: TrustedProxyOption = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Serve as `posttrain serve` does, with a link to the page for labelling."""
    run_server(host, port, allowed_host or (), plain_http, trusted_proxy or (), workspace, page="/label")


def run_server(
    host: str,
    port: int,
    allowed_host: Sequence[str],
    plain_http: bool,
    trusted_proxy: Sequence[str],
    workspace: Path,
    page: str = "/",
) -> None:
    """Serves until it is asked to end.

    Args:
        page: Path of the page that the one-time link opens.

    Raises:
        UserError: an option is wrong, a package is missing, or nobody could sign in.
    """
    token = _read_token()
    # Without a token, anyone on the network could poison the training data.
    if token is None and host not in _LOOPBACK:
        fix = f"set {TOKEN_VARIABLE}, or listen on 127.0.0.1"
        raise UserError("anyone who reaches this address could post", where=f"--host {host}", fix=fix)
    from posttrain.data.feedback.inbox import Inbox
    from posttrain.label.accounts import Accounts
    from posttrain.label.quality.queue_report import queue_alarms
    from posttrain.label.queue import Queue
    from posttrain.label.webhook import webhook_calls
    from posttrain.web.access import Site
    from posttrain.web.app import labelling_app
    from posttrain.web.feedback import feedback_app
    from posttrain.web.server import host_name
    from posttrain.web.server import serve as run
    from posttrain.web.sign_in import sign_in_url

    hosts = {name: host_name(name) for name in allowed_host}
    if wrong := [name for name, host in hosts.items() if not host]:
        fix = "give the name as in a URL, such as feedback.example.com"
        raise UserError(f"`{wrong[0]}` is not the name of a host", where="--allowed-host", fix=fix)
    if not workspace.is_dir():
        raise UserError("there is no such folder", where=str(workspace), fix="make it first")
    config = read_config(workspace) if (workspace / CONFIG_FILE).is_file() else None
    labels = config.task.with_labels_from(workspace).label_set if config else ()
    # Creates the store if needed. Its lock is left to `posttrain run`, which works at the same time.
    with open_store(workspace, write=True) as store:
        accounts = Accounts(store.metadata)
        by_link = not accounts.has_passwords()
        if by_link and host not in _LOOPBACK:
            fix = f"posttrain accounts add NAME --role owner -w {workspace}"
            raise UserError("nobody has an account to sign in with", where=f"--host {host}", fix=fix)

        def announce(address: str) -> None:
            print_line(f"listening on {address}")
            if by_link:
                secret = accounts.tokens.issue_link(accounts.local_owner("terminal").name, "terminal")
                link = sign_in_url(address, secret, page)
                # Not to standard output, which may go to a file that others read.
                error_console.print(f"sign in: {link}", markup=False, highlight=False, soft_wrap=True)

        webhook = config.label.webhook if config else None
        queue = Queue(store.metadata, config.label.queue if config else None)
        site = Site(store, config, accounts, queue, plain_http)
        alarms = partial(queue_alarms, queue) if config else None
        with Inbox(store.home / "inbox") as inbox, webhook_calls(store.metadata, webhook, alarms):
            app = labelling_app(site, feedback_app(inbox, token=token, labels=labels))
            run(
                app,
                host,
                port,
                announce,
                allowed_hosts=hosts.values(),
                trusted_proxies=trusted_proxy,
                on_end=site.ending.set,
            )


def _read_token() -> str | None:
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        return None
    # A blank one would let everyone in or nobody, and other characters do not pass through a header as they are.
    if not token or not all("!" <= character <= "~" for character in token):
        what = "is blank" if not token.strip() else "holds spaces or characters other than visible ASCII"
        raise UserError(what, where=TOKEN_VARIABLE, fix="set a token of letters and digits, or unset it")
    return token
