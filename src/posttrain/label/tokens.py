"""Secrets that stand for an account: sessions, one-time links, API tokens and invitations. Only hashes are stored."""

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import insert, select, update

from posttrain.label.audit import record_change
from posttrain.store.database import utc_now
from posttrain.store.errors import UserError
from posttrain.store.label_tables import accounts, tokens
from posttrain.store.metadata import Metadata

RANKS = {"viewer": 0, "annotator": 1, "reviewer": 2, "owner": 3}
"""Roles that can sign in; each may do everything that those below it may, but that annotators do not read the loop.

`model` is not one of them.
"""

SESSION_IDLE = timedelta(hours=12)
SESSION_LONGEST = timedelta(days=14)
INVITATION_LIFETIME = timedelta(days=7)
LINK_LIFETIME = timedelta(hours=1)
API_TOKEN_LIFETIME = timedelta(days=365)

# A session's end moves with its use, but not with each request: that would be a write for each.
_RENEW_AFTER = timedelta(minutes=5)

_KEPT = timedelta(days=30)

# A name that scanners of published code can look for.
_API_PREFIX = "ptt_"


class NotFound(UserError):
    """There is no such account, token, invitation or item."""


class Conflict(UserError):
    """The change contradicts the present state, such as a name that is taken."""


@dataclass(frozen=True)
class Credential:
    """A valid session or API token: the account that it stands for, and what it may do now.

    Attributes:
        id: Beginning of the secret's hash, which names it in lists and opens nothing.
        role: The account's role; of an API token the lower one of that and the role that it was issued with.
    """

    id: str
    kind: str
    name: str
    role: str


@dataclass(frozen=True)
class TokenRow:
    """A token without its secret."""

    id: str
    kind: str
    account: str | None
    role: str
    note: str | None
    created_at: datetime
    expires_at: datetime | None


