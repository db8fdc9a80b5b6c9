"""What the user asked for and cannot have: told apart from what we got wrong."""


class InputError(ValueError):
    """A setting, a file or an argument is refused: one line of rule, value and remedy.

    Commands end with this line and exit code 2. Any other error that reaches them is a bug.
    """
