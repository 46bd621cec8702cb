"""The errors that every part of the program shares, and what they mean for the exit code."""


class UserError(Exception):
    """A mistake in the call, the config or the input: one clear line, exit code 2.

    Args:
        what: what is wrong, in a few words.
        where: a file with its line (``pool.csv:12``) or a config key (``train.epochs``).
        fix: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        line = f"{where}: {what}" if where else what
        super().__init__(f"{line}; {fix}" if fix else line)


class Refused(UserError):
    """A disk, a database or a server that said no: the call may be right, so what was done is kept to go on from."""


class WorkError(Exception):
    """The call was right and the work failed: one clear line, exit code 1."""


class DamagedArtifact(WorkError):
    """An artifact's files no longer match their checksums."""


class Waiting(Exception):
    """A stage cannot go on until somebody does something; not a failure, exit code 0.

    Args:
        what: one line that says what is waited for, such as ``labels for round 2 in batch.csv``.
    """


def is_mistake(error: BaseException | None) -> bool:
    """Whether it is the user who has to change something: what was begun is of no use then, and goes."""
    return isinstance(error, UserError) and not isinstance(error, Refused)
