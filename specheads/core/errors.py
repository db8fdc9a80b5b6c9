"""What the user asked for and cannot have: told apart from what we got wrong."""


class InputError(ValueError):
    """A setting, a file or an argument is refused: one line of rule, value and remedy.

    Commands end with this line and exit code 2. Any other error that reaches them is a bug.
    `details` is what cannot be told in a line, such as a text that was read wrongly: commands show
    it below.
    """

    def __init__(self, line: str, details: str = "") -> None:
        super().__init__(line)
        self.details = details


def printable(text: str) -> str:
    """Return a text that a terminal shows and does not obey."""
    return "".join(
        one if one.isprintable() or one in "\n\t" else f"\\x{ord(one):02x}" for one in text
    )


def first_line(error: BaseException) -> str:
    """Return what an error says in one line of some length, or else its name."""
    return f"{(str(error).splitlines() or [''])[0] or type(error).__name__:.200}"
