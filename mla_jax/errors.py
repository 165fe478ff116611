"""The one exception that means "what you passed in is wrong"."""


class InputError(ValueError):
    """A caller's or user's input is wrong; the message is one sentence: expected, found, what to do.

    Commands print it and exit with code 2. It is a ValueError, so library callers need not know this class.
    """
