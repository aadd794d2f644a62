"""Where trials of a study are kept: a journal file, or any storage that Optuna knows by a URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from specflow.errors import DataError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

__all__ = ["check_storage", "open_storage", "shown", "storage_errors"]


def open_storage(storage: str) -> BaseStorage:
    """A storage from a path of a journal file, or from a URL such as sqlite:///tune.db or postgresql://host/name."""
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if "://" in storage:
        return RDBStorage(storage)
    return JournalStorage(JournalFileBackend(storage))


def check_storage(storage: str) -> None:
    """See that a storage answers, before anything that takes long.

    Raises:
        DataError: It cannot be reached, or lacks its driver.
    """
    with storage_errors(storage):
        open_storage(storage)


@contextmanager
def storage_errors(storage: str) -> Iterator[None]:
    """Errors of a storage in the body as errors of the option that named it.

    Raises:
        DataError: It cannot be reached, or lacks its driver.
    """
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except ImportError as error:
        expected = "a journal file, or a URL whose driver is installed"
        raise DataError(f"--storage {shown(storage)}", f"no driver: {error}", expected) from error
    except (OSError, SQLAlchemyError, StorageInternalError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        expected = "a writable journal file, or a database that answers"
        raise DataError(f"--storage {shown(storage)}", f"cannot be used: {reason}", expected) from error


def shown(storage: str) -> str:
    """A storage as it may be printed: no password."""
    if "://" not in storage:
        return storage
    parts = urlsplit(storage)
    if parts.password is None:
        return storage
    return parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":...@")).geturl()
