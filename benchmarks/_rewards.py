"""Rewards that differ between the completions of a random model, for recipes.py."""


def share_of_vowels(completions, **columns):
    """The share of each completion's characters that are vowels; 0 if it is empty."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [sum(map(text.lower().count, "aeiou")) / max(1, len(text)) for text in texts]
