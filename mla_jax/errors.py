"""The one exception that means "what you passed in is wrong"."""


class InputError(ValueError):
    """A caller's or user's input is wrong; the message is one sentence: expected, found, what to do.

    Commands print it and exit with code 2. It is a ValueError, so library callers need not know this class.
    """


def described(found: object) -> str:
    """What was found in an array's place: dtype and shape, or the type of what is no array."""
    dtype, shape = getattr(found, "dtype", None), getattr(found, "shape", None)
    return type(found).__name__ if dtype is None or shape is None else f"{getattr(dtype, 'name', dtype)} {shape}"
