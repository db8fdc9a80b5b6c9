"""The task of SkyPilot: what each node runs, and that servers end with the training."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

TASK = yaml.safe_load(
    (Path(__file__).parents[2] / "scripts" / "skypilot" / "features.yaml").read_text()
)
STAND_INS = {
    "specheads": 'echo "$@" > served; exec /bin/sleep 60',
    "accelerate": 'echo "$@" > launched',
    # the port of the trainer is open twice, and then closed
    "curl": """
        [[ ${!#} == */health ]] && exit 0
        echo >> asked
        (( $(wc -l < asked) < 3 ))
    """,
    "python": "exec /bin/sleep 60",
    "sleep": "exec /bin/sleep 0.01",
}
NODES = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]
STORE = "features.transport=mooncake features.master=10.0.0.1:50051 features.protocol=tcp"


def run(folder: Path, rank: int) -> None:
    """Run the task on one of four nodes, of which two serve."""
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    variables = {
        "SKYPILOT_NODE_IPS": "\n".join(NODES), "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": "4", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }  # fmt: skip
    environment = os.environ | {key: str(value) for key, value in TASK["envs"].items()} | variables
    subprocess.run(["bash", "-c", TASK["run"]], cwd=folder, env=environment, check=True, timeout=60)


@pytest.mark.parametrize("rank", [0, 1])
def test_first_nodes_serve_until_the_training_ends(rank: int, tmp_path: Path):
    run(tmp_path, rank)
    assert (tmp_path / "served").read_text().strip() == (
        f"serve-features {TASK['envs']['ARGUMENTS']} {STORE} url=http://{NODES[rank]}:8000/v1 "
        "tensor_parallel=8 run=true"
    )


@pytest.mark.parametrize("rank", [2, 3])
def test_other_nodes_train_together(rank: int, tmp_path: Path):
    run(tmp_path, rank)
    assert (tmp_path / "launched").read_text().strip() == (
        "launch --config_file configs/accelerate/ddp_8gpu.yaml --num_machines 2 "
        f"--num_processes 16 --machine_rank {rank - 2} --main_process_ip 10.0.0.3 "
        f"--main_process_port 29500 train.py {TASK['envs']['ARGUMENTS']} features=vllm "
        f"features.url=[http://10.0.0.1:8000/v1,http://10.0.0.2:8000/v1] {STORE}"
    )
