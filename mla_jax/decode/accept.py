"""How many tokens a model commits per step when it drafts: the accept length on a text."""

from collections.abc import Sequence
from dataclasses import dataclass

from mla_jax.config import MLAConfig
from mla_jax.decode.generate import Settings, generate
from mla_jax.decode.sampling import Sampling
from mla_jax.errors import InputError
from mla_jax.model.params import ModelParams
from mla_jax.speculative.config import Speculation

PROMPTS, PROMPT_LEN, NEW = 64, 64, 128  # prompts, tokens of each, and new tokens of each
SLOTS = 16  # prompts that decode together; what a request commits does not depend on it


@dataclass(frozen=True)
class AcceptLength:
    """`mean` tokens committed per step of a sequence; `histogram`: how often it was how many."""

    mean: float
    histogram: dict[int, int]


def accept_length(
    params: ModelParams,
    config: MLAConfig,
    tokens: Sequence[int],
    speculation: Speculation,
    *,
    temperature: float = 0.0,
    kv_format: str = "bf16",
    fp8_queries: bool = False,
    implementation: str | Sequence[str] | None = None,
    seed: int = 0,
    num_prompts: int = PROMPTS,
    new_tokens: int = NEW,
) -> AcceptLength:
    """Continues prompts of 64 tokens, cut evenly from a text, with drafts.

    The last step of each sequence counts what its limit of new tokens leaves of it.

    Args:
        tokens: token ids of the text, at least num_prompts · 64.
        speculation: how much a step drafts.
        temperature: 0 is greedy; above it chains are verified by rejection sampling, trees by target-only sampling.
        kv_format, fp8_queries, implementation: of the cache and of `mla_decode`, as in `Settings`.
        seed: of the random keys.
        num_prompts, new_tokens: how many, and how long each continuation.

    Raises:
        ValueError: the text is too short, the model cannot draft so, or FP8 queries with another cache than fp8_e4m3.
    """
    if len(tokens) < num_prompts * PROMPT_LEN:
        raise InputError(
            f"The text has {len(tokens)} tokens; an accept length needs {num_prompts} prompts of {PROMPT_LEN}, so at "
            f"least {num_prompts * PROMPT_LEN}."
        )
    starts = range(0, num_prompts * (len(tokens) // num_prompts), len(tokens) // num_prompts)
    settings = Settings(
        max_new_tokens=new_tokens,
        sampling=Sampling.create(temperature),
        seed=seed,
        kv_format=kv_format,
        fp8_queries=fp8_queries,
        num_slots=min(SLOTS, num_prompts),
        implementation=implementation,
        speculation=speculation,
    )
    result = generate(params, config, [list(tokens[s : s + PROMPT_LEN]) for s in starts], settings)
    return AcceptLength(result.accept_length, dict(sorted(result.accept_histogram.items())))
