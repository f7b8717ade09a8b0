"""What users can get wrong, as exceptions. Each message is one line: what was asked, what was found, what would work.

    ValueError
    └── InputError     the model, an option or a file that was given cannot be used
"""

from __future__ import annotations


class InputError(ValueError):
    """Bad input: reported as one line starting `error:`, exit status 2."""
