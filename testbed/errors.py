"""Errors, split by whose fault they are. Every error a user can see is a ``TestbedError`` with one clear sentence.

The command line maps them to exit codes (docs/contract.md): 1 failed, 2 bad input or host. INVALID runs are no error.
"""

from __future__ import annotations


class TestbedError(Exception):
    """Base of all errors of the project; ``str(error)`` is one sentence naming the thing and the way out."""

    __test__ = False  # pytest: not a test class
    exit_code = 1


class BugError(TestbedError):
    """We are to blame: a machine was asked for something its transition table forbids."""


class PeerError(TestbedError):
    """The other side is to blame: a malformed frame, another layout, a stale epoch, not the block that was named."""


class ConfigError(TestbedError):
    """The user's input is to blame: an unknown key, an impossible topology, a file that is not a trajectory."""

    exit_code = 2


class HostError(TestbedError):
    """The environment is to blame: no user namespaces, a missing qdisc, a full disk, a busy port."""

    exit_code = 2


class UnsupportedError(HostError):
    """The kernel lacks something that is not needed otherwise: an experiment goes on without that variant."""


class RunFailedError(TestbedError):
    """The run itself failed: a role died, a token was wrong, a request ended with an error nobody injected."""
