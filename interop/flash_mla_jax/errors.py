"""The two ways in which a call ends without a result."""


class InputError(ValueError):
    """The call is wrong: one sentence with what was expected, what came, and what to do."""


class UnavailableError(NotImplementedError):
    """The call is right, but this machine cannot run it: one sentence with the reason."""
