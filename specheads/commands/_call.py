"""One call of a command: its help, or compose its settings, run it, and report errors."""

import ast
import inspect
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar

import yaml

from specheads import config
from specheads.commands import docstring_lines
from specheads.config import compose
from specheads.config.commands import Train
from specheads.config.validation import read_settings
from specheads.core import ranges
from specheads.core.errors import InputError, causes, first_line, printable
from specheads.core.limits import num_cpus
from specheads.core.signals import INTERRUPTED, exit_at_second_request, interrupt, on_stop_signal

T = TypeVar("T")

MACHINE_LIMITS = (
    (
        "a disk must have room for the output",
        ("No space left on device", "PytorchStreamWriter failed writing", "Disk quota exceeded"),
        "free some space (for temporary files, or set TMPDIR) and run the same command again",
    ),
    (
        "temporary files need a folder",
        ("No usable temporary directory",),
        "set TMPDIR to a folder that is writable and has space",
    ),
    (
        "a process must stay within the limits of its shell or container",
        ("Too many open files", "can't start new thread", "File too large"),
        "raise them (ulimit -n, -u or -f, pids.max)",
    ),
    (
        "memory must hold the work",
        (
            *("MemoryError", "out of memory", "can't allocate memory", "Unable to allocate"),
            *("Cannot allocate memory", "bad_alloc"),
        ),
        "lower batch_size, sequence_length or the tree's nodes, or use a smaller base",
    ),
)
"""Rules of the machine, words of the libraries' messages about them, and remedies."""
MAX_DETAILS = 8000
"""Characters printed below the line of an error."""
RESUME_REMEDIES = {
    "train": "; run the same command to resume, or specheads evaluate run=DIR for a finished run",
    "distill": "; run the same command to resume",
}
"""Remedies of the commands that keep their work; the others start again."""
HUB_REQUESTS = "huggingface_hub.utils._http"
"""Logger of the Hub client's requests."""
FAR_LIMITS = re.compile(r" \(.*?\)|, at most (1e\+|\d,\d{3},\d{3},)\S*")
"""Limits that no sensible value reaches. Messages name them, the help leaves them out."""


def call(name: str, arguments: Sequence[str]) -> None:
    """Run a command; torch is not loaded before the settings are valid.

    A mistake of the user prints one line on standard error with exit code 2, an interrupt exits
    with 130. A bug prints one line with exit code 1; the line names a file with the traceback.
    """
    for attribute in ("stdout", "stderr"):
        # a closed output is None
        stream = getattr(sys, attribute) or Path(os.devnull).open("w")  # noqa: SIM115
        setattr(sys, attribute, stream)
        # an output that is not UTF-8 gets escapes for what it cannot write
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # read when torch is loaded, which sees affinity but no quota of a container
    if (limit := num_cpus()) < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(limit))
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    logging.getLogger(HUB_REQUESTS).addFilter(_explains_wait)
    try:
        if {"-h", "--help"} & set(arguments):
            sys.stdout.write(help_text(name))
            return
        try:
            Path.cwd()
        except OSError as error:
            raise InputError(
                "a command needs its working folder, which was removed; change to another one"
            ) from error
        settings = checked_settings(compose.SCHEMAS[name], arguments)
        run = import_module(f"specheads.commands.{name.replace('-', '_')}").run
        with on_stop_signal(interrupt), exit_at_second_request():
            run(settings)
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted{RESUME_REMEDIES.get(name, '')}\n")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # the reader of our output closed it; Python would complain again when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        user_line = _user_error_line(error)
        sys.stderr.write(printable(f"error: {user_line or _bug_line(error)}\n"))
        sys.exit(2 if user_line else 1)


def checked_settings(kind: type[T], overrides: Sequence[str], **arguments: object) -> T:
    """Return the checked settings of a command; those of a run start from the run's own.

    Arguments that are not empty are overrides too.
    """
    words = [*overrides, *(f"{name}={value}" for name, value in arguments.items() if value)]
    command = compose.command_of(kind)
    settings = compose.settings_of(command, words)
    if hasattr(settings, "base") and (run := run_folder_of(settings)):
        trained = read_run_settings(Path(run, "config.yaml"), Train)
        compose.copy_run_settings(settings, trained, compose.expand_overrides(command, words))
    return settings


def run_folder_of(settings: Any) -> str:
    """Return the run that settings name, or the first run among their heads; else empty."""
    runs = (head for head in getattr(settings, "heads", ()) if Path(head, "config.yaml").is_file())
    return getattr(settings, "run", "") or next(runs, "")


def read_run_settings(path: Path, schema: type) -> Any:
    """Return the typed settings of a run's config.yaml."""
    return compose.typed_settings(schema, read_settings(path), path)


def _explains_wait(record: logging.LogRecord) -> bool:
    """Print one line for all retries of a request to the Hub: the last one raises, and we say why.

    A wait for its rate limit is printed as it is, because it can take minutes.
    """
    text = record.getMessage()
    if "[Retry 1/" in text and "Rate limited" not in text:
        record.msg, record.args = "the Hub does not answer; trying again for about 30 seconds", ()
        return True
    return " thrown while requesting " not in text and "Retrying in " not in text


