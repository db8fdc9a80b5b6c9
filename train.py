"""Entry point of a checkout: `accelerate launch --quiet train.py recipe=tiny_code`."""

import sys

from specheads.commands._call import call

if __name__ == "__main__":
    call("train", sys.argv[1:])