class Tokens:
    """Issues, checks and ends a workspace's secrets."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata

    def open_session(self, name: str) -> str:
        """Returns the secret of a new session.

        Raises:
            NotFound: there is no such account.
            Conflict: it is closed, or a model.
        """
        with self.metadata.transaction() as connection:
            # Here, as nothing else happens as rarely and as surely.
            old = utc_now() - _KEPT
            connection.execute(tokens.delete().where((tokens.c.ended_at < old) | (tokens.c.expires_at < old)))
            secret = self._issue("session", name, SESSION_IDLE)
            record_change(self.metadata, name, "sign in", name)
        return secret

    def issue_link(self, name: str, actor: str, lifetime: timedelta = LINK_LIFETIME) -> str:
        """Returns the secret of a link that signs an account in, once; raises what `open_session` does."""
        with self.metadata.transaction():
            secret = self._issue("link", name, lifetime)
            record_change(self.metadata, actor, "issue link", name, after={"id": token_id(secret)})
        return secret

    def issue_api_token(self, name: str, note: str, actor: str, lifetime: timedelta = API_TOKEN_LIFETIME) -> str:
        """Returns a new API token, which cannot be read again; raises what `open_session` does."""
        with self.metadata.transaction():
            secret = self._issue("api", name, lifetime, note)
            record_change(self.metadata, actor, "issue token", name, after={"id": token_id(secret), "note": note})
        return secret

    def invite(self, role: str, note: str, actor: str, lifetime: timedelta = INVITATION_LIFETIME) -> str:
        """Returns the secret of an invitation, with which somebody makes an account of this role, once."""
        check_role(role)
        with self.metadata.transaction():
            secret = self._insert("invitation", None, role, lifetime, note)
            after = {"id": token_id(secret), "role": role, "note": note}
            record_change(self.metadata, actor, "invite", token_id(secret), after=after)
        return secret

    def find(self, secret: str, kind: str) -> TokenRow | None:
        """Returns a link or an invitation that can still be used, and leaves it usable."""
        query = select(tokens).where(tokens.c.hash == _digest(secret), tokens.c.kind == kind, _is_valid(utc_now()))
        with self.metadata.reading() as connection:
            row = connection.execute(query).mappings().first()
        return _token_row(row) if row is not None else None

    def use(self, secret: str, kind: str) -> TokenRow:
        """Returns a link or an invitation, and ends it.

        Raises:
            NotFound: it was used, has expired, or never was.
        """
        # Ended and read in one statement: of two that use it at once, one gets the row.
        statement = (
            update(tokens)
            .where(tokens.c.hash == _digest(secret), tokens.c.kind == kind, _is_valid(utc_now()))
            .values(ended_at=utc_now())
            .returning(*tokens.columns)
        )
        with self.metadata.transaction() as connection:
            row = connection.execute(statement).mappings().first()
        if row is None:
            raise NotFound(f"this {kind} was used already, has expired or never was", fix="ask for a new one")
        return _token_row(row)

    def authenticate(self, secret: str, kind: str) -> Credential | None:
        """Returns what a session or an API token may do; None if it is not valid.

        Args:
            kind: ``session`` or ``api``.
        """
        now = utc_now()
        query = (
            select(tokens, accounts.c.role.label("account_role"))
            .select_from(tokens.join(accounts, tokens.c.account == accounts.c.name))
            .where(tokens.c.hash == _digest(secret), tokens.c.kind == kind)
            .where(_is_valid(now), accounts.c.closed_at.is_(None))
        )
        with self.metadata.reading() as connection:
            row = connection.execute(query).mappings().first()
        if row is None:
            return None
        if kind == "session":
            role = row["account_role"]
            self._renew(row, now)
        elif (row["role"], row["account_role"]) == ("viewer", "annotator"):
            return None  # the only higher role that may do less: viewers read the loop
        else:
            # Neither did the token's holder agree to more, nor may it do what its account no longer may.
            role = min(row["role"], row["account_role"], key=lambda role: RANKS.get(role, -1))
        return None if role not in RANKS else Credential(row["hash"][:16], kind, row["account"], role)

    def end(self, secret: str) -> None:
        """Ends a session, link or token; nothing happens if there is none."""
        with self.metadata.transaction():
            self.end_where(tokens.c.hash == _digest(secret))

    def end_where(self, condition: Any) -> int:
        """Ends the secrets that meet a condition on the table; returns how many."""
        with self.metadata.transaction() as connection:
            ended = update(tokens).where(condition, tokens.c.ended_at.is_(None)).values(ended_at=utc_now())
            return connection.execute(ended).rowcount

    def revoke(self, id: str, actor: str, owner: str | None = None) -> None:
        """Ends an API token or an invitation by its id.

        Args:
            owner: Only one of this account; None: of any.

        Raises:
            NotFound: there is none that is valid.
        """
        condition = tokens.c.hash.startswith(id, autoescape=True) & tokens.c.kind.in_(("api", "invitation"))
        if owner is not None:
            condition &= tokens.c.account == owner
        with self.metadata.transaction():
            if not re.fullmatch("[0-9a-f]{16}", id) or not self.end_where(condition):
                raise NotFound(f"there is no token `{id[:40]}`")
            record_change(self.metadata, actor, "revoke token", id)

    def all(self, owner: str | None = None) -> list[TokenRow]:
        """Returns the valid API tokens and invitations, newest first; with ``owner`` those of one account only."""
        query = select(tokens).where(tokens.c.kind.in_(("api", "invitation")), _is_valid(utc_now()))
        if owner is not None:
            query = query.where(tokens.c.account == owner)
        with self.metadata.reading() as connection:
            rows = connection.execute(query.order_by(tokens.c.created_at.desc())).mappings().all()
        return [_token_row(row) for row in rows]

    def _issue(self, kind: str, name: str, lifetime: timedelta, note: str | None = None) -> str:
        row = account_row(self.metadata, name)
        if row["role"] not in RANKS:
            raise Conflict(f"`{name}` is a model, which cannot sign in")
        if row["closed_at"] is not None:
            raise Conflict(f"the account `{name}` is closed")
        return self._insert(kind, name, row["role"], lifetime, note)

    def _insert(self, kind: str, name: str | None, role: str, lifetime: timedelta, note: str | None) -> str:
        # 256 random bits: a plain hash is enough, as nobody can guess them.
        secret = (_API_PREFIX if kind == "api" else "") + secrets.token_urlsafe(32)
        now = utc_now()
        row = {"hash": _digest(secret), "kind": kind, "account": name, "role": role, "note": note}
        with self.metadata.transaction() as connection:
            connection.execute(insert(tokens).values(**row, created_at=now, expires_at=now + lifetime))
        return secret

    def _renew(self, row: Mapping[Any, Any], now: datetime) -> None:
        end = min(now + SESSION_IDLE, row["created_at"] + SESSION_LONGEST)
        if end - row["expires_at"] > _RENEW_AFTER:
            with self.metadata.transaction() as connection:
                connection.execute(update(tokens).where(tokens.c.hash == row["hash"]).values(expires_at=end))


def account_row(metadata: Metadata, name: str) -> dict[str, Any]:
    """Returns the columns of an account.

    Raises:
        NotFound: there is none of this name.
    """
    with metadata.reading() as connection:
        row = connection.execute(select(accounts).where(accounts.c.name == name)).mappings().first()
    if row is None:
        raise NotFound(f"there is no account `{name[:80]}`")
    return {str(column): value for column, value in row.items()}


def check_role(role: str) -> None:
    """Checks that a role can sign in.

    Raises:
        UserError: it cannot.
    """
    if role not in RANKS:
        raise UserError(f"`{role[:40]}` is not a role", fix=f"one of {', '.join(RANKS)}")


def token_id(secret: str) -> str:
    """Returns the id by which lists and the audit log name a secret."""
    return _digest(secret)[:16]


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _is_valid(now: datetime) -> Any:
    return tokens.c.ended_at.is_(None) & ((tokens.c.expires_at > now) | tokens.c.expires_at.is_(None))


def _token_row(row: Mapping[Any, Any]) -> TokenRow:
    columns = ("kind", "account", "role", "note", "created_at", "expires_at")
    return TokenRow(id=row["hash"][:16], **{name: row[name] for name in columns})
