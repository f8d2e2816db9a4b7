"""Errors that the command shows in one line, and values as such a line shows them."""


class RecipeError(ValueError):
    """Something in a recipe, or in what it names, that the user can mend; the message names key, value and mend."""


class RunError(RuntimeError):
    """A run ended for a reason outside the recipe, such as a full disk; the message says what is left of it."""


def short(value) -> str:
    """The `repr` of a value, cut to what fits into a line."""
    text = repr(without_nulls(value))
    return text if len(text) <= 100 else f"{text[:97]}..."


def without_nulls(value):
    """A value without the fields that Arrow adds where other rows have them."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value
