"""How much a step drafts."""

from dataclasses import dataclass

from mla_jax.config import MLAConfig, check_integer
from mla_jax.errors import InputError

MAX_NODES = 64  # far beyond what pays: every node costs the model a token


@dataclass(frozen=True)
class Speculation:
    """Size of the draft of a step; hashable, so it can be a static argument.

    Attributes:
        steps: N, times that the multi-token-prediction module runs; the deepest draft is so many tokens ahead.
        topk: K, tokens that each node of the draft branches into; 1 is a chain.
        draft_tokens: J, nodes that the model verifies, the pending token (the root) among them. N + 1 for a chain.
    """

    steps: int
    topk: int
    draft_tokens: int

    def __post_init__(self) -> None:
        for name in ("steps", "topk", "draft_tokens"):
            check_integer(f"Speculation.{name}", getattr(self, name), 2 if name == "draft_tokens" else 1)
            if getattr(self, name) > MAX_NODES:
                raise InputError(f"Speculation.{name} must be at most {MAX_NODES}, got {getattr(self, name)}.")
        if self.topk == 1 and self.draft_tokens != self.steps + 1:
            raise InputError(
                f"A draft chain (topk 1) of {self.steps} steps has draft_tokens {self.steps + 1}, its root among "
                f"them; got {self.draft_tokens}."
            )
        if self.draft_tokens > 1 + self.num_candidates:
            raise InputError(
                f"A draft tree of {self.steps} steps and topk {self.topk} has at most {1 + self.num_candidates} nodes, "
                f"its root among them; got draft_tokens {self.draft_tokens}."
            )

    @classmethod
    def chain(cls, steps: int) -> "Speculation":
        """A chain of so many drafted tokens."""
        return cls(steps, 1, steps + 1 if isinstance(steps, int) else steps)

    @property
    def is_chain(self) -> bool:
        """True if no node has two children."""
        return self.topk == 1

    @property
    def num_candidates(self) -> int:
        """Tokens that drafting proposes, of which the best draft_tokens − 1 are verified."""
        return self.topk + (self.steps - 1) * self.topk**2

    @property
    def most_kept(self) -> int:
        """A, the most tokens that a step can commit: a path of the tree, and the model's own next token."""
        return min(self.steps, self.draft_tokens - 1) + 1

    def check_model(self, config: MLAConfig) -> None:
        """Raises ValueError unless a model can draft so."""
        if config.num_mtp_layers < 1:
            raise InputError(
                "The model has no multi-token-prediction module (num_nextn_predict_layers is 0) to draft with."
            )
        if self.topk > config.vocab_size:
            raise InputError(f"Speculation.topk must be at most the vocabulary, {config.vocab_size}, got {self.topk}.")
