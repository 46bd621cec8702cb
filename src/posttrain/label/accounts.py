"""Accounts of people and models, and their passwords, for the server and the command line."""

import getpass
import re
import secrets
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import func, select

from posttrain.label.audit import record_change
from posttrain.label.tokens import RANKS, Conflict, Tokens, account_row, check_role
from posttrain.store.database import lock_table, utc_now
from posttrain.store.errors import UserError
from posttrain.store.label_tables import accounts, label_answers, tokens
from posttrain.store.metadata import Metadata

_NAME = re.compile(r"[^\W_][\w.@+-]{0,79}")
_SHORTEST_PASSWORD, _LONGEST_PASSWORD = 10, 1000
_ALIKE = {"LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE"}
"""Alphabets with letters that look the same."""


@dataclass(frozen=True)
class Account:
    """A person or a model that answers.

    Attributes:
        role: One of `posttrain.store.rows.ROLES`.
        has_password: False for an account that signs in by a one-time link.
        paused: Why it is given no items, in a sentence to its person; None: it is given items.
    """

    name: str
    role: str
    has_password: bool
    created_at: datetime
    paused: str | None
    closed_at: datetime | None


@cache
def password_hasher() -> Any:
    """Returns argon2's hasher with the library's recommended parameters."""
    from argon2 import PasswordHasher

    return PasswordHasher()


