"""What every test gets: no network, no screen, one thread, a fixed seed."""

import os

# read by these libraries when they are imported, so before any of them is
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# dtype=auto is float32 on every processor
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import hypothesis
import pytest
import torch

# the models are tiny: a second thread costs more than it brings, and sums would vary with it
torch.set_num_threads(1)

# no clock decides over a test, and the same examples are drawn on every machine
hypothesis.settings.register_profile("specheads", deadline=None, derandomize=True)
hypothesis.settings.load_profile("specheads")


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    # also of the processes that tests start
    os.environ["SPECHEADS_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
