"""The requests of the demo: questions about shared documents and conversations of several turns, over real text.

The order produces hits on every tier. A document has two questions in a row (L1), another after a few documents (L2),
and another after many documents (L3); between them all conversations continue by one turn, in one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

TEXTS = Path(__file__).parents[1] / "engine" / "assets" / "texts"
# Distances, in documents, between two questions about a document; see the module's docstring.
REVISITS = (0, 2, 6)
QUESTIONS = (
    "\n\nWhat happened then?\n\n",
    "\n\nAnd what did he say to that?\n\n",
    "\n\nWho came into the room?\n\n",
    "\n\nHow did it end?\n\n",
)
TURNS = (
    '"And what do you think of it yourself?" she asked.\n\n',
    '"Tell me more of that," said the prince.\n\n',
    '"I do not understand you," he answered. "What was it?"\n\n',
    '"Then we must go at once," said Holmes.\n\n',
)


@dataclass(slots=True)
class Conversation:
    """A conversation so far, as tokens; it grows by a line of the user and an answer of the model per turn."""

    name: str
    tokens: list[int]
    turns: int = 0


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request of the demo: a question about `document`, or a turn of `conversation`. `label` is for output."""

    label: str
    prompt: list[int]
    document: str | None = None
    conversation: Conversation | None = None


@dataclass(slots=True)
class Workload:
    """All requests in order. A workload serves one run, because conversations grow by the answers."""

    documents: list[tuple[str, list[int]]]
    questions: list[list[int]]
    turns: list[list[int]]
    conversations: list[Conversation] = field(default_factory=list)

    @classmethod
    def load(cls, tokenizer: Tokenizer, *, document_tokens: int, conversations: int, rounds: int) -> Workload:
        """Read the bundled texts: each document is the beginning of one, `rounds` times over."""
        texts = sorted(TEXTS.glob("*.txt"))
        documents = [(path.stem.replace("-", " "), head(tokenizer, path, document_tokens)) for path in texts]
        talks = [Conversation(f"conversation {i + 1}", tokens[: 256 + 16 * i]) for i, (_, tokens) in
                 enumerate(documents[:conversations])]

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        return cls(documents * rounds, [encode(q) for q in QUESTIONS], [encode(t) for t in TURNS], talks)

    def waves(self) -> Iterator[list[DemoRequest]]:
        """Yield the requests that are submitted together: one question about a document, or one turn of every
        conversation."""
        for number in range(len(self.documents)):
            for visit, distance in enumerate(REVISITS):
                if number >= distance:
                    yield [self.question(number - distance, 2 * visit)]
                    if distance == 0:
                        yield [self.question(number, 1)]
            if number % 3 == 2:
                yield [self.turn(conversation) for conversation in self.conversations]

    def question(self, number: int, question: int) -> DemoRequest:
        """Return question `question` about document `number`."""
        name, tokens = self.documents[number]
        index = question % len(self.questions)
        return DemoRequest(f"{name}, question {index + 1}", tokens + self.questions[index], document=name)

    def turn(self, conversation: Conversation) -> DemoRequest:
        """Return the user's next line in a conversation; the caller appends the answer later."""
        conversation.tokens = conversation.tokens + self.turns[conversation.turns % len(self.turns)]
        conversation.turns += 1
        return DemoRequest(
            f"{conversation.name}, turn {conversation.turns}", list(conversation.tokens), conversation=conversation
        )


def head(tokenizer: Tokenizer, path: Path, tokens_max: int) -> list[int]:
    """Return the tokens of the first whole paragraphs of a text, at most `tokens_max`."""
    begin = tokenizer.decode(tokenizer.encode(path.read_text(encoding="utf-8")).ids[:tokens_max])
    return list(tokenizer.encode(begin[: begin.rindex("\n\n")]).ids)
