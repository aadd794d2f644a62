"""Who works on a study, and whether somebody who began still does."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import datetime, timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

__all__ = ["abandoned", "wait_until", "worker"]

STALE = timedelta(minutes=10)
"""What has run for so long on another host belongs to a worker that is gone: replays and profiles take less."""
PATIENCE_S = 20.0


def worker() -> dict[str, Any]:
    """This process, as trials name it."""
    return {"host": socket.gethostname(), "process": os.getpid()}


def abandoned(trial: FrozenTrial) -> bool:
    """Whether nobody works on a running trial any more."""
    who = trial.user_attrs.get("worker")
    if who is not None and who["host"] == socket.gethostname() and os.name == "posix":
        return not _lives(who["process"])
    began = trial.datetime_start
    return began is not None and datetime.now() - began > STALE


def _lives(process: int) -> bool:
    """Whether a process of this host is there; signal 0 asks and does nothing."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def wait_until(done: Callable[[], bool], most_s: float = PATIENCE_S, step_s: float = 0.05) -> None:
    """Give another worker time."""
    ends = monotonic() + most_s
    while not done() and monotonic() < ends:
        sleep(step_s)