def _user_error_line(error: Exception) -> str:
    """Return one line about an error that the user can fix; empty for any other error."""
    if isinstance(error, InputError):
        return f"{error}\n{error.details[:MAX_DETAILS]}".rstrip("\n")
    chain = list(causes(error))
    texts = [f"{type(cause).__name__}: {cause}" for cause in chain]
    for rule, words, remedy in MACHINE_LIMITS:
        if any(word in text for text in texts for word in words):
            return f"{rule}, got {first_line(error)}; {remedy}"
    for cause in chain:
        if isinstance(cause, OSError) and cause.filename:
            return (
                f"a file must exist and be accessible: {cause.strerror}, "
                f"{str(cause.filename)[:200]!r}; check its name and its permissions"
            )
    return ""


def _bug_line(error: Exception) -> str:
    line = f"a bug of specheads: {type(error).__name__}: {first_line(error)}; please report it with"
    report = "".join(traceback.format_exception(error))
    with (
        suppress(OSError),
        tempfile.NamedTemporaryFile(
            "w", prefix="specheads-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file,
    ):
        file.write(report)
        return f"{line} its traceback in {file.name}"
    return f"{line}\n{report}"


# --- help: choices and settings, without a recipe and without torch -------------------------------


def help_text(command: str) -> str:
    """Return the help of a command: usage, examples, choices and every setting."""
    schema = compose.SCHEMAS[command]
    groups = sorted(item.name for item in fields(schema) if _choices(item.name))
    if issubclass(schema, Train):
        groups.insert(0, "recipe")
    choices = [_wrapped(f"{group}=  {', '.join(_choices(group))}", 2) for group in groups]
    short = compose.SHORT.get(command, {}).items()
    details = (inspect.getdoc(schema) or "").removeprefix(f"`specheads {command}`.").strip()
    purpose, _, *examples = docstring_lines(command)
    lines = [
        f"usage: specheads {command} [group=choice] [key=value] ...",
        purpose,
        *filter(None, [details]),
        "\nexamples",
        *(f"  {line}" for line in examples),
        *(["\nchoices", *choices] if choices else []),
        *(["\nshort names"] if short else []),
        *(f"  {name}=  sets {full}" for name, full in short if not full.startswith("+")),
        "\nsettings",
        *(
            _paragraph(f"{name}: {rule}{f' [{default}]' if default else ''}", description)
            for name, rule, default, description in list_settings(schema)
        ),
        *(_heads() if "head" in groups else []),
    ]
    return "\n".join(lines) + "\n"


def _choices(group: str) -> list[str]:
    if group == "recipe":
        return sorted(compose.recipes())
    return sorted(path.stem for path in config.data_dir("configs").joinpath(group).glob("*.yaml"))


def _paragraph(title: str, text: str) -> str:
    return f"  {title}\n{_wrapped(text, 6)}"


def _wrapped(text: str, indent: int) -> str:
    return fill(text, 96, initial_indent=" " * indent, subsequent_indent=" " * 6)


def list_settings(schema: Any, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield full name, rule, default and description of each setting: plain ones before groups."""
    hints = ranges.setting_hints(schema)
    descriptions: dict[str, str] = {}
    for ancestor in reversed(schema.__mro__[:-1]):
        descriptions |= _descriptions(ancestor.__module__)[ancestor.__name__]
    groups = {name: ranges.group_of(hint) for name, hint in hints.items()}
    for item in sorted(fields(schema), key=lambda item: groups[item.name] is not None):
        name, hint = f"{prefix}{item.name}", hints[item.name]
        if group := groups[item.name]:
            yield from list_settings(group, f"{name}.{'NAME.' if 'dict[' in str(hint) else ''}")
        else:
            default = "" if item.default is MISSING else repr(item.default)
            if item.default_factory is not MISSING:
                default = repr(item.default_factory())
            # the description explains an empty value
            default = "" if default in ("''", "[]", "{}") else default
            rule = FAR_LIMITS.sub("", ranges.describe_range(hint))
            yield name, rule, default, descriptions.get(item.name, "")


@cache
def _descriptions(module: str) -> dict[str, dict[str, str]]:
    """Return the text below each setting, by class; the source of a module is parsed once."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        group.name: {
            ast.unparse(setting.target): " ".join(ast.literal_eval(text.value).split())
            for setting, text in pairwise(group.body)
            if isinstance(setting, ast.AnnAssign) and isinstance(text, ast.Expr)
        }
        for group in tree.body
        if isinstance(group, ast.ClassDef)
    }


def _heads() -> Iterator[str]:
    """Yield each kind of head with the defaults of its settings."""
    for file in sorted(config.data_dir("configs").joinpath("head").glob("*.yaml")):
        defaults = yaml.safe_load(file.read_text(encoding="utf-8")).items()
        words = [f"head.{name}={value}" for name, value in defaults if name != "kind"]
        yield _paragraph(f"head={file.stem}", " ".join(words))
