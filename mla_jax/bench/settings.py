"""Settings of the Hopper kernel as text: `register_tiles=5,request_overhead=4`, fields of its `KernelConfig`."""

import dataclasses
import json
from typing import Any

from mla_jax.errors import InputError


def parse_settings(text: str, config: Any) -> Any:
    """CONFIG, a dataclass, with the fields that TEXT names changed. Raises ValueError for what it has no field for."""
    known = {field.name for field in dataclasses.fields(config)}
    changes = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known:
            raise InputError(f"{name!r} is no setting of the kernel; choose from {', '.join(sorted(known))}.")
        try:
            changes[name] = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            raise InputError(f"{part!r} gives no value for {name}; write register_tiles=5.") from None
        if type(changes[name]) is not int:
            raise InputError(f"{part!r}: {name} is a whole number.")
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as e:
        raise InputError(f"The kernel cannot have {text}: {e}.") from None
