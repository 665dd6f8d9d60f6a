"""Import of SWE-agent trajectories: every format, every fault, and the real files where they are at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ConfigError
from testbed.workload.shipped import lengths_document, load_shipped
from testbed.workload.sweagent import load_trajectories, parse_trajectory
from testbed.workload.tokens import group_ids, tokenize
from testbed.workload.trajectory import Trajectory, Turn, shrink

REAL = next(
    (p / "shared/data/swe_agent" for p in Path(__file__).resolve().parents if (p / "shared/data/swe_agent").is_dir()),
    None,
)
needs_real = pytest.mark.skipif(REAL is None, reason="no shared/data/swe_agent folder beside the checkout")

SYSTEM = {"role": "system", "content": "You are an autonomous programmer, working in the command line." * 8}
TASK = {"role": "user", "content": "Fix the rounding of TimeDelta."}
ANSWER = {"role": "assistant", "content": "Let us look.\n```\nls -a\n```", "thought": "Let us look.", "action": "ls -a"}
SEEN = {"role": "user", "content": "setup.py src tests"}


def write(folder: Path, document: Any, name: str = "a.traj") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def only(path: Path) -> Trajectory:
    (trajectory,) = load_trajectories(path)
    return trajectory


def lengths(trajectory: Trajectory) -> list[tuple[int, int]]:
    return [(t.append_tokens, t.generate_tokens) for t in trajectory.turns]


def size(*messages: dict[str, Any]) -> int:
    return sum(1 + len(tokenize(m["content"])) for m in messages)


def test_plain_history(tmp_path: Path) -> None:
    got = only(write(tmp_path, {"history": [SYSTEM, TASK, ANSWER, SEEN, ANSWER], "trajectory": []}))
    said = len(tokenize(ANSWER["content"]))
    assert got.name == "a"
    assert lengths(got) == [(size(SYSTEM, TASK), said), (size(SEEN), said)]


def test_content_as_parts_equals_content_as_text(tmp_path: Path) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": TASK["content"]}]}
    a = only(write(tmp_path, {"history": [SYSTEM, TASK, ANSWER]}))
    b = only(write(tmp_path, {"history": [SYSTEM, parts, ANSWER]}))
    assert a.turns == b.turns
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}, "text"]}
    assert len(only(write(tmp_path, {"history": [SYSTEM, image, ANSWER]})).turns) == 1


def test_tool_calls_are_generated_text_and_tool_results_are_appended(tmp_path: Path) -> None:
    call = {"function": {"name": "create", "arguments": '{"filename": "x.py"}'}, "id": "1", "type": "function"}
    spoken = {**ANSWER, "tool_calls": [call]}
    silent = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "created", "tool_call_ids": ["1"]}
    got = only(write(tmp_path, {"history": [SYSTEM, TASK, spoken, result, silent, result]}))
    called = len(tokenize('create{"filename": "x.py"}'))
    assert got.turns[1].append_tokens == size(result)
    assert got.turns[1].generate_tokens == called
    assert got.turns[0].generate_tokens > called


def test_thought_and_action_stand_in_for_missing_content(tmp_path: Path) -> None:
    bare = {"role": "assistant", "thought": "Hm. ", "action": "ls"}
    assert only(write(tmp_path, {"history": [TASK, bare]})).turns[0].generate_tokens == len(tokenize("Hm. ls"))


def test_demonstrations_belong_to_the_prompt(tmp_path: Path) -> None:
    demo = [{**ANSWER, "is_demo": True}, {**SEEN, "is_demo": True}]
    got = only(write(tmp_path, {"history": [SYSTEM, *demo, TASK, ANSWER]}))
    assert lengths(got) == [(size(SYSTEM, ANSWER, SEEN, TASK), len(tokenize(ANSWER["content"])))]


def test_responses_in_a_row_are_one_turn_and_the_tail_is_dropped(tmp_path: Path) -> None:
    got = only(write(tmp_path, {"history": [TASK, ANSWER, ANSWER, SEEN]}))
    assert lengths(got) == [(size(TASK), 2 * len(tokenize(ANSWER["content"])))]


def test_steps_without_a_history(tmp_path: Path) -> None:
    steps = [
        {"query": [SYSTEM, TASK], "response": ANSWER["content"], "observation": "setup.py"},
        {"response": "", "thought": "Done. ", "action": "submit", "observation": ""},
    ]
    got = only(write(tmp_path, {"trajectory": steps}))
    assert lengths(got) == [
        (size(SYSTEM, TASK), len(tokenize(ANSWER["content"]))),
        (1 + len(tokenize("setup.py")), len(tokenize("Done. submit"))),
    ]


def test_a_folder_is_read_in_order_with_subfolders(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("b.traj", "a.traj", "run/c.traj", "notes.txt"):
        write(tmp_path, {"history": [TASK, ANSWER]}, name)
    assert [t.name for t in load_trajectories(tmp_path)] == ["a", "b", "run/c"]


def test_equal_system_prompts_give_equal_leading_ids(tmp_path: Path) -> None:
    other = {"role": "user", "content": "Another task altogether."}
    a = only(write(tmp_path, {"history": [SYSTEM, TASK, ANSWER]}, "a.traj"))
    b = only(write(tmp_path, {"history": [SYSTEM, other, ANSWER]}, "b.traj"))
    ids_a, ids_b = a.turns[0].append_ids, b.turns[0].append_ids
    assert ids_a and ids_b
    shared = size(SYSTEM) + 1
    assert ids_a[:shared] == ids_b[:shared] and ids_a != ids_b
    short_a, short_b = shrink(a, 8).turns[0].append_ids, shrink(b, 8).turns[0].append_ids
    assert short_a and short_b and short_a[: shared // 8] == short_b[: shared // 8]
    first, second = lengths_document([a, b])["trajectories"]
    assert first["shared_prefix_tokens"] == second["shared_prefix_tokens"] == shared
    assert first["shared_prefix"] == second["shared_prefix"] == "a"


HISTORY = json.dumps({"history": [SYSTEM, TASK, ANSWER]})
BAD: dict[str, tuple[Any, str]] = {
    "empty": ("", "the file is empty"),
    "blank": (" \n", "the file is empty"),
    "truncated": (HISTORY[:-20], "truncated JSON"),
    "truncated_key": (HISTORY[:-2], "truncated JSON"),
    "no_json": ("role: user", "is not JSON"),
    "deep": ("[" * 100_000, "JSON"),
    "a_list": ([1], "holds a list"),
    "number": ("3", "holds a number"),
    "neither": ({"info": {}}, "neither a history nor a trajectory"),
    "history_type": ({"history": "x"}, "history is a text, not a list"),
    "no_turns": ({"history": []}, "no turns"),
    "no_answer": ({"history": [SYSTEM, TASK]}, "no turns"),
    "starts_with_answer": ({"history": [ANSWER]}, "turn 1 starts with a response"),
    "message_type": ({"history": [SYSTEM, TASK, ANSWER, 7]}, "turn 1: a message is a number"),
    "role": ({"history": [TASK, ANSWER, {"role": "robot", "content": ""}]}, "turn 2: a message has the role 'robot'"),
    "role_type": ({"history": [{"role": ["user"], "content": ""}]}, "turn 1: a message has the role"),
    "content_type": ({"history": [TASK, ANSWER, {"role": "user", "content": 3}]}, "turn 2: content is a number"),
    "part": ({"history": [{"role": "user", "content": [{"text": 3}]}]}, "turn 1: a part of the content"),
    "silence": ({"history": [TASK, ANSWER, SEEN, {"role": "assistant", "content": ""}]}, "turn 2 has no generated"),
    "call": ({"history": [TASK, {**ANSWER, "tool_calls": [{}]}]}, "turn 1: a tool call has no function name"),
    "calls": ({"history": [TASK, {**ANSWER, "tool_calls": {}}]}, "turn 1: tool_calls is an object"),
    "thought": ({"history": [TASK, {"role": "assistant", "thought": 1}]}, "turn 1: thought is a number"),
    "no_query": ({"trajectory": [{"response": "x"}]}, "turn 1: neither a history nor a query"),
    "query": ({"trajectory": [{"query": [None], "response": "x"}]}, "turn 1: a message of the query is null"),
    "step": ({"trajectory": [{"query": [TASK], "response": "x"}, True]}, "turn 2: a step is a truth value"),
    "silent_step": ({"trajectory": [{"query": [TASK]}]}, "turn 1 has no generated text"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_every_fault_names_the_file_and_the_turn(case: str, tmp_path: Path) -> None:
    document, sentence = BAD[case]
    path = write(tmp_path, document, f"{case}.traj")
    with pytest.raises(ConfigError) as caught:
        load_trajectories(path)
    assert str(caught.value).startswith(f"{path}: ") and sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trajectories(tmp_path / "missing.traj")
    with pytest.raises(ConfigError, match=r"no \.traj file"):
        load_trajectories(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trajectories(Path("a\0b"))
    (tmp_path / "latin.traj").write_bytes(b'{"history": "\xe9"}')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_trajectories(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["history", "trajectory", "role", "content", "query", "response", "text", "tool_calls"]),
        inner,
        max_size=4,
    ),
    max_leaves=20,
)


@given(document=st.dictionaries(st.sampled_from(["history", "trajectory"]), st.lists(JSON, max_size=5)) | JSON)
@settings(max_examples=60)
def test_no_document_makes_a_traceback(document: Any) -> None:
    try:
        parse_trajectory(json.dumps(document), name="x", source="x.traj")
    except ConfigError as error:
        assert str(error).startswith("x.traj: ")


@given(text=st.text(), more=st.text())
def test_tokens_of_a_prefix_are_a_prefix_but_for_the_last(text: str, more: str) -> None:
    ids = tokenize(text)
    assert tokenize(text + more)[: max(len(ids) - 1, 0)] == ids[:-1]
    assert len(ids) <= len(text) and (not text or ids)


def test_pieces_are_bounded() -> None:
    assert len(tokenize("a" * 70)) == 10 and len(tokenize("1" * 30)) == 10
    assert len(tokenize("\n" * 80)) == 10 and len(tokenize("é" * 30)) == 10


def test_sharing_groups_are_chains_and_short_starts_do_not_count() -> None:
    def known(name: str, *ids: int) -> Trajectory:
        return Trajectory(name=name, turns=(Turn(append_tokens=len(ids), generate_tokens=1, append_ids=ids),))

    long, short, few = range(300), range(80), range(20)
    entries = lengths_document(
        [known("a", *few, 7777), known("b", *long, 1), known("c", *short, 8888), known("d", *long, 2, 3), known("e", 9)]
    )["trajectories"]
    assert [e["shared_prefix"] for e in entries] == ["", "b", "b", "b", ""]
    assert [e["shared_prefix_tokens"] for e in entries] == [0, 300, 80, 300, 0]


@given(
    a=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=60),
    tail=st.lists(st.integers(0, 2**32 - 1), max_size=20),
    k=st.integers(1, 9),
)
def test_grouping_keeps_equal_prefixes_equal(a: list[int], tail: list[int], k: int) -> None:
    whole = len(a) // k
    assert group_ids(a, k, whole) == group_ids([*a, *tail], k, whole)


@needs_real
def test_the_real_files_give_the_shipped_lengths() -> None:
    assert REAL is not None
    real = load_trajectories(REAL)
    assert len(real) == 9
    assert [t.name for t in real] == [t.name for t in load_shipped()]
    assert [lengths(t) for t in real] == [lengths(t) for t in load_shipped()]
    document = lengths_document(real)["trajectories"]
    for entry, shipped in zip(document, load_shipped(), strict=True):
        assert (entry["shared_prefix"], entry["shared_prefix_tokens"]) == (
            shipped.shared_prefix,
            shipped.shared_prefix_tokens,
        )


@needs_real
def test_real_text_takes_three_to_four_characters_per_token() -> None:
    assert REAL is not None
    texts = [m["content"] for f in sorted(REAL.glob("*.traj")) for m in json.loads(f.read_text())["history"]]
    assert 3.0 <= sum(map(len, texts)) / sum(len(tokenize(t)) for t in texts) <= 4.5
