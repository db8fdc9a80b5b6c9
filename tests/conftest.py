"""Settings of every test: no network, no display, one thread, a fixed seed, and type checks.

A refusal of more than one line fails the test that reads it.

jaxtyping checks functions with shapes in their annotations, in their first calls of each test, and
beartype checks the others.
beartype skips `specheads.decoding`, which validates the arguments of users itself.
"""

import functools
import gc
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

# these libraries read them when they are imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# the first product on a GPU decides whether torch accepts cuBLAS as deterministic
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# dtype=auto is float32 on every processor
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
# MKL's bfloat16 products by AVX512_BF16 and AMX depend on the number of rows
os.environ.setdefault("MKL_ENABLE_INSTRUCTIONS", "AVX512")

import hypothesis
import jaxtyping
import pytest
import torch
from beartype import BeartypeConf, beartype
from beartype.claw import beartype_package
from jaxtyping import install_import_hook, jaxtyped

PACKAGE = Path(__file__).parents[1] / "specheads"
SHAPED = [
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    for file in PACKAGE.rglob("*.py")
    if re.search("from (jaxtyping|specheads.core.drafter) import", file.read_text(encoding="utf-8"))
]
UNCHECKED = "specheads.decoding"
CHECKED_CALLS = 8
"""Number of checked calls of each function in each test: a check takes longer than the operations
of a tiny model."""
NUM_CALLS = Counter[FunctionType]()
"""Number of calls of each function with shapes in the running test, up to `CHECKED_CALLS`."""
PLAIN = BeartypeConf(
    claw_is_pep526=False, claw_skip_package_names=(UNCHECKED,), violation_type=TypeError
)


def check_first_calls(function: FunctionType, check: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `check` at first, and then `function` itself."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # the compiler traces the function alone
        if torch.compiler.is_compiling() or NUM_CALLS[function] >= CHECKED_CALLS:
            return function(*args, **kwargs)
        NUM_CALLS[function] += 1
        return check(*args, **kwargs)

    return call


def checked(*, typechecker: Any) -> Callable[[Any], Any]:
    """Replace `jaxtyped`, which is slow for functions without shapes too."""

    def check(made: Any) -> Any:
        function = getattr(made, "__func__", None) or getattr(made, "fget", None) or made
        if "<locals>" in function.__qualname__:
            # the compiler identifies a closure by its code, and a wrapper has new code in each call
            return made
        if isinstance(made, type) or "jaxtyping." in repr(function.__annotations__):
            check_shapes = jaxtyped(typechecker=typechecker)(made)
            is_function = isinstance(made, FunctionType)
            return check_first_calls(made, check_shapes) if is_function else check_shapes
        return made if function.__module__.startswith(UNCHECKED) else beartype(conf=PLAIN)(made)

    return check


# the import hook applies this to everything in a module
jaxtyping.jaxtyped = checked
beartype_package("specheads", conf=PLAIN)
install_import_hook(SHAPED, "beartype.beartype")

# a shell makes background jobs ignore Ctrl-C, and processes started by tests would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

# the models are tiny: a second thread is slower, and changes the order of sums
torch.set_num_threads(1)

# no deadlines, and the same examples on every machine
for name, num_examples in (("specheads", 100), ("few", 20)):
    hypothesis.settings.register_profile(
        name, deadline=None, derandomize=True, max_examples=num_examples
    )


def pytest_configure(config: pytest.Config) -> None:
    """Try fewer examples where slow tests are left out."""
    hypothesis.settings.load_profile("few" if "not slow" in config.option.markexpr else "specheads")


def pytest_collection_finish() -> None:
    """Leave the imported modules out of later searches for garbage."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the device of the tests that are marked `gpu`."""
    parser.addoption(
        "--device",
        default="cuda",
        help="device of the tests marked gpu, a torch device name such as cuda or cpu",
    )


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device of the tests marked `gpu`; skip them where it is missing."""
    name = str(request.config.getoption("--device"))
    if torch.device(name).type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; --device cpu runs this test on the CPU")
    # with its number, as tensors name their device
    return torch.empty(0, device=name).device


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    # in the environment, for the processes that tests start
    os.environ["SPECHEADS_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    NUM_CALLS.clear()


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Have rotary angles, and tensors without a dtype, in float64 too."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session", autouse=True)
def _refusals_are_one_line() -> None:
    from specheads.core.errors import InputError

    told = InputError.__str__

    def line(error: InputError) -> str:
        assert "\n" not in told(error)
        return told(error)

    setattr(InputError, "__str__", line)  # noqa: B010
