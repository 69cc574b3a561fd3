"""Text to token ids and back (io.md Part 1 and section 4.6)."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders


class TokenizerError(ValueError):
    """tokenizer.json is missing, unreadable, or not the model's."""


def _byte_of_char() -> dict[str, int]:
    """The byte each character of a byte-level token stands for: itself if printable, else U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _bytes_of(token: int, spelling: str | None) -> bytes:
    if spelling is None or not _BYTE_OF_CHAR.keys() >= set(spelling):
        raise TokenizerError(f"token {token} is {spelling!r}: not spelled in byte-level characters")
    return bytes(_BYTE_OF_CHAR[char] for char in spelling)


class TextTokenizer:
    """A model's tokenizer for text as it is: no begin token, and no control token where the text spells one."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int) -> None:
        """Raises TokenizerError if it is no byte-level tokenizer with a token for every id below vocab_size."""
        try:
            tokenizer = Tokenizer.from_buffer(tokenizer_json)
            # Markers removed, not switched off: encode_special_tokens leaves those that are not flagged special.
            plain = json.loads(tokenizer_json) | {"added_tokens": [], "truncation": None, "padding": None}
            self._plain = Tokenizer.from_str(json.dumps(plain))
        except Exception as error:  # the library raises no narrower type
            raise TokenizerError(f"not a tokenizer file: {error}") from error
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise TokenizerError(f"decoder is {tokenizer.decoder}: only ByteLevel is supported")
        if (n_tokens := tokenizer.get_vocab_size()) != vocab_size:
            raise TokenizerError(f"{n_tokens} tokens: the model's vocab_size is {vocab_size}")
        markers = tokenizer.get_added_tokens_decoder()
        self._bytes = [
            markers[token].content.encode() if token in markers else _bytes_of(token, tokenizer.id_to_token(token))
            for token in range(vocab_size)
        ]

    @classmethod
    def load(cls, folder: str | Path, vocab_size: int) -> TextTokenizer:
        """Read FOLDER/tokenizer.json. Raises TokenizerError naming the file."""
        path = Path(folder) / "tokenizer.json"
        try:
            return cls(path.read_bytes(), vocab_size)
        except OSError as error:
            raise TokenizerError(f"{path}: {error.strerror}") from error
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The ids of a text, none of them a control token; decode gives the text back."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token: int) -> bytes:
        """What a token writes: a control token its name in UTF-8, any other token bytes that may split a character."""
        return self._bytes[token]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of whole output; see Detokenizer."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


class Detokenizer:
    """Text from token ids as they come, the pieces together equal to decode of all ids (case B09).

    A character whose bytes are spread over tokens comes out whole with its last one. Bytes that cannot become a
    character come out as U+FFFD and hold nothing back: no more than three bytes ever wait.
    """

    # tokenizers' DecodeStream does not do: it waits behind any U+FFFD, so invalid bytes stop it, and its rest at
    # the end is lost.
    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text this token completes, often empty in scripts of several bytes a character."""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What still waits when the output ends: U+FFFD for an unfinished character, or nothing."""
        return self._utf8.decode(b"", final=True)
