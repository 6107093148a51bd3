"""A reward for the training step of `make test-dynamo`."""

from __future__ import annotations


def even_tokens(prompt: str, completion: str, answer: str) -> float:
    """The share of words with an even number: a random model has both kinds."""
    words = completion.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))
