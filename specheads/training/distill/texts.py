"""One text while the base writes it: what is asked next, and what of it is kept."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from specheads.core.seeds import derive_seed
from specheads.decoding.sampling import Sampling
from specheads.training.distill.asks import Prompts
from specheads.training.distill.engine import Answer, Ask
from specheads.training.distill.quality import fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What holds for every text."""

    prompts: Prompts
    sampling: Sampling
    """How tokens are chosen; each answer gets a seed of its own that follows from this one."""
    new_tokens: int
    """Most tokens of an answer."""
    max_turns: int
    """Most answers; zero is all that are asked for."""
    max_length: int
    """Most tokens that the base reads."""
    drop: tuple[str, ...]
    """Faults for which an answer is not kept."""
    min_tokens: int
    eos_ids: tuple[int, ...]
    decode: Callable[[list[int]], str]
    """Gives the text of token ids, without special tokens."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What the base read and wrote, up to the end of an answer."""

    tokens: list[int]
    counted: list[int]
    """One where the base wrote the token, zero where it was read."""
    turns: int
    """Answers counted, at least one."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a text that is done."""

    number: int
    pieces: list[Piece]
    """One, unless the chat template changes what was said before, as one that strips earlier
    thoughts; then each as the base read it when it wrote. None drops the text."""
    fault: str
    """Why the next answer was not kept or not asked for; empty where the text came to its end."""


class Text:
    """A text that is being written, by the number of what is asked.

    An answer with a fault is cut off and ends the text: what would be said next replies to it.
    """

    def __init__(self, number: int, rules: Rules) -> None:
        self._number, self._rules = number, rules
        self._tokens: list[int] = []
        self._counted: list[int] = []
        self._answers: list[list[int]] = []
        self._pieces: list[Piece] = []
        self._fault, self._goes_on = "", False
        self.is_done = False
        """Whether nothing is asked any more."""
        self._read(rules.prompts.first(number))

    def ask(self) -> Ask:
        """Return what the base is to answer next."""
        rules = self._rules
        seed = derive_seed(derive_seed(rules.sampling.seed, self._number), len(self._answers))
        room = min(rules.new_tokens, rules.max_length - len(self._tokens))
        return Ask(self._number, self._tokens, room, replace(rules.sampling, seed=seed))

    def take(self, answer: Answer) -> None:
        """Go on from an answer."""
        rules = self._rules
        self._fault = fault(answer, rules.drop, rules.min_tokens, rules.eos_ids, rules.decode)
        self.is_done = True
        if self._fault:
            return
        self._answers.append(answer.tokens)
        self._tokens = self._tokens + answer.tokens
        self._counted = self._counted + [1] * len(answer.tokens)
        turns = 1 + (self._pieces.pop().turns if self._goes_on else 0)
        self._pieces.append(Piece(self._tokens, self._counted, turns))
        # what was not ended cannot be replied to
        if answer.finish == "eos" and len(self._answers) != rules.max_turns:
            said = rules.prompts.following(self._number, self._tokens, self._answers)
            if said is not None:
                self._read(said)

    def kept(self) -> Kept:
        """Return what is kept of a text that is done."""
        return Kept(self._number, self._pieces, self._fault)

    def _read(self, tokens: list[int]) -> None:
        """Take up what is said to the base, unless nothing is or the context has no room."""
        if not tokens or len(tokens) >= self._rules.max_length:
            self._fault, self.is_done = "context" if tokens else "unasked", True
            return
        self._goes_on = bool(self._tokens) and tokens[: len(self._tokens)] == self._tokens
        before = self._counted if self._goes_on else []
        self._tokens, self._counted = tokens, before + [0] * (len(tokens) - len(before))
        self.is_done = False
