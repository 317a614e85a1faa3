"""Arguments of a script that hold a password or a key: a manifest is a file that many may read."""

from __future__ import annotations

import re
from collections.abc import Sequence

# "--tokens" and "--pad-token" are words of a language model, "--token" and "--hf-token" are not
NAMES = re.compile(
    r"(.*[-_])?(password|passwd|secret|credentials|(api|access|private|secret)[-_]?key)"
    r"|((hf|api|auth|access|bearer)[-_])?token",
    re.IGNORECASE,
)
URL = re.compile(r"://[^/@\s]*:[^/@\s]*@")  # scheme://user:password@host


def refuse_credentials(arguments: Sequence[str]) -> None:
    """Returns if no argument looks like a secret.

    Raises:
        ValueError: one does; the message does not repeat it.
    """
    for argument in arguments:
        flag = argument.partition("=")[0]
        named = flag.startswith("-") and NAMES.fullmatch(flag.lstrip("-"))
        if named or URL.search(argument):
            what = flag if named else "a URL with a password"
            raise ValueError(
                f"{what}: expected no secret among the script's arguments, as everybody who reads "
                "the manifest reads them; give it to the script by a file or a variable"
            )
