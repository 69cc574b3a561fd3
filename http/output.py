"""From output ids to what a client reads: text, reasoning apart from content, stop strings (io.md Part 4)."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import deepseek_recipe as recipe
import msgspec

from rocline.engine.text import Detokenizer, TextTokenizer
from rocline.http.prompt import THINK_END, Markers, Start

Kind = Literal["reasoning_content", "content"]
_STAGES = {
    "reasoning": recipe.ThinkingInitialStage.ReasoningStart,
    "reasoning_goes_on": recipe.ThinkingInitialStage.ReasoningContinuation,
    "content_goes_on": recipe.ThinkingInitialStage.ContentContinuation,
}


class Piece(NamedTuple):
    kind: Kind
    text: str


class StopMatcher:
    """Finds the first stop string in text that comes in pieces, holding back only what may still become one (B11).

    matched  the stop string, once found
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """include: the match itself is part of the text."""
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._include = include
        self._states = [0] * len(stops)  # characters of each stop that the text so far ends with
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain now; nothing after a match."""
        if self.matched is not None or not self._stops:
            return "" if self._stops else text
        buffer = self._held + text
        for place, char in enumerate(text, len(self._held) + 1):
            for n, (stop, borders) in enumerate(self._stops):
                self._states[n] = state = _step(stop, borders, self._states[n], char)
                if state == len(stop) and (self.matched is None or len(stop) > len(self.matched)):
                    self.matched = stop
            if self.matched is not None:
                return buffer[: place if self._include else place - len(self.matched)]
        n_held = max(self._states)
        self._held = buffer[len(buffer) - n_held :]
        return buffer[: len(buffer) - n_held]

    def finish(self) -> str:
        """What was held back, when the output ends without a match."""
        held, self._held = self._held, ""
        return "" if self.matched is not None else held


def _borders(stop: str) -> list[int]:
    """borders[n]: length of the longest proper prefix of stop[:n + 1] that also ends it (Knuth, Morris, Pratt)."""
    borders = [0] * len(stop)
    for n in range(1, len(stop)):
        borders[n] = _step(stop, borders, borders[n - 1], stop[n])
    return borders


def _step(stop: str, borders: Sequence[int], state: int, char: str) -> int:
    while state and (state == len(stop) or stop[state] != char):
        state = borders[state - 1]
    return state + 1 if stop[state] == char else state


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _RecipeChoice(msgspec.Struct):
    delta: _Delta


class _RecipeChunk(msgspec.Struct):
    choices: list[_RecipeChoice]


_recipe_chunks = msgspec.json.Decoder(_RecipeChunk)


class ReasoningSplit:
    """The recipe's parser: reasoning and content, without the newlines around the marker between them.

    Only the marker's id ends reasoning. The recipe works on text, so it is given a spelling of the marker that no
    text has: what the model spells by ordinary tokens stays text (io.md section 4.6).
    """

    def __init__(self, start: Start) -> None:
        spelled = {name: f"\ue000{name}{secrets.token_hex(8)}\ue000" for name in ("thinking_start", "thinking_end")}
        self.marker = spelled["thinking_end"]
        request = recipe.ConversationRequest(recipe.Conversation(), recipe.ModelVersion.DeepseekV41Flash)
        self._parser = recipe.StreamProcessor(
            recipe.ChatCompletionRequest.chunk_generator(request, "", ""),
            recipe.ParsingOptions(
                parse_tool_calls=False,
                thinking_initial_stage=_STAGES.get(start),
                special_tokens=recipe.SpecialTokens(**spelled),
            ),
        )

    def push(self, text: str) -> list[Piece]:
        # The recipe holds back a whole piece that ends in newlines; it need only hold those.
        head = text.rstrip("\n")
        return [
            piece
            for part in (head, text[len(head) :])
            if part
            for piece in _pieces(self._parser.push(recipe.InferenceChunk.text(part)))
        ]

    def finish(self) -> list[Piece]:
        end = recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)
        return _pieces([*self._parser.push(end), *self._parser.finish()])


def _pieces(chunks: Iterable[Any]) -> list[Piece]:
    pieces = []
    for chunk in chunks:
        delta = _recipe_chunks.decode(chunk.to_json()).choices[0].delta
        if delta.reasoning_content:
            pieces.append(Piece("reasoning_content", delta.reasoning_content))
        if delta.content:
            pieces.append(Piece("content", delta.content))
    return pieces


class OutputText:
    """One choice's text as its ids come. A stop token writes nothing, and nothing follows a stop string.

    n_reasoning  ids before the marker that ends reasoning, all so far without one
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        markers: Markers,
        *,
        stop_ids: frozenset[int],
        stops: StopMatcher,
        start: Start | None = None,
        skip_special: bool = True,
    ) -> None:
        """start: of a chat's answer; None: plain text that is not split."""
        self._detokenizer = Detokenizer(tokenizer)
        self._hidden = stop_ids | markers.special if skip_special else stop_ids
        self._split = ReasoningSplit(start) if start is not None else None
        self._think_end = markers.ids[THINK_END]
        self._in_reasoning = start in ("reasoning", "reasoning_goes_on")
        self._stops = stops
        self.n_reasoning = 0

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._stops.matched

    def push(self, ids: array[int]) -> tuple[list[Piece], int]:
        """(text that became certain, how many of the ids were used: all, or those up to a stop string's last)."""
        pieces: list[Piece] = []
        for n_used, token in enumerate(ids, 1):
            pieces += self._visible(self._token(token))
            if self.matched is not None:
                return _merged(pieces), n_used
        return _merged(pieces), len(ids)

    def finish(self) -> list[Piece]:
        """What was held back, through the same parsers (case B11)."""
        pieces = self._visible(self._text(self._detokenizer.finish()))
        if self._split and self.matched is None:
            pieces += self._visible(self._split.finish())
        if rest := self._stops.finish():
            pieces.append(Piece("content", rest))
        return _merged(pieces)

    def _token(self, token: int) -> list[Piece]:
        if self._split and token == self._think_end:
            self._in_reasoning = False
            return self._text(self._detokenizer.finish() + self._split.marker)
        self.n_reasoning += self._in_reasoning
        if token in self._hidden:
            return self._text(self._detokenizer.finish())
        return self._text(self._detokenizer.push(token))

    def _text(self, text: str) -> list[Piece]:
        if not text:
            return []
        return self._split.push(text) if self._split else [Piece("content", text)]

    def _visible(self, pieces: list[Piece]) -> list[Piece]:
        """Stop strings count in content alone (io.md section 4.5)."""
        return [p if p.kind != "content" else Piece("content", self._stops.push(p.text)) for p in pieces]


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one kind as one."""
    result: list[Piece] = []
    for piece in pieces:
        if result and result[-1].kind == piece.kind:
            result[-1] = Piece(piece.kind, result[-1].text + piece.text)
        elif piece.text:
            result.append(piece)
    return result
