import ast

import pytest

from specheads.config.data import DataSettings
from specheads.core.errors import InputError
from specheads.data.instructions import instructions, wordings
from specheads.data.prompts import held_out_prompts, load_prompts
from specheads.data.sources import read_split, split_of
from specheads.data.tokenise import tokenise_corpus

ASKED = DataSettings(source="stdlib_instructions")

CODE = '''"""Numbers that are counted, with everything one needs for it."""


def count(limit: int, step: int = 1) -> int:
    """Return how many numbers there are below a limit, by steps of some length."""
    found = 0
    for number in range(0, limit, step):
        if number < limit and number >= 0:
            found += 1
    return found


def short(): return 1
'''


def asked(text: str, kind: str) -> list[str]:
    found = instructions(iter([("a.py", {"text": text})]), split_of)
    return [row["messages"][0]["content"] for _, row in found if row["category"] == kind]


def test_function_gets_every_kind_that_fits():
    found = list(instructions(iter([("a.py", {"text": CODE})]), lambda _: "prompts"))
    kinds = [row["category"] for _, row in found]
    assert {"module", "write", "explain", "test", "continue"} < set(kinds)
    assert len(kinds) == 6
    assert {row["split"] for _, row in found} == {"prompts"}
    assert {where for where, _ in found} == {"a.py", "count of a.py"}


def test_instructions_do_not_show_the_answer():
    (write,), (start,) = asked(CODE, "write"), asked(CODE, "continue")
    assert "def count(limit: int, step: int = 1) -> int:" in write
    assert "by steps of some length" in write
    assert "found" not in write
    assert "found = 0" in start
    assert "return found" not in start


def test_bug_is_one_operator_outside_strings_and_comments():
    for number in range(40):
        code = CODE.replace("count", f"count_{number}")
        for text in asked(code, "fix"):
            assert ("number <= limit" in text) != ("limit or number" in text)
            ast.parse(text.partition("```python\n")[2].partition("```")[0])
            return
    pytest.fail("nothing was to be fixed")


def test_function_in_two_files_is_used_once_and_never_across_splits():
    texts = [("a.py", {"text": CODE}), ("b.py", {"text": CODE + "# more\n"})]
    once = list(instructions(iter(texts), lambda _: "train"))
    assert len({row["messages"][0]["content"] for _, row in once}) == len(once) == 6
    parted = instructions(iter(texts), lambda text: "train" if "more" in text else "prompts")
    assert [row["category"] for _, row in parted] == ["module"]


@pytest.mark.usefixtures("few")
def test_functions_in_prompts_are_not_in_training_files():
    asked = [row for _, row in read_split(ASKED, "prompts") if row["category"] == "explain"]
    assert asked
    trained = "\n".join(
        text["text"] for _, text in read_split(DataSettings(source="python_stdlib"), "train")
    )
    for row in asked:
        code = row["messages"][0]["content"].partition("```python\n")[2].partition("\n```")[0]
        assert f"\n{code}\n" not in trained


@pytest.mark.usefixtures("few")
def test_instruction_prompts_have_kinds_and_use_the_template(tokenizer, chat_tokenizer):
    plain = load_prompts("stdlib_instructions", tokenizer, num_prompts=60)
    kinds = {prompt.category for prompt in plain.prompts}
    assert kinds <= set(wordings())
    assert len(kinds) > 3
    chat = load_prompts("stdlib_instructions", chat_tokenizer, num_prompts=60)
    texts = [f"<user>{prompt.text}<assistant>" for prompt in plain.prompts]
    assert [prompt.text for prompt in chat.prompts] == texts


@pytest.mark.usefixtures("few")
def test_corpus_phase_refuses_instructions_and_names_distill(chat_tokenizer, cache_folder):
    with pytest.raises(InputError, match=r"learns answers, and .* has no answer; .* distill"):
        tokenise_corpus(ASKED, "train", chat_tokenizer)
    assert not cache_folder.exists()
    # tuning on validation text uses the prompts instead
    [window] = held_out_prompts(ASKED, "validation", chat_tokenizer, 16, 1)
    assert window.text.startswith("<user>")
