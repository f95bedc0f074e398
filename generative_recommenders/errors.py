"""The one error type whose message is meant for the person at the terminal."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: the message names the thing, the value and the fix, in one line.

    Command-line entry points print it as ``error: <message>`` and exit with status 2, without a traceback.
    """
