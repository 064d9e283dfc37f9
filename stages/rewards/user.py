"""A reward that a user wrote (`module:function` or `module:Class`), in a process of its own.

    worker                                             sandbox (user_main.py)
      start ──kind, args──────────────────────────────► import, check the arguments ──► ready | refused
      batch ──samples─────────────────────────────────► call ──► scores | the exception and its row
      close, or any end of the worker ────────────────► the sandbox ends, with all its processes

A batch fails if the function raises or exceeds its time limit. The error names the rows, and the worker continues. If
the process ends during a batch, something outside may have killed it. So the process is started once more, and gets the
same batch again. The batch fails if the process ends a second time. To repeat a batch is safe, because scoring has no
side effects.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from stages.rewards.protocol import Reward, RewardFailed, Sample, Scored
from stages.rewards.sandbox.process import START_S, Confinement, Sandbox, SandboxEnded, SandboxExpired

_ANYTHING = Confinement()


class UserReward(Reward):
    """A user's own reward, with the sandbox in which its function runs."""

    def __init__(self, kind: str, args: dict[str, Any], timeout_s: float, confinement: Confinement = _ANYTHING) -> None:
        """Start the process and wait until it has imported the function. Sets `refusal` if the function cannot be used.
        `timeout_s`: time limit of a batch, in seconds."""
        self._kind, self._args, self._timeout_s = kind, args, timeout_s
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None
        self.refusal: tuple[str, str] | None = None
        """Why the function cannot be used: (the setting at fault, "kind" or "args"; what is wrong and what would work).
        None: it can be used."""
        self.deterministic = True
        try:
            self._sandbox = Sandbox("stages.rewards.user_main:serve", {"kind": kind, "args": args}, confinement)
            self.protections = self._sandbox.protections
            self._await_function()
        except (SandboxEnded, SandboxExpired) as error:
            self._refuse(error)

    def __call__(self, samples: Sequence[Sample]) -> list[float] | Scored:
        """Return the function's scores. If the function raises, exceeds the time limit, or ends its process twice,
        raises RewardFailed, which names the rows."""
        request = {"samples": [vars(sample) for sample in samples]}
        with self._lock:
            answer = self._answer(request, samples)
        if "error" in answer:
            where = answer["row"]
            raise RewardFailed(
                f"{self._kind} raised {answer['error']}, "
                + (self._rows(samples) if where is None else self._rows([samples[where]]))
                + f"\n{answer['traceback']}"
            )
        if "parts" not in answer:
            return list(answer["scores"])
        return Scored(answer["parts"], answer["disagreement"], answer.get("measured", {}))

    def close(self) -> None:
        """Kill the process and all that it started. A second call does nothing."""
        if self._sandbox is not None:
            self._sandbox.close()

    def _answer(self, request: Mapping[str, Any], samples: Sequence[Sample]) -> Mapping[str, Any]:
        """Return the process's answer. If the process ended, start it once more and ask again. Raises RewardFailed if
        there is no answer within the time limit, if the process ends again, or if it cannot be started again."""
        assert self._sandbox is not None
        before = ""
        while True:
            try:
                answer: Mapping[str, Any] = self._sandbox.ask(request, self._timeout_s)
                return answer
            except SandboxExpired:
                need = f"took longer than {self._timeout_s:g} s (timeout_s of its part), {self._rows(samples)}"
                raise RewardFailed(f"{self._kind} {need}: its process was ended") from None
            except SandboxEnded as error:
                if before:
                    raise RewardFailed(f"{self._kind}: {error}, {self._rows(samples)}; before that, {before}") from None
                before = str(error)
            try:
                self._sandbox.restart()
                self._await_function()
            except (SandboxEnded, SandboxExpired) as error:
                self._refuse(error)
            if self.refusal is not None:
                raise RewardFailed(f"{self._kind}: {before}, and then: {self.refusal[1]}") from None

    def _await_function(self) -> None:
        """Wait until the process has imported the function or refused it."""
        assert self._sandbox is not None
        answer = self._sandbox.ask(None, max(START_S, self._timeout_s))
        if "refused" in answer:
            self.refusal = (answer["refused"], answer["need"])
            self.close()
        else:
            self.deterministic, self.batch_tokens = answer["deterministic"], answer["batch_tokens"]
            self.early = answer["early"]

    def _refuse(self, error: SandboxEnded | SandboxExpired) -> None:
        self.close()
        if isinstance(error, SandboxExpired):
            self.refusal = ("kind", f"its module was not imported within {max(START_S, self._timeout_s):g} s")
        else:
            self.refusal = ("kind", f"its process ended before it had the function: {error}")

    @staticmethod
    def _rows(samples: Sequence[Sample]) -> str:
        """Return a text that names the rows of a batch."""
        first = samples[0]
        if len(samples) == 1:
            return f"row {first.row} (prompt {first.prompt[:60]!r}, response {first.response[:60]!r})"
        return f"rows {first.row} to {samples[-1].row} (a batch of {len(samples)})"
