"""Processes that share a base out among them train what one trains that has it whole."""

from pathlib import Path

import pytest

from tests.training.test_ranks import same_losses


def test_two_processes_that_share_a_base_have_the_losses_of_one(tmp_path: Path):
    same_losses(tmp_path, (1, 1), (2, 2, "fsdp2"), of=["eagle3"], steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp2", "tensor"])
def test_fifty_steps_have_one_loss_however_a_base_is_shared_out(how: str, tmp_path: Path):
    """Of six rows a step, so that four processes have unequal shares."""
    same_losses(tmp_path, (1, 1), (2, 1, how), (4, 1, how), (2, 2, how), steps=50)


@pytest.mark.slow
def test_groups_of_processes_hold_a_base_each(tmp_path: Path):
    same_losses(tmp_path, (1, 1), (4, 1, "replicas"), steps=4)
