"""The call that makes an embedding, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import Any


def check_call(
    init: Callable[..., None], first: Any, misplaced: Sequence[Any], unknown: Iterable[str]
) -> None:
    """Refuses several arguments by position, as torch's embeddings have them, and keywords that
    there are not.

    Args:
        init: the constructor, whose keywords are those that there are.
        first: the argument by position.
        misplaced: further ones.
        unknown: the keywords that there are not.

    Raises:
        TypeError: there are any.
    """
    known = [
        name for name, each in signature(init).parameters.items() if each.kind == each.KEYWORD_ONLY
    ]
    if misplaced:
        raise TypeError(
            "DistributedEmbedding: expected embedding_dim as the only argument by position, got "
            f"{1 + len(misplaced)}: write DistributedEmbedding({misplaced[0]!r}, "
            f"num_embeddings={first!r})"
        )
    for keyword in unknown:
        close = get_close_matches(keyword, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(map(repr, known))}"
        raise TypeError(f"DistributedEmbedding: unexpected keyword {keyword!r}: {hint}")
