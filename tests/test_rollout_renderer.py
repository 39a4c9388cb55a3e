"""Chat template -> ids: append-only extension, forks, the start-up check."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import (
    ALTERNATING,
    BRACKETS,
    CHATML,
    EOS,
    MERGE_TOOLS,
    PLAIN,
    STRIP_THINKING,
    ByteTokenizer,
    MergeTokenizer,
    user,
)
from slipstream.rollout import Renderer, TemplateError


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def tool(text: str) -> dict[str, str]:
    return {"role": "tool", "content": text}


def extend(renderer: Renderer, action: str, news: list[dict[str, str]], **kwargs: Any) -> tuple[Any, list[int]]:
    prompt = [user("q")]
    rendered = renderer.render_prompt(prompt)
    row = [*rendered.ids, *renderer.encode(action), EOS]
    glue = renderer.extend(
        row, rendered.text, action, closed=True, messages=[*prompt, assistant(action), *news], **kwargs
    )
    return glue, row


@pytest.mark.parametrize("template", [CHATML, MERGE_TOOLS])
def test_two_adjacent_tool_messages_are_rendered_as_the_template_renders_them_whole(template: str) -> None:
    tokenizer = ByteTokenizer(template)
    glue, row = extend(Renderer(tokenizer), "call", [tool("a"), tool("b")])
    whole = tokenizer.encode(
        tokenizer.apply_chat_template([user("q"), assistant("call"), tool("a"), tool("b")], add_generation_prompt=True)
    )
    assert glue.fork_point is None
    assert [*row, *glue.observation] == whole
    if template == MERGE_TOOLS:
        assert tokenizer.decode(glue.observation).count("<|im_start|>user") == 1


def test_glue_starts_with_the_boundary_that_the_template_puts_behind_eos() -> None:
    renderer = Renderer(ByteTokenizer())
    assert renderer.end_of_turn == (EOS,)
    assert renderer.boundary == (10,)
    glue, _ = extend(renderer, "a", [user("b")])
    assert glue.observation[0] == 10


def test_a_trimmed_action_is_not_a_rewrite() -> None:
    tokenizer = ByteTokenizer(MERGE_TOOLS)  # trims contents
    glue, row = extend(Renderer(tokenizer), "  padded \n", [user("b")])
    assert glue.fork_point is None
    assert tokenizer.decode([*row, *glue.observation]).endswith(
        "  padded \n<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_other_eos_of_the_model_closes_a_turn_too() -> None:
    renderer = Renderer(ByteTokenizer(), eos_token_ids=(258,))
    assert renderer.closed([104, 258])
    assert renderer.closed([104, EOS])
    assert not renderer.closed([104])
    assert not renderer.closed([])


def test_rewritten_text_forks_even_when_it_begins_like_the_sampled_text() -> None:
    tokenizer = ByteTokenizer()
    renderer = Renderer(tokenizer)
    prompt = [user("q")]
    rendered = renderer.render_prompt(prompt)
    row = [*rendered.ids, *b"long answer", EOS]
    messages = [*prompt, assistant("long answer, edited"), user("b")]
    glue = renderer.extend(row, rendered.text, "long answer, edited", closed=True, messages=messages, rewritten=True)
    assert glue.fork_point == len(rendered.ids) + len(b"long answer")
    assert tokenizer.decode([*row[: glue.fork_point], *glue.observation]) == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True
    )


def test_history_changed_by_the_environment_forks() -> None:
    tokenizer = ByteTokenizer()
    renderer = Renderer(tokenizer)
    rendered = renderer.render_prompt([user("q"), user("scratch")])
    row = [*rendered.ids, *b"a", EOS]
    glue = renderer.extend(row, rendered.text, "a", closed=True, messages=[user("q"), assistant("a"), user("b")])
    assert glue.fork_point is not None
    assert glue.text == tokenizer.apply_chat_template(
        [user("q"), assistant("a"), user("b")], add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("template", "tool_messages", "strips"),
    [(CHATML, True, False), (MERGE_TOOLS, True, False), (STRIP_THINKING, True, True), (ALTERNATING, None, False)],
)
def test_check_measures_what_a_template_does(template: str, tool_messages: bool | None, strips: bool) -> None:
    report = Renderer(ByteTokenizer(template)).check()
    assert report.append_only
    assert report.tool_messages is tool_messages
    assert report.strips_thinking is strips
    assert report.end_of_turn == (EOS,)


@pytest.mark.parametrize(
    ("template", "end_of_turn", "action", "text"),
    [
        (BRACKETS, (EOS,), " a", "[INST] q[/INST] a<|im_end|>[INST] b[/INST]"),
        (BRACKETS, (EOS,), "a", "[INST] q[/INST]a<|im_end|>[INST] b[/INST]"),
        (PLAIN, (), "a", "user: q\nassistant: a<|im_end|>\nuser: b\nassistant: "),
    ],
)
def test_templates_of_other_families_stay_append_only(
    template: str, end_of_turn: tuple[int, ...], action: str, text: str
) -> None:
    tokenizer = ByteTokenizer(template)
    renderer = Renderer(tokenizer)
    assert renderer.end_of_turn == end_of_turn
    glue, row = extend(renderer, action, [user("b")])
    assert glue.fork_point is None
    assert tokenizer.decode([*row, *glue.observation]) == text


def test_check_finds_a_template_that_is_not_append_only() -> None:
    counting = CHATML.replace("{% for m in messages %}", "{{ messages | length }}{% for m in messages %}", 1)
    assert not Renderer(ByteTokenizer(counting)).check().append_only


def test_template_errors_name_the_roles_and_the_complaint() -> None:
    renderer = Renderer(ByteTokenizer(ALTERNATING))
    with pytest.raises(TemplateError, match=r"'user', 'user'.*must alternate"):
        renderer.render_prompt([user("a"), user("b")])


def test_own_template_and_kwargs_reach_the_tokenizer() -> None:
    class Recording(ByteTokenizer):
        seen: dict[str, Any]

        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> str:
            self.seen = {k: v for k, v in kwargs.items() if k not in ("tokenize", "add_generation_prompt")}
            return super().apply_chat_template(
                conversation, add_generation_prompt=kwargs.get("add_generation_prompt", False)
            )

    tokenizer = Recording()
    renderer = Renderer(tokenizer, {"enable_thinking": False}, chat_template="mine")
    renderer.render_prompt([user("q")], tools=[{"name": "t"}])
    assert tokenizer.seen == {"enable_thinking": False, "chat_template": "mine", "tools": [{"name": "t"}]}


def test_prompt_length_is_the_length_that_a_rollout_sends() -> None:
    renderer = Renderer(MergeTokenizer())
    assert renderer.prompt_length([user("ab ab")]) == len(renderer.render_prompt([user("ab ab")]).ids)


def test_real_tokenizer_is_append_only_and_never_merges_over_a_turn(tiny_dir: Any) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_dir)
    renderer = Renderer(tokenizer)
    report = renderer.check()
    assert report.append_only
    assert report.tool_messages
    assert report.end_of_turn == (tokenizer.eos_token_id,)
    assert report.boundary == tuple(tokenizer.encode("\n", add_special_tokens=False))
    rendered = renderer.render_prompt([user("q")])
    split = [*tokenizer.encode("t", add_special_tokens=False), *tokenizer.encode("h", add_special_tokens=False)]
    assert tokenizer.encode("th", add_special_tokens=False) != split  # the case that a re-encoding gets wrong
    row = [*rendered.ids, *split, tokenizer.eos_token_id]
    glue = renderer.extend(row, rendered.text, "th", closed=True, messages=[user("q"), assistant("th"), user("next")])
    assert glue.fork_point is None
    assert tokenizer.decode(glue.observation) == "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"
