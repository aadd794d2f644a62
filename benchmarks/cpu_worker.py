"""Peers in processes of their own: started once, asked through a pipe, stopped in between.

A worker that waits gets SIGSTOP, so that threads which spin after their work cannot slow the next method down.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from specflow.bench.methods import Ask, Kind, Outcome
from specflow.errors import ModelError

__all__ = ["WorkerMethod", "WorkerProcess"]

LAST_WORDS = 400  # bytes of the log that an error repeats
CLOSING_S = 10.0


class WorkerProcess:
    """One peer with one model, behind JSON lines; see cpu_peers/serve.py for what is said.

    Args:
        name: For messages.
        command: Starts it.
        log: Where its standard error goes.

    Raises:
        ModelError: It cannot start or load; the reason is its own.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("wb") as sink:
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=sink,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the run, which then ends its workers
                )
        except OSError as error:
            raise ModelError(name, f"cannot start {command[0]}: {error.strerror or error}") from error
        try:
            self.versions: dict[str, str] = self._read()["versions"]
        except ModelError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One request, one answer.

        Raises:
            ModelError: The peer failed, or its process ended.
        """
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # reading says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the process; a second call does nothing."""
        self._signal(signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()
        try:
            self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            words = self._log.read_bytes()[-LAST_WORDS:].decode("utf-8", "replace").strip()
            code = self._process.wait()
            raise ModelError(self.name, f"its process ended with code {code}: {words or 'no output'}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ModelError(self.name, answer["error"])
        return answer

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, number)


class WorkerMethod:
    """A peer's plain decoding (lookup None), or its prompt lookup of that many tokens.

    Args:
        system: Name of the peer.
        dtype: Of its weights, in its own words.
        worker: Its process.
        lookup: Draft tokens a round.
        decode: Token ids to text.
    """

    def __init__(
        self,
        system: str,
        dtype: str,
        worker: WorkerProcess,
        lookup: int | None,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.name = f"{system} {dtype}" + ("" if lookup is None else f" lookup K={lookup}")
        self.kind: Kind = "peer plain" if lookup is None else "peer speculative"
        self.facts: Mapping[str, Any] = {
            "exactness": None,
            "runtime": system,
            "dtype": dtype,
            "device": "cpu",
            "lossy": False,
            "system": system,
            "drafts": lookup is not None,
        }
        self._worker = worker
        self._lookup = lookup
        self._decode = decode

    def generate(self, ask: Ask) -> Outcome:
        """Continue one prompt greedily, to its full length whatever stop ids come."""
        assert ask.ignore_eos
        request = {"prompt": list(ask.prompt), "max_new_tokens": ask.max_new_tokens, "lookup": self._lookup}
        answer = self._worker.ask(request)
        tokens, times, sizes = answer["tokens"], answer["times"], answer["sizes"]
        if len(tokens) != ask.max_new_tokens or sum(sizes) != len(tokens):
            raise ModelError(self.name, f"{len(tokens)} tokens in {sum(sizes)}", f"{ask.max_new_tokens} tokens")
        return Outcome(
            tokens=tuple(tokens),
            text=self._decode(tokens),
            finish="length",
            first_tokens=sizes[0],
            ttft_s=times[0],
            decode_s=times[-1] - times[0],
            rounds=None,  # a peer does not say how many passes it took
            deliveries=tuple(times),
        )
