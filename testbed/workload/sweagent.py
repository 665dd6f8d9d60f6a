"""Import of SWE-agent trajectories (``.traj``): the only place that reads them.

Formats met in the wild, all accepted:

* ``history``: messages with ``role`` (system, user, assistant, tool) and ``content``, a string or a list of parts
  (``{"type": "text", "text": ...}``); assistants may carry ``thought``, ``action``, ``tool_calls``; messages marked
  ``is_demo`` belong to the prompt whatever their role;
* without ``history``: ``trajectory`` steps with ``response`` and ``observation``, the first with its ``query``.

A turn appends every message since the last response and generates the response (its text and tool calls). Responses
in a row are one turn; messages after the last response are dropped, for nothing was generated from them.

Any fault of a file is a ``ConfigError`` with file and turn (1-based).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.errors import ConfigError
from testbed.workload.tokens import tokenize
from testbed.workload.trajectory import Trajectory, Turn

SUFFIX = ".traj"
_PROMPT_ROLES = ("system", "user", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """One message of a conversation, checked: ``generated`` tells responses from what joins the prompt."""

    role: str
    text: str
    generated: bool

    def ids(self) -> tuple[int, ...]:
        """Ids with a leading one for the role, so that even an empty observation is a token."""
        return (*tokenize_role(self.role), *tokenize(self.text))


def tokenize_role(role: str) -> tuple[int]:
    """The single id that opens a message."""
    return (tokenize("<" + role[:1] + ">")[0] ^ 0x5A5A5A5A,)


def load_trajectories(path: Path) -> list[Trajectory]:
    """Read one ``.traj`` file, or all of a folder and its subfolders in the order of their names.

    Raises:
        ConfigError: nothing there, or a file that is not a trajectory; the sentence names the file and the turn.
    """
    if path.is_dir():
        files = sorted(path.rglob(f"*{SUFFIX}"))
        if not files:
            raise ConfigError(f"{path}: no {SUFFIX} file in this folder.")
        return [_load(file, file.relative_to(path).with_suffix("").as_posix()) for file in files]
    return [_load(path, path.stem)]


def _load(file: Path, name: str) -> Trajectory:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text (byte {error.start}).") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    return parse_trajectory(text, name=name, source=str(file))


def parse_trajectory(text: str, *, name: str, source: str) -> Trajectory:
    """Make a trajectory of the JSON text of a ``.traj``; ``source`` opens every complaint.

    Raises:
        ConfigError: not JSON, truncated, empty, of the wrong shape, or a turn without generated text.
    """
    if not text.strip():
        raise ConfigError(f"{source}: the file is empty.")
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        truncated = error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated")
        what = "is truncated JSON" if truncated else "is not JSON"
        raise ConfigError(f"{source}: {what} (line {error.lineno}: {error.msg}).") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{source}: is not JSON that can be read ({error}).") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: holds {_kind(document)}, but a trajectory is an object with a history.")
    turns = tuple(_turns(_messages(document, source), source))
    if not turns:
        raise ConfigError(f"{source}: has no turns (no assistant message).")
    return Trajectory(name=name, turns=turns)


def _turns(messages: Iterator[_Message], source: str) -> Iterator[Turn]:
    append: list[int] = []
    generated = 0
    number = 1
    for message in messages:
        if message.generated:
            count = len(tokenize(message.text))
            if not append and not generated:
                raise ConfigError(f"{source}: turn 1 starts with a response, so its prompt is unknown.")
            if count == 0:
                raise ConfigError(f"{source}: turn {number} has no generated text.")
            generated += count
            continue
        if generated:
            yield Turn(append_tokens=len(append), generate_tokens=generated, append_ids=tuple(append))
            append, generated, number = [], 0, number + 1
        append.extend(message.ids())
    if generated:
        yield Turn(append_tokens=len(append), generate_tokens=generated, append_ids=tuple(append))


def _messages(document: dict[str, Any], source: str) -> Iterator[_Message]:
    """Messages of a document in order, whichever format it has."""
    if "history" in document:
        yield from _history(_list(document["history"], "history", source), source)
    elif "trajectory" in document:
        yield from _steps(_list(document["trajectory"], "trajectory", source), source)
    else:
        raise ConfigError(f"{source}: has neither a history nor a trajectory, so it is not a SWE-agent trajectory.")


def _history(history: list[Any], source: str) -> Iterator[_Message]:
    turn = 1
    answered = False
    for item in history:
        where = f"{source}: turn {turn}"
        if not isinstance(item, dict):
            raise ConfigError(f"{where}: a message is {_kind(item)}, not an object.")
        generated = item.get("role") == "assistant" and not item.get("is_demo", False)
        if answered and not generated:
            turn += 1
            where = f"{source}: turn {turn}"
        answered = generated
        yield _message(item, generated, where)


def _message(item: dict[str, Any], generated: bool, where: str) -> _Message:
    role = item.get("role")
    if role != "assistant" and role not in _PROMPT_ROLES:
        raise ConfigError(f"{where}: a message has the role {role!r}; known are assistant, {', '.join(_PROMPT_ROLES)}.")
    text = _content(item.get("content"), where)
    if role == "assistant":
        if not text:
            text = _string(item, "thought", where) + _string(item, "action", where)
        text += _tool_calls(item.get("tool_calls"), where)
    return _Message(role=role, text=text, generated=generated)


def _steps(steps: list[Any], source: str) -> Iterator[_Message]:
    for number, step in enumerate(steps, start=1):
        where = f"{source}: turn {number}"
        if not isinstance(step, dict):
            raise ConfigError(f"{where}: a step is {_kind(step)}, not an object.")
        if number == 1:
            if not step.get("query"):
                raise ConfigError(f"{where}: neither a history nor a query, so the first prompt is unknown.")
            for item in _list(step["query"], "query", where):
                if not isinstance(item, dict):
                    raise ConfigError(f"{where}: a message of the query is {_kind(item)}, not an object.")
                yield _message(item, False, where)
        response = _string(step, "response", where)
        if not response:
            response = _string(step, "thought", where) + _string(step, "action", where)
        yield _Message(role="assistant", text=response + _tool_calls(step.get("tool_calls"), where), generated=True)
        yield _Message(role="tool", text=_string(step, "observation", where), generated=False)


def _content(content: Any, where: str) -> str:
    """Text of a content field: None, a string, or a list of parts (parts that are not text count as their type)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"{where}: content is {_kind(content)}, not a text or a list of parts.")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            texts.append(f"<{part['type']}>")
        else:
            raise ConfigError(f"{where}: a part of the content is neither a text nor an object with a type.")
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> str:
    if calls is None:
        return ""
    texts = []
    for call in _list(calls, "tool_calls", where):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(f"{where}: a tool call has no function name.")
        arguments = function.get("arguments", "")
        texts.append(function["name"] + (arguments if isinstance(arguments, str) else json.dumps(arguments)))
    return "".join(texts)


def _string(item: dict[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key} is {_kind(value)}, not a text.")
    return value


def _list(value: Any, key: str, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {key} is {_kind(value)}, not a list.")
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")
