"""The steps give the origin of each token, and distinguish copied from drafted tokens."""

from specheads.decoding.loop import (
    BASE_ORIGIN,
    DecodingStep,
    Origin,
    StepTimes,
    node_origins,
    step_origins,
)

NEVER = StepTimes(0.0, 0.0, 0.0)


def test_depths_are_edges_below_the_root_and_the_last_nodes_are_copied():
    #        0                nodes 1 to 3 are the head's; 4 and 5 were copied below node 1,
    #      1   2              and node 6 is padding
    #    3   4
    #        5
    origins = node_origins([-1, 0, 0, 1, 1, 4, -1], num_copied=3)
    assert origins[:6] == [
        BASE_ORIGIN,
        Origin("drafted", 1),
        Origin("drafted", 1),
        Origin("drafted", 2),
        Origin("copied", 2),
        Origin("copied", 3),
    ]
    step = DecodingStep(
        [11, 14, 15, 9], [0, 1, 4, 5], [0, *range(11, 17)], [-1, 0, 0, 1, 1, 4, -1], NEVER, 3
    )
    assert list(map(str, step_origins(step))) == [
        "drafted at depth 1", "copied at depth 2", "copied at depth 3", "the base's own",
    ]  # fmt: skip
