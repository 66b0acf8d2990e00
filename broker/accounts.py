"""The passwords of an embedded server: made once, kept in the data folder, which only its owner reads."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import cast

from headrace.broker import acl
from headrace.broker.errors import ConfigError

_FILE = "passwords.json"
USERS = ("gateway", "worker", "scaler", "ops")


def passwords(folder: Path) -> dict[str, str]:
    """Of each user of the server in this folder; made now if nobody has before, by whichever process is first."""
    try:
        return _read(folder / _FILE)
    except FileNotFoundError:
        pass
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=folder, prefix=_FILE) as made:  # readable by its owner alone
            json.dump({user: acl.new_password() for user in USERS}, made)
            made.flush()
            with suppress(FileExistsError):
                os.link(made.name, folder / _FILE)
    except OSError as error:
        raise ConfigError(f"data_dir: {str(folder.parent)!r} cannot be written: {error.strerror}") from error
    return _read(folder / _FILE)


def _read(file: Path) -> dict[str, str]:
    return cast(dict[str, str], json.loads(file.read_text("utf-8")))


def write_acl_file(folder: Path) -> Path:
    """The server's users, as this version has them."""
    file = folder / "users.acl"
    file.touch(mode=0o600)
    file.write_text("\n".join(acl.lines({user: [each] for user, each in passwords(folder).items()})) + "\n", "utf-8")
    return file
