"""What every engine does with a call before a row runs: what it refuses, and that it can be given up from then on.

May import stages.engines.protocol and capabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from typing import cast

from stages.engines.capabilities import Capabilities
from stages.engines.protocol import Completion, Request, RequestError


def check_request(request: Request, max_seq: int, vocab: int, eos_ids: Set[int]) -> None:
    """Raises RequestError, naming the row, for a request that no version of the weights could serve."""
    sampling = request.sampling
    prompt, new = len(request.tokens), sampling.max_new_tokens
    banned = set(sampling.suppress_token_ids)
    problem = None
    odd = [name for name in ("row", "seed", "step") if not -(2**63) <= getattr(request, name) < 2**63]
    if odd:
        problem = f"has {odd[0]} {getattr(request, odd[0])}, which must be a number of 64 bits, with its sign"
    elif prompt == 0:
        problem = "has an empty prompt"
    elif new <= 0:
        problem = f"has max_new_tokens {new}, which must be positive"
    elif prompt + new > max_seq:
        problem = f"takes {prompt} prompt + {new} new tokens; the engine was built for {max_seq}"
    elif not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        problem = f"has temperature {sampling.temperature}, which must be finite and not negative"
    elif not 0 <= sampling.min_new_tokens <= new:
        problem = f"has min_new_tokens {sampling.min_new_tokens}, which must be 0 to max_new_tokens ({new})"
    elif not all(0 <= token < vocab for token in request.tokens):
        problem = f"has token ids outside the vocabulary of {vocab}"
    elif not all(0 <= token < vocab for token in banned):
        problem = f"suppresses token ids outside the vocabulary of {vocab}"
    elif len(banned | eos_ids if sampling.min_new_tokens else banned) >= vocab:
        problem = "suppresses every token"
    elif request.forced:
        problem = _forced_problem(request, vocab, banned, eos_ids)
    if problem is not None:
        raise RequestError(f"row {request.row} {problem}")


def check_ability(request: Request, can: Capabilities) -> None:
    """Raises RequestError, naming the row, for a request that an engine with these capabilities cannot serve. A run
    that would make such requests is refused before it starts (`pipeline/config/engine_needs.py`)."""
    sampling, problem = request.sampling, None
    if request.forced and not can.scores:
        problem = "is given its tokens, which this engine cannot score"
    elif can.distributions == "plain":
        if sampling.temperature not in (0, 1):
            problem = f"is drawn at temperature {sampling.temperature}; this engine's log-probs are those of 0 and 1"
        elif sampling.suppress_token_ids or sampling.min_new_tokens:
            problem = "has tokens that are not allowed, of which this engine's log-probs know nothing"
    if problem is not None:
        raise RequestError(f"row {request.row} {problem}")


def begun(results: Iterator[Completion | None]) -> Iterator[Completion]:
    """A generator, past the None that it yields first: one that has not begun leaves its `finally` out when it is
    closed, and so would keep its rows."""
    next(results)
    return cast(Iterator[Completion], results)


def _forced_problem(request: Request, vocab: int, banned: Set[int], eos_ids: Set[int]) -> str | None:
    """What is wrong with the tokens that a response is to consist of."""
    forced, sampling = request.forced, request.sampling
    if len(forced) != sampling.max_new_tokens:
        return f"is given {len(forced)} tokens of its response, and max_new_tokens {sampling.max_new_tokens}"
    if not all(0 <= token < vocab for token in forced):
        return f"is given tokens of its response outside the vocabulary of {vocab}"
    if not banned.isdisjoint(forced) or not eos_ids.isdisjoint(forced[: sampling.min_new_tokens]):
        return "is given tokens of its response that cannot be sampled there"
    return None
