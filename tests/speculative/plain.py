"""Trees of tokens in plain Python: lists and loops, one request at a time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A candidate: where it hangs, and the log-probability of its path."""

    path: tuple[int, ...]  # tokens from the root's child to itself
    log_prob: float
    index: int  # among all candidates, in the order in which they were found


def propose(language, steps: int, topk: int) -> list[Node]:
    """All candidates of a draft; language(path) → [(token, log-probability)] of the topk best, best first."""
    found: list[Node] = []
    frontier = [Node((), 0.0, -1)]
    for _ in range(steps):
        children = []
        for node in frontier:
            for token, log_prob in language(node.path)[:topk]:
                children.append(Node((*node.path, token), node.log_prob + log_prob, len(found) + len(children)))
        found += children
        frontier = sorted(children, key=lambda n: -n.log_prob)[:topk]
    return found


def choose(found: list[Node], count: int) -> list[Node]:
    """The best by the probability of their path, earlier ones first among equals."""
    return sorted(found, key=lambda n: (-n.log_prob, n.index))[:count]


def walk(paths: list[tuple[int, ...]], choices: list[int], room: int) -> tuple[list[int], list[int]]:
    """The accepted nodes and the new tokens. paths[j] is the path of node j, choices[j] the model's token behind it."""
    at, nodes, tokens = (), [0], []
    while True:
        token = choices[nodes[-1]]
        tokens.append(token)
        at = (*at, token)
        if at not in paths[:room]:
            return nodes, tokens
        nodes.append(paths.index(at))
