"""Entry point of a checkout: `accelerate launch --quiet train.py recipe=tiny_code`."""

from specheads.commands.train import main

if __name__ == "__main__":
    main()
