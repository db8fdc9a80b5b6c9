"""A real vLLM server that `specheads serve-features run=true` starts, for tests marked `vllm`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import VLLM, free_port, served

VLLM_PYTHON = os.environ.get("VLLM_PYTHON", sys.executable)
"""Interpreter of the environment with vLLM: `make vllm` sets it."""


@contextmanager
def features_server(
    base: Path | str, folder: Path, log: Path, *overrides: str, port: int = 0, **environment: str
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Start a server in float32; yield its address and its process."""
    url = f"http://127.0.0.1:{port or free_port()}"
    command = [
        *(sys.executable, "-m", "specheads", "serve-features", "run=true", f"url={url}/v1"),
        *(f"base={base}", "base.dtype=float32", f"folder={folder}", f"python={VLLM_PYTHON}"),
        *("options=--enforce-eager --max-num-seqs 8", *overrides),
    ]
    with served(command, f"{url}/health", log, VLLM | environment) as server:
        yield f"{url}/v1", server
