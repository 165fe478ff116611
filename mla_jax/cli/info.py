"""`python -m mla_jax info`: versions, devices, and what can run here."""

import argparse
import json
import platform
from typing import Any

import jax

from mla_jax.attention.api import IMPLEMENTATIONS
from mla_jax.cache.formats import FORMATS
from mla_jax.cli.common import installed_versions, table

PACKAGES = (
    "mla-jax",
    "jax",
    "jaxlib",
    "numpy",
    "safetensors",
    "jax-cuda13-plugin",
    "torch",
    "sgl-flash-mla",
    "tokenizers",
    "transformers",
)


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("info", help="what can run here")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line of stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    reasons = {name: i.cannot_run() for name, i in IMPLEMENTATIONS.items()}
    packages = installed_versions(PACKAGES)
    report = {
        "python": platform.python_version(),
        "packages": packages,
        "devices": [f"{d.platform}: {d.device_kind}" for d in jax.devices()],
        "implementations": {name: {"runs": reason is None, "reason": reason} for name, reason in reasons.items()},
        "default_implementation": next(name for name, reason in reasons.items() if reason is None),
        "kv_formats": list(FORMATS),
    }
    if args.json:
        print(json.dumps(report))
        return
    versions = {name: version or "not installed" for name, version in packages.items()}
    print("Versions\n" + table({"python": platform.python_version(), **versions}))
    print("\nDevices\n" + "\n".join(f"  {d.platform}: {d.device_kind}" for d in jax.devices()))
    print(
        "\nImplementations of mla_decode, fastest first\n"
        + table({name: "runs here" if reason is None else f"cannot run: {reason}" for name, reason in reasons.items()})
    )
    print("\nCache formats\n  " + ", ".join(FORMATS))
