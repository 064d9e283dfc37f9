"""What the tokens of a run stand for, so that its text can be read without its tokenizer, in any language.

    vocabulary_bytes      every token's bytes, one after the other; of special tokens (EOS, padding) none
    vocabulary_offsets    token t is bytes[offsets[t] : offsets[t + 1]]

A text is its tokens' bytes, joined, as UTF-8; where a response was cut in the middle of a character, with a replacement
character there. May import numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

BYTES, OFFSETS = "vocabulary_bytes", "vocabulary_offsets"
"""Names of the arrays."""
Decode = Callable[[Sequence[int]], str]
"""Token ids -> their text: a tokenizer's, or a vocabulary's."""


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of every token."""

    data: bytes
    offsets: np.ndarray
    """int64 [tokens + 1]"""

    @staticmethod
    def of(tokens: Iterable[bytes]) -> Vocabulary:
        """From the bytes of each token, in the order of their ids."""
        pieces = list(tokens)
        return Vocabulary(b"".join(pieces), np.cumsum([0, *map(len, pieces)], dtype=np.int64))

    @staticmethod
    def from_arrays(data: np.ndarray, offsets: np.ndarray) -> Vocabulary:
        """What `arrays` gave."""
        return Vocabulary(data.tobytes(), offsets)

    def arrays(self) -> dict[str, tuple[str, np.ndarray]]:
        """Name -> dimension and numbers, as the store's root has them."""
        data = np.frombuffer(self.data, np.uint8)
        return {BYTES: ("vocabulary_byte", data), OFFSETS: ("vocabulary_offset", self.offsets)}

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of tokens; what is no token has none."""
        last = len(self.offsets) - 1
        spans = ((self.offsets[i], self.offsets[i + 1]) for i in map(int, ids) if 0 <= i < last)
        return b"".join(self.data[start:end] for start, end in spans).decode("utf8", "replace")
