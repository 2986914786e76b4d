"""What constrained answers of the trained checkpoint look like, and what becomes of their neighbours."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from fuzz_answers import run_cases
from schemas import random_case
from trained_answers import TrainedModel

from modelserve.errors import InvalidInput
from modelserve_worker.request import Request
from modelserve_worker.server.errors.errors import ApiError

USER = [{"role": "user", "content": "Say something."}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "string", "maxLength": 4}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
PATTERN = {"regex": "[a-z]{200}"}  # more than any token of ten has


def test_every_finished_answer_validates(model: TrainedModel) -> None:
    """Of all kinds, three each; `fuzz_answers.py` runs a thousand."""
    rng = random.Random(11)
    counts = run_cases(model, [random_case(rng, number) for number in range(27)], max_tokens=80)
    finished = sum(count for (_, how), count in counts.items() if how == "stop")
    assert finished >= 20, counts


def test_unconstrained_neighbours_keep_their_bits(model: TrainedModel) -> None:
    """The same batch twice, but for what two of its requests may say."""
    fields = {"max_tokens": 10, "ignore_eos": True, "logprobs": True, "top_logprobs": 3}

    def run(**constraint):
        free = [
            spec
            for seed, temperature in ((1, 0.0), (2, 1.0), (3, 1.0))
            for spec in model.chat(messages=USER, seed=seed, temperature=temperature, **fields)
        ]
        bound = [spec for seed in (4, 5) for spec in model.chat(messages=USER, seed=seed, **fields, **constraint)]
        replies = model.run(free + bound)
        assert {reply.num_tokens for reply in replies} == {10}
        return [(reply.content, reply.take_logprobs()) for reply in replies]

    with_masks, without = run(structured_outputs=PATTERN), run()
    assert with_masks[:3] == without[:3]
    assert with_masks[3:] != without[3:]
    assert all(content.isalpha() and content.islower() for content, _ in with_masks[3:])


def test_one_request_of_several_kinds(model: TrainedModel) -> None:
    """n, seeds, stop, logit_bias, min_tokens, ignore_eos and max_tokens beside a constraint, in one batch."""
    brace = model.vocabulary.ids["}"]
    ask = {"messages": USER, "max_tokens": 40}
    groups = {
        "three": model.chat(**ask, response_format=FORMAT, n=3, seed=5, temperature=1.0),
        "alone": model.chat(**ask, response_format=FORMAT, n=1, seed=7, temperature=1.0),
        "cut": model.chat(messages=USER, max_tokens=3, response_format=FORMAT),
        "stopped": model.chat(**ask, response_format=FORMAT, stop=['"b"']),
        "biased": model.chat(**ask, response_format=FORMAT, logit_bias={str(brace): 100}),
        "least": model.chat(**ask, structured_outputs={"regex": "[a-z]+"}, min_tokens=6, temperature=0),
        "endless": model.chat(**ask, structured_outputs={"choice": ["yes", "yesterday"]}, ignore_eos=True),
        "forced end": model.chat(**ask, structured_outputs={"choice": ["yes"]}, min_tokens=20, stop_token_ids=[7]),
        "one call": model.chat(
            **ask, tools=[_tool("f"), _tool("g")], tool_choice="required", parallel_tool_calls=False, stop=["call"]
        ),
    }
    replies = iter(model.run([spec for specs in groups.values() for spec in specs]))
    found = {name: [next(replies) for _ in specs] for name, specs in groups.items()}
    for reply in found["three"] + found["alone"] + found["biased"]:
        jsonschema.validate(json.loads(reply.content), SCHEMA)
        assert reply.finish_reason == "stop"
        assert reply.stop_reason is None
    assert found["three"][2].content == found["alone"][0].content, "choice i has seed + i, whatever its neighbours"
    (cut,), (stopped,), (least,) = found["cut"], found["stopped"], found["least"]
    assert (cut.finish_reason, cut.num_tokens) == ("length", 3)
    assert cut.content.startswith("{")
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", '"b"')
    assert least.num_tokens >= 6
    assert found["endless"][0].content == "yesterday", "while another token may follow, the end of the turn may not"
    assert (found["forced end"][0].content, found["forced end"][0].finish_reason) == ("yes", "stop")
    (call,) = found["one call"][0].tool_calls
    assert call.arguments == {}


def _tool(name: str, *, strict: bool = False) -> dict:
    return {"type": "function", "function": {"name": name, "strict": strict}}


def test_a_preempted_answer_goes_on_where_it_was(model: TrainedModel) -> None:
    def answer(*, preempt_at: int | None) -> str:
        (spec,) = model.chat(messages=USER, max_tokens=60, response_format=FORMAT, temperature=0)
        engine, tokens, steps = model.engine, [], 0
        engine.add(spec.request)
        while engine.has_work:
            for output in engine.step():
                tokens += output.token_ids
            steps += 1
            running = list(engine.scheduler._running.by_id.values())
            if steps == preempt_at:
                engine.scheduler._preempt(running[0])
        return b"".join(map(model.vocabulary.bytes_of, tokens)).decode()

    whole = answer(preempt_at=None)
    jsonschema.validate(json.loads(whole), SCHEMA)
    assert answer(preempt_at=12) == whole


def test_an_answer_is_json_or_calls_where_both_are_asked_for(model: TrainedModel) -> None:
    specs = model.chat(
        messages=USER, response_format=FORMAT, tools=[_tool("f")], max_tokens=60, n=3, seed=1, temperature=1.5
    )
    for reply in model.run(specs):
        if not reply.tool_calls:
            jsonschema.validate(json.loads(reply.content), SCHEMA)
        else:
            assert reply.content == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": FORMAT, "structured_outputs": PATTERN}, "exclude each other"),
        ({"tools": [_tool("f")], "tool_choice": "required", "structured_outputs": PATTERN}, "exclude each other"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, '"not"'),
        ({"structured_outputs": {"regex": "("}}, "unclosed group"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(model: TrainedModel, fields, words) -> None:
    with pytest.raises((ApiError, InvalidInput), match=words):
        model.chat(messages=USER, **fields)


def test_a_grammar_that_the_engine_cannot_compile_fails_its_request_alone(model: TrainedModel) -> None:
    (good,) = model.chat(messages=USER, max_tokens=3, structured_outputs=PATTERN)
    bad = Request("bad", good.request.prompt_token_ids, good.request.sampling, grammar="start: missing")
    model.engine.add(bad)
    model.engine.add(good.request)
    ends, tokens = {}, []
    while model.engine.has_work:
        for output in model.engine.step():
            tokens += output.token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = (output.finish_reason, output.error)
    assert ends["bad"][0] == "error"
    assert "missing" in ends["bad"][1]
    assert ends[good.request.request_id] == ("length", None)
    assert len(tokens) == 3


def test_an_aborted_request_whose_grammar_is_not_ready_never_runs(model: TrainedModel) -> None:
    (spec,) = model.chat(messages=USER, max_tokens=3, structured_outputs={"regex": "[a-f]{3}x"})
    model.engine.add(spec.request)
    output = model.engine.abort(spec.request.request_id)
    assert output is not None
    assert output.finish_reason == "abort"
    assert not model.engine.has_work
