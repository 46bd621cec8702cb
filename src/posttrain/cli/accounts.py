"""``posttrain accounts``: lists, adds and closes accounts, and issues invitations, links and tokens."""

import sys
from datetime import timedelta
from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_store
from posttrain.label.accounts import Accounts
from posttrain.label.tokens import API_TOKEN_LIFETIME, INVITATION_LIFETIME, LINK_LIFETIME, check_role
from posttrain.store.errors import UserError

app = typer.Typer(
    name="accounts", help="Add people who may sign in, and issue invitations and tokens.", no_args_is_help=True
)

_ACTOR = "terminal"

Name = Annotated[str, typer.Argument(help="The account's name.")]
Role = Annotated[
    str,
    typer.Option(
        help="owner, reviewer, annotator or viewer; each may do what those after it may, but annotators see no loop."
    ),
]
Note = Annotated[str, typer.Option(help="A remark for the list, such as whom it is for.")]
Url = Annotated[str, typer.Option(help="The address under which people reach `posttrain serve`.")]
LOCAL_URL = "http://127.0.0.1:8600"


@app.command(name="list")
def list_accounts(workspace: WorkspaceOption = CURRENT_FOLDER, json: JsonOption = False) -> None:
    """List accounts, and the API tokens and invitations that are valid."""
    with open_store(workspace) as store:
        accounts = Accounts(store.metadata)
        people, tokens = accounts.all(), accounts.tokens.all()
    if json:
        print_json({"accounts": [vars(account) for account in people], "tokens": [vars(token) for token in tokens]})
        return
    rows: list[list[Any]] = [
        [account.name, account.role, "closed" if account.closed_at else account.paused and "paused", _signs_in(account)]
        for account in people
    ]
    print_table("", ["name", "role", "", "signs in by"], rows)
    if tokens:
        lines = [[token.id, token.kind, token.account, token.role, token.note, token.expires_at] for token in tokens]
        print_table("", ["token", "kind", "account", "role", "note", "until"], lines)


@app.command()
def add(
    name: Name,
    role: Role = "annotator",
    link_only: Annotated[bool, typer.Option("--no-password", help="The account signs in by one-time links.")] = False,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Add an account; the password is read from the terminal, or is the first line of standard input."""
    # Before a password is typed.
    check_role(role)
    with open_store(workspace, write=True) as store:
        account = Accounts(store.metadata).add(name, role, _ACTOR, None if link_only else _read_password())
    print_line(f"{account.name} is {account.role}")


@app.command()
def role(name: Name, role: Role, workspace: WorkspaceOption = CURRENT_FOLDER) -> None:
    """Change what an account may do."""
    with open_store(workspace, write=True) as store:
        account = Accounts(store.metadata).set_role(name, role, _ACTOR)
    print_line(f"{account.name} is {account.role}")


@app.command()
def password(name: Name, workspace: WorkspaceOption = CURRENT_FOLDER) -> None:
    """Set an account's password, and end its sessions; read as `accounts add` does."""
    with open_store(workspace, write=True) as store:
        accounts = Accounts(store.metadata)
        # Before the question, so that a misspelt name is refused at once.
        accounts.get(name)
        accounts.set_password(name, _read_password(), _ACTOR)
    print_line(f"{name} has a new password; its sessions have ended")


@app.command()
def close(name: Name, workspace: WorkspaceOption = CURRENT_FOLDER) -> None:
    """Close an account for good; its answers stay."""
    with open_store(workspace, write=True) as store:
        Accounts(store.metadata).close(name, _ACTOR)
    print_line(f"{name} is closed")


@app.command()
def invite(
    role: Role = "annotator", note: Note = "", url: Url = LOCAL_URL, workspace: WorkspaceOption = CURRENT_FOLDER
) -> None:
    """Print a link with which somebody makes an account of this role, once, in the next seven days."""
    with open_store(workspace, write=True) as store:
        secret = Accounts(store.metadata).tokens.invite(role, note, _ACTOR)
    print_line(f"{url.rstrip('/')}/invitation?token={secret}")
    print_line(f"valid once, for {INVITATION_LIFETIME.days} days")


@app.command()
def link(
    name: Annotated[str | None, typer.Argument(help="The account; by default the one of this machine's user.")] = None,
    url: Url = LOCAL_URL,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Print a link that signs an account in, once, in the next hour."""
    with open_store(workspace, write=True) as store:
        accounts = Accounts(store.metadata)
        secret = accounts.tokens.issue_link(name or accounts.local_owner(_ACTOR).name, _ACTOR)
    print_line(f"{url.rstrip('/')}/sign-in?token={secret}")
    print_line(f"valid once, for {LINK_LIFETIME // timedelta(minutes=1)} minutes")


@app.command()
def token(
    name: Name,
    note: Note = "",
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days until it expires.")] = API_TOKEN_LIFETIME.days,
    role: Annotated[
        str | None, typer.Option(help="Also add the account, with this role and without a password, for a program.")
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """Print a new API token of an account; it cannot be read again."""
    if role is not None:
        check_role(role)
    with open_store(workspace, write=True) as store, store.metadata.transaction():
        accounts = Accounts(store.metadata)
        if role is not None:
            name = accounts.add(name, role, _ACTOR).name
        secret = accounts.tokens.issue_api_token(name, note, _ACTOR, timedelta(days=days))
    print_line(secret)


@app.command()
def revoke(
    id: Annotated[str, typer.Argument(help="Id of a token or an invitation, as `accounts list` prints it.")],
    workspace: WorkspaceOption = CURRENT_FOLDER,
) -> None:
    """End an API token or an invitation."""
    with open_store(workspace, write=True) as store:
        Accounts(store.metadata).tokens.revoke(id, _ACTOR)
    print_line(f"{id} has ended")


def _signs_in(account: Any) -> str:
    if account.closed_at or account.role == "model":
        return ""
    return "password" if account.has_password else "link"


def _read_password() -> str:
    if sys.stdin.isatty():
        password: str = typer.prompt("Password", hide_input=True, confirmation_prompt="Again")
        return password
    line = sys.stdin.readline().rstrip("\r\n")
    if not line:
        raise UserError(
            "there is no password", where="standard input", fix="write it on the first line, or use a terminal"
        )
    return line
