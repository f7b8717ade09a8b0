"""What users can get wrong, as exceptions. Each message is one line: what was asked, what was found, what would work.

    ValueError
    └── InputError            the model, an option or a file that was given cannot be used
        └── OverLimitError    a plan exists, but none that was tried keeps within the memory limit
"""

from __future__ import annotations


class InputError(ValueError):
    """Bad input: reported as one line starting `error:`, exit status 2."""


class OverLimitError(InputError):
    """No stages fit the memory limit."""
