"""Random overrides from the schema are accepted, or refused in one line without files."""

import contextlib
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from specheads.commands import _call
from specheads.config import compose
from specheads.core.ranges import setting_hints
from specheads.heads.kinds.mlp_speculator import Config

UNHURRIED = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)

STRANGE = (
    "three", "", "null", "???", "nan", "-nan", "inf", "-inf", "-1", "0", "1.5", "1e400", "true",
    "99999999999999999999", "[1]", "[]", "{}", "{a:1}", "[[[1]]]", "${x}", "${oc.env:HOME}",
    "'\\x00'", "\ud800", "ä" * 200, "x" * 5000, "../../x", "/dev/null", "a b", "=", "[", "'", "\n",
)  # fmt: skip


def leaves(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full name and the hint of every setting of the smoke recipe."""
    for item in fields(kind):
        name, hint = f"{prefix}{item.name}", setting_hints(kind)[item.name]
        inner = [
            option
            for option in (hint, *get_args(hint))
            if isinstance(option, type) and is_dataclass(option)
        ]
        if name == "head":
            yield from (
                (f"head.{setting.name}", setting_hints(Config)[setting.name])
                for setting in fields(Config)
            )
        elif name == "schedule.phases":
            section = get_args(get_args(hint)[0])[1]
            for phase in ("corpus", "distilled"):
                yield from leaves(section, f"{name}.{phase}.")
        elif inner:
            yield from leaves(inner[0], f"{name}.")
        else:
            yield name, hint


def usual(hint: Any) -> strategies.SearchStrategy[str]:
    """Draw values of a setting, with the ends of its range."""
    rules = hint.__metadata__ if get_origin(hint) is Annotated else ()
    plain = hint.__origin__ if rules else hint
    if plain is int or plain is float:
        bounds = [getattr(rule, name, None) for rule in rules for name in ("ge", "gt", "le", "lt")]
        ends = {end for end in bounds if end is not None}
        around = {end + step for end in ends for step in (-1, 0, 1)} | {1, 2, 3, 8}
        if plain is float:
            around |= {end + step for end in ends for step in (-1e-3, 1e-3)} | {0.5}
        return strategies.sampled_from([str(plain(number)) for number in sorted(around)])
    if get_origin(plain) is list:
        items = strategies.lists(usual(get_args(plain)[0]), max_size=3)
        return items.map(lambda words: f"[{','.join(words)}]")
    if plain is str and rules and getattr(rules[0], "description", "").startswith("one of "):
        return strategies.sampled_from(rules[0].description.removeprefix("one of ").split(", "))
    return strategies.sampled_from(["true", "false", "none", "plain"])


def called(command: str, overrides: list[str]) -> tuple[int, str]:
    """Return the exit code of a call, and its standard error."""
    output, code = io.StringIO(), 0
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
        try:
            _call.call(command, overrides)
        except SystemExit as left:
            code = int(left.code or 0)
    return code, output.getvalue()


def override_sets(command: str) -> strategies.SearchStrategy[list[str]]:
    """Draw one to four overrides: in range, out of range, of a wrong type, unknown, or odd."""
    settings_of_command = list(leaves(compose.SCHEMAS[command]))
    names = strategies.sampled_from([name for name, _ in settings_of_command])
    groups = strategies.sampled_from(["base", "head", "data", "tree", "schedule", "tracker"])
    unknown = strategies.sampled_from(["evaluation.x", "+evaluation.x", "++x", "x"])
    odd = strategies.sampled_from(STRANGE) | strategies.text(max_size=8)
    override = strategies.one_of(
        strategies.sampled_from(settings_of_command).flatmap(assigned),
        strategies.tuples(names | groups | unknown, odd).map("=".join),
        names.map("~{}".format),
        odd,
    )
    return strategies.lists(override, min_size=1, max_size=4)


def assigned(leaf: tuple[str, Any]) -> strategies.SearchStrategy[str]:
    """Draw an override of one setting, with a value in or just out of its range."""
    name, hint = leaf
    return usual(hint).map(lambda value: f"{name}={value}")


@pytest.mark.parametrize("command", compose.SCHEMAS)
@pytest.mark.parametrize("number", [6, pytest.param(500, marks=pytest.mark.slow)])
def test_random_overrides_are_accepted_or_refused_in_one_line(
    command: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ran: list[Any] = []
    # torch must not be imported: the command's module is replaced
    monkeypatch.setattr(_call, "import_module", lambda _: SimpleNamespace(run=ran.append))
    monkeypatch.chdir(tmp_path)
    recipe, codes = ["recipe=smoke"] if command in ("train", "distill") else [], Counter[int]()

    @settings(max_examples=number, suppress_health_check=UNHURRIED)
    @given(overrides=override_sets(command))
    def hold(overrides: list[str]) -> None:
        ran.clear()
        code, error = called(command, [*recipe, *overrides])
        codes[code] += 1
        assert code in (0, 2), (overrides, error)
        assert len(ran) == (code == 0), overrides
        assert [*tmp_path.iterdir()] == [], overrides
        if code == 2:
            assert error.startswith("error: "), (overrides, error)
            assert len(error.splitlines()) == 1, (overrides, error)
            assert len(error) < 1200, overrides

    hold()
    assert codes[0] > 0 or number < 100
    assert codes[2] > number / 4