class Accounts:
    """Reads and changes a workspace's accounts; every change is a transaction with its entry of the audit log.

    ``actor`` is the account that makes a change, or ``terminal``.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.tokens = Tokens(metadata)

    def all(self) -> list[Account]:
        """Returns all accounts by name, closed ones too."""
        with self.metadata.reading() as connection:
            return [_account(row) for row in connection.execute(select(accounts).order_by(accounts.c.name)).mappings()]

    def work(self) -> dict[str, tuple[int, datetime]]:
        """Returns by name the number of answers that count, and the time of the last one."""
        counts = label_answers.c.undone_at.is_(None) & (label_answers.c.status == "answered")
        columns = label_answers.c.annotator, func.count(), func.max(label_answers.c.created_at)
        with self.metadata.reading() as connection:
            rows = connection.execute(select(*columns).where(counts).group_by(label_answers.c.annotator)).all()
        return {name: (count, last) for name, count, last in rows}

    def get(self, name: str) -> Account:
        """Returns the account.

        Raises:
            NotFound: there is none.
        """
        return _account(account_row(self.metadata, name))

    def has_passwords(self) -> bool:
        """Returns whether somebody can sign in with a password."""
        query = select(accounts.c.name).where(accounts.c.password_hash.is_not(None), accounts.c.closed_at.is_(None))
        with self.metadata.reading() as connection:
            return connection.execute(query.limit(1)).first() is not None

    def add(self, name: str, role: str, actor: str, password: str | None = None) -> Account:
        """Adds an account.

        Raises:
            Conflict: the name is taken, perhaps in other letter case.
            UserError: the name, the role or the password does not fit.
        """
        name = check_name(name)
        if role != "model":
            check_role(role)
        return self._add(name, role, actor, _hash(password, name) if password is not None else None)

    def local_owner(self, actor: str) -> Account:
        """Returns the owner's account for the person at this machine; adds one of the user's name if there is none."""
        owners = [account for account in self.all() if account.role == "owner" and account.closed_at is None]
        try:
            name = check_name(getpass.getuser())
        except (OSError, KeyError, UserError):  # a container may run a user without a name
            name = "owner"
        if owners:
            return next((account for account in owners if account.name == name), owners[0])
        return self.add(name, "owner", actor)

    def accept(self, secret: str, name: str, password: str) -> Account:
        """Makes the account of an invitation, which ends with it.

        Raises:
            NotFound: the invitation was used, has expired, or never was.
            UserError: the name or the password does not fit; the invitation can be used again.
        """
        name = check_name(name)
        # Before the transaction: other writers would wait for the slow hash.
        hashed = _hash(password, name)
        with self.metadata.transaction():
            return self._add(name, self.tokens.use(secret, "invitation").role, name, hashed)

    def set_role(self, name: str, role: str, actor: str) -> Account:
        """Changes what an account may do; its sessions have the new role at once.

        Raises:
            NotFound: there is no such account.
            Conflict: it is the last owner, or a model.
        """
        check_role(role)
        with self.metadata.transaction() as connection:
            lock_table(connection, accounts)
            row = self._person(name)
            if role != "owner":
                self._require_other_owner(row)
            self._update(name, {"role": role})
            record_change(self.metadata, actor, "set role", name, {"role": row["role"]}, {"role": role})
        return self.get(name)

    def set_password(self, name: str, password: str, actor: str) -> None:
        """Sets a password, and ends the account's sessions and links, as a thief's may be among them.

        Raises:
            NotFound: there is no such account.
            Conflict: it is a model.
            UserError: the password does not fit.
        """
        hashed = _hash(password, name)
        with self.metadata.transaction():
            self._person(name)
            self._update(name, {"password_hash": hashed})
            self.tokens.end_where((tokens.c.account == name) & tokens.c.kind.in_(("session", "link")))
            record_change(self.metadata, actor, "set password", name)

    def close(self, name: str, actor: str) -> Account:
        """Closes an account for good: it cannot sign in; its answers stay.

        Raises:
            NotFound: there is no such account.
            Conflict: it is the last owner.
        """
        with self.metadata.transaction() as connection:
            lock_table(connection, accounts)
            row = account_row(self.metadata, name)
            if row["closed_at"] is None:
                self._require_other_owner(row)
                self._update(name, {"closed_at": utc_now(), "password_hash": None})
                self.tokens.end_where(tokens.c.account == name)
                record_change(self.metadata, actor, "close account", name)
        return self.get(name)

    def pause(self, name: str, reason: str | None, actor: str) -> Account:
        """Gives an account no more items, for a reason that its person is shown; None: gives it items again.

        Raises:
            NotFound: there is no such account.
        """
        with self.metadata.transaction():
            before = account_row(self.metadata, name)["paused"]
            self._update(name, {"paused": reason})
            action = "resume" if reason is None else "pause"
            record_change(self.metadata, actor, action, name, {"paused": before}, {"paused": reason})
        return self.get(name)

    def check_password(self, name: str, password: str) -> Account | None:
        """Returns the account if the password is right, in a time that does not tell whether the name exists."""
        from argon2.exceptions import Argon2Error, InvalidHashError

        password = _normalize(password[:_LONGEST_PASSWORD])
        query = select(accounts).where(accounts.c.name == normalize_name(name), accounts.c.closed_at.is_(None))
        with self.metadata.reading() as connection:
            row = connection.execute(query).mappings().first()
        stored = row["password_hash"] if row is not None else None
        try:
            # For a name that nobody has, a hash of the same cost is checked, which no password fits.
            password_hasher().verify(stored or _unfitting_hash(), password)
        except (Argon2Error, InvalidHashError):
            return None
        if row is None or stored is None:
            return None
        if password_hasher().check_needs_rehash(stored):
            self._update(row["name"], {"password_hash": password_hasher().hash(password)})
        return _account(row)

    def record_refusal(self, name: str, address: str) -> None:
        """Logs a sign-in that was refused."""
        with self.metadata.transaction() as connection:
            known = connection.scalar(select(accounts.c.name).where(accounts.c.name == normalize_name(name)))
            # A name that nobody has may be a password, typed into the wrong field.
            record_change(self.metadata, known or "(unknown)", "refused sign-in", known or "", after={"from": address})

    def _add(self, name: str, role: str, actor: str, hashed: str | None) -> Account:
        with self.metadata.transaction() as connection:
            lock_table(connection, accounts)
            # Two names that a reader cannot tell apart would let one person pass for another.
            if fold_name(name) in {fold_name(other) for other in connection.scalars(select(accounts.c.name))}:
                raise Conflict(f"the name `{name}` is taken", fix="choose another one")
            row = {"name": name, "role": role, "password_hash": hashed, "created_at": utc_now()}
            self.metadata.insert_row(accounts, row)
            record_change(self.metadata, actor, "add account", name, after={"role": role})
            return self.get(name)

    def _person(self, name: str) -> dict[str, Any]:
        row = account_row(self.metadata, name)
        if row["role"] not in RANKS:
            raise Conflict(f"`{name}` is a model, which cannot sign in")
        if row["closed_at"] is not None:
            raise Conflict(f"the account `{name}` is closed")
        return row

    def _update(self, name: str, values: Mapping[str, Any]) -> None:
        self.metadata.update_rows(accounts, accounts.c.name == name, values)

    def _require_other_owner(self, row: Mapping[str, Any]) -> None:
        if row["role"] != "owner":
            return
        query = select(func.count()).where(accounts.c.role == "owner", accounts.c.closed_at.is_(None))
        with self.metadata.reading() as connection:
            if (connection.scalar(query) or 0) < 2:
                raise Conflict(f"`{row['name']}` is the only owner", fix="make another account an owner first")


def check_name(name: str) -> str:
    """Returns the name as it is stored.

    Raises:
        UserError: an account cannot have this name.
    """
    name = normalize_name(name)
    if not _NAME.fullmatch(name):
        fix = "up to 80 letters, digits and . _ - @ +, a letter or digit first"
        raise UserError(f"`{name[:40]}` cannot be the name of an account", fix=fix)
    scripts = {unicodedata.name(letter, "").split()[0] for letter in name if letter.isalpha()}
    # A Cyrillic a looks like a Latin one: olga and olg\u0430 would pass for one person.
    if len(scripts & _ALIKE) > 1:
        mixed = " and ".join(sorted(script.capitalize() for script in scripts & _ALIKE))
        raise UserError(f"`{name[:40]}` mixes {mixed} letters", fix="write it in one alphabet")
    return name


def _hash(password: str, name: str) -> str:
    if not _SHORTEST_PASSWORD <= len(password) <= _LONGEST_PASSWORD:
        fix = f"{_SHORTEST_PASSWORD} to {_LONGEST_PASSWORD:,} characters; a sentence is easy to remember"
        raise UserError(f"the password has {len(password):,} characters", fix=fix)
    plain, own = fold_name(password), fold_name(name)
    if plain in (own, 2 * own) or len(set(_normalize(password))) < 4:
        raise UserError("the password is easy to guess", fix="choose another one")
    hashed: str = password_hasher().hash(_normalize(password))
    return hashed


@cache
def _unfitting_hash() -> str:
    hashed: str = password_hasher().hash(secrets.token_urlsafe(32))
    return hashed


def normalize_name(name: str) -> str:
    """Returns the spelling under which an account is stored and looked up."""
    return _normalize(name).strip()


def fold_name(name: str) -> str:
    """Returns a key that is the same for all spellings of a name, letter case included."""
    return _normalize(normalize_name(name).casefold())


def _normalize(text: str) -> str:
    # Keyboards compose the same letter in different ways.
    return unicodedata.normalize("NFKC", text)


def _account(row: Mapping[Any, Any]) -> Account:
    columns = ("name", "role", "created_at", "paused", "closed_at")
    return Account(has_password=row["password_hash"] is not None, **{name: row[name] for name in columns})
