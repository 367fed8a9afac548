"""Records become tokens, and what is learnt of them is the right part.

Two tokenizers, made here: one of single bytes, whose tokens can be read, and one of words that
takes pairs as BERT's does.
"""

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from l2l.train.data import PLAIN_TEMPLATE, DataError, Examples, Form, Record, make_examples

CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")


def bytes_tokenizer(*, merges=(), template=CHAT, **special: str) -> PreTrainedTokenizerFast:
    """Every byte is a token, but for the merges and the marks of turns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(one + other for one, other in merges)]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = ByteLevel()
    special = {"eos_token": "</s>", "pad_token": "<pad>", **special}
    found = PreTrainedTokenizerFast(
        tokenizer_object=core,
        additional_special_tokens=list(MARKS),
        **{name: token for name, token in special.items() if token},
    )
    found.chat_template = template
    return found


def words_tokenizer() -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "b", "c", "d", "e", "f"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def records(*values: dict[str, Any]) -> list[Record]:
    return [Record(one, f"data.jsonl, line {line}") for line, one in enumerate(values, 1)]


def make(
    *values: dict[str, Any], tokenizer=None, template=None, like=None, **form: Any
) -> Examples:
    tokenizer = tokenizer or bytes_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return make_examples(records(*values), tokenizer=tokenizer, form=Form(**form), like=like)


def ids_of(examples: Examples, index: int) -> list[int]:
    return examples.ids[examples.offsets[index] : examples.offsets[index + 1]].tolist()


def whole(examples: Examples, index: int = 0, *, tokenizer=None) -> str:
    return (tokenizer or bytes_tokenizer()).decode(ids_of(examples, index))


def learnt(examples: Examples, index: int = 0, *, tokenizer=None) -> str:
    """What is learnt of an example, with `|` where something between is not."""
    tokenizer = tokenizer or bytes_tokenizer()
    flags = examples.answers[examples.offsets[index] : examples.offsets[index + 1]].tolist()
    runs: list[list[int]] = [[]]
    for token, flag in zip(ids_of(examples, index), flags, strict=True):
        if flag:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return "|".join(tokenizer.decode(run) for run in runs if run)


def refusal(*values: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(DataError) as raised:
        make(*values, **settings)
    return str(raised.value)


# --------------------------------------------------------------------------------------------------
# Causal


def test_documents_end_with_the_end_of_text() -> None:
    examples = make({"text": "one"}, {"text": "caf\u00e9"})
    assert whole(examples, 0) == "one</s>"
    assert whole(examples, 1) == "caf\u00e9</s>"
    assert examples.ids.dtype is torch.int32
    assert examples.offsets.tolist() == [0, 4, 10]
    assert examples.answers is None
    assert examples.targets is None


def test_what_ends_with_it_already_gets_no_second_one() -> None:
    assert whole(make({"text": "one</s>"})) == "one</s>"


def test_a_tokenizer_without_end_of_text_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="no end-of-text token"):
        examples = make({"text": "one"}, tokenizer=bytes_tokenizer(eos_token=""))
    assert examples.offsets.tolist() == [0, 3]


def test_special_tokens_of_the_tokenizer_are_kept() -> None:
    tokenizer = bytes_tokenizer(bos_token="<s>")
    core = tokenizer.backend_tokenizer
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert whole(make({"text": "one"}, tokenizer=tokenizer), tokenizer=tokenizer) == "<s>one</s>"


def test_empty_texts_and_single_tokens_are_left_out_and_counted() -> None:
    with pytest.warns(UserWarning, match="no end-of-text token"):
        examples = make(
            {"text": "one"},
            {"text": " \n"},
            {"text": None},
            {"text": "x"},
            tokenizer=bytes_tokenizer(eos_token=""),
        )
    assert (examples.num_records, len(examples)) == (4, 1)
    assert [*examples.left_out.values()] == [2, 1]


def test_what_was_read_is_shown_in_numbers() -> None:
    examples = make({"text": "12345"}, {"text": "123456789"}, {"text": ""}, max_length=6)
    assert [whole(examples, index) for index in (0, 1)] == ["12345</s>", "123456"]
    assert str(examples) == (
        "2 examples of 3 records (columns text); left out: 1 empty\n"
        "12 tokens, 10 of them learnt (83%)\n"
        "the longest has 10 tokens; 1 truncated"
    )


def test_blocks_do_not_show() -> None:
    many = [{"text": str(number)} for number in range(2500)]
    examples = make(*many)
    assert len(examples) == 2500
    assert [whole(examples, index) for index in (0, 999, 1000, 2499)] == [
        "0</s>",
        "999</s>",
        "1000</s>",
        "2499</s>",
    ]


# --------------------------------------------------------------------------------------------------
# Instruct

QUESTION = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "hi", "completion": "hello"}, "hi"),
        ({"question": "hi", "answer": "hello", "id": 3}, "hi"),
        ({"instruction": "hi", "input": "", "output": "hello"}, "hi"),
        ({"instruction": "hi", "output": "hello"}, "hi"),
        ({"instruction": "hi", "input": "there", "output": "hello"}, "hi\n\nthere"),
        ({"messages": [QUESTION, ANSWER], "prompt": "ignored"}, "hi"),
        (
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "hello"},
                ]
            },
            "hi",
        ),
    ],
)
def test_only_the_answer_is_learnt(record, prompt) -> None:
    examples = make(record, task="instruct")
    assert whole(examples) == f"<|user|>{prompt}<|end|>\n<|assistant|>hello<|end|>"
    assert learnt(examples) == "hello<|end|>"
    assert "tokens, 6 of them learnt" in str(examples)


def test_every_answer_of_a_conversation_is_learnt() -> None:
    system = {"role": "system", "content": "be brief"}
    more = [{"role": "user", "content": "bye"}, {"role": "assistant", "content": "ciao"}]
    examples = make(
        {"messages": [system, QUESTION, ANSWER, *more, {"role": "user", "content": "lost"}]},
        task="instruct",
    )
    assert whole(examples) == (
        "<|system|>be brief<|end|>\n<|user|>hi<|end|>\n<|assistant|>hello<|end|>\n"
        "<|user|>bye<|end|>\n<|assistant|>ciao<|end|>"
    )
    assert learnt(examples) == "hello<|end|>|ciao<|end|>"


def test_without_a_chat_template_a_plain_one_is_used() -> None:
    tokenizer = bytes_tokenizer(template=None, bos_token="<s>")
    examples = make({"prompt": "hi", "completion": "hello"}, task="instruct", tokenizer=tokenizer)
    assert whole(examples, tokenizer=tokenizer) == "<s>User: hi\n\nAssistant: hello</s>"
    assert learnt(examples, tokenizer=tokenizer) == " hello</s>"
    tokenizer.chat_template = PLAIN_TEMPLATE  # what the trained model is asked with
    asked = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, tokenize=False)
    assert asked == "<s>User: hi\n\nAssistant:"


def test_a_template_can_be_given_and_the_end_is_added_where_it_writes_none() -> None:
    bare = "{% for message in messages %}{{ message.content }}{% endfor %}"
    examples = make({"prompt": "1+1=", "completion": "2"}, task="instruct", template=bare)
    assert whole(examples) == "1+1=2</s>"
    assert learnt(examples) == "2</s>"


def test_templates_that_rewrite_earlier_answers_make_an_example_for_each() -> None:
    """The last answer is written with an empty thought before it, as some models have it."""
    thinking = (
        "{% for message in messages %}<|{{ message.role }}|>"
        "{% if loop.last and message.role == 'assistant' %}(hm) {% endif %}"
        "{{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    examples = make(
        {"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}, task="instruct", template=thinking
    )
    assert [whole(examples, index) for index in range(len(examples))] == [
        "<|user|>hi<|end|><|assistant|>(hm) hello<|end|>",
        "<|user|>hi<|end|><|assistant|>hello<|end|><|user|>hi<|end|><|assistant|>(hm) hello<|end|>",
    ]
    assert [learnt(examples, index) for index in (0, 1)] == ["(hm) hello<|end|>"] * 2
    assert examples.num_records == 1


def test_templates_that_begin_the_answer_otherwise_are_followed_as_far_as_they_agree() -> None:
    starts = CHAT.replace("<|assistant|>{% endif %}", "<|assistant|>(think){% endif %}")
    examples = make({"prompt": "hi", "completion": "hello"}, task="instruct", template=starts)
    assert learnt(examples) == "hello<|end|>"


def test_templates_that_rewrite_the_question_are_refused() -> None:
    odd = "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}"
    said = refusal({"prompt": "hi", "completion": "hello"}, task="instruct", template=odd)
    assert said.startswith("data.jsonl, line 1: the chat template renders the prompt differently")
    assert "Use another template." in said


def test_what_a_template_refuses_is_named() -> None:
    picky = "{% if messages[0].role == 'system' %}{{ raise_exception('no system!') }}{% endif %}"
    messages = [{"role": "system", "content": "x"}, QUESTION, ANSWER]
    said = refusal({"messages": messages}, task="instruct", template=picky)
    assert said == (
        "data.jsonl, line 1: the chat template refuses the messages (of system, user): no system!"
    )


def test_templates_get_the_same_date_every_day() -> None:
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }} {% endif %}" + CHAT
    examples = make({"prompt": "hi", "completion": "hello"}, task="instruct", template=dated)
    assert whole(examples).startswith("01 Jan 2025 <|user|>")


def test_prompts_are_tokenized_as_they_will_be_in_use() -> None:
    """With one token for `:h`, the whole text has it, and the prompt alone can not."""
    tokenizer = bytes_tokenizer(merges=[(":", "h")])
    bare = "{% for message in messages %}{{ message.content }}{% endfor %}"
    settings = {"task": "instruct", "template": bare, "tokenizer": tokenizer}
    spans = make({"prompt": "hi:", "completion": "hello"}, **settings)
    assert tokenizer.convert_ids_to_tokens(ids_of(spans, 0)) == [*"hi:hello", "</s>"]
    assert learnt(spans, tokenizer=tokenizer) == "hello</s>"
    inside = make({"prompt": "hi", "completion": "a:h"}, **settings)
    assert tokenizer.convert_ids_to_tokens(ids_of(inside, 0)) == [*"hia", ":h", "</s>"]


def test_answers_that_are_empty_or_cut_away_are_left_out_and_counted() -> None:
    examples = make(
        {"prompt": "hi", "completion": "hello"},
        {"prompt": "hi", "completion": " "},
        {"prompt": "a long question", "completion": "never seen"},
        task="instruct",
        max_length=9,
    )
    assert learnt(examples) == "hel"
    assert "left out: 1 empty, 1 with no answer within the maximum length" in str(examples)
    assert str(examples).endswith("the longest has 12 tokens; 1 truncated")
    bare = "{% for message in messages %}{{ message.content }}{% endfor %}"
    first_only = make(
        {"prompt": "", "completion": "x"},
        {"prompt": "", "completion": "xy"},
        task="instruct",
        template=bare,
        tokenizer=bytes_tokenizer(eos_token=""),
    )
    assert "1 with no answer" in str(first_only)
    alone = make({"messages": [ANSWER]}, {"messages": [QUESTION, ANSWER]}, task="instruct")
    assert "left out: 1 empty" in str(alone)


def test_when_nothing_is_left_the_error_says_why() -> None:
    said = refusal({"prompt": "much too long", "completion": "x"}, task="instruct", max_length=4)
    assert said == (
        "none of 1 records is left: 0 empty, 1 with no answer within the maximum length of 4 "
        "(columns prompt, completion)."
    )
    with pytest.raises(DataError, match="there are no records"):
        make()


# --------------------------------------------------------------------------------------------------
# Classification and regression


def test_pairs_go_through_the_tokenizer_together() -> None:
    examples = make(
        {"sentence1": "a b", "sentence2": "c", "label": 1},
        {"sentence1": "d", "sentence2": "e f", "label": 0},
        task="classification",
        tokenizer=words_tokenizer(),
    )
    assert ids_of(examples, 0) == [1, 4, 5, 2, 6, 2]
    assert examples.token_types.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert examples.targets.tolist() == [1, 0]
    assert (examples.num_labels, examples.label_names) == (2, ())
    assert str(examples).startswith(
        "2 examples of 2 records (columns sentence1, sentence2, label)\n12 tokens\n"
    )


def test_long_pairs_lose_tokens_of_the_longer_text_and_keep_the_special_ones() -> None:
    examples = make(
        {"text": "a b c d e", "text_pair": "f", "label": 0},
        {"text": "a", "text_pair": "b", "label": 1},
        task="classification",
        tokenizer=words_tokenizer(),
        max_length=6,
    )
    assert ids_of(examples, 0) == [1, 4, 5, 2, 9, 2]
    assert ids_of(examples, 1) == [1, 4, 2, 5, 2]
    assert str(examples).endswith("the longest has 9 tokens; 1 truncated")


def test_tokenizers_without_token_types_make_none() -> None:
    rows = [{"text": "one", "label": 0}, {"text": "two", "label": 1}]
    assert make(*rows, task="classification").token_types is None
    with pytest.raises(DataError, match="Expected at least two classes"):
        make(rows[0], task="classification")


def test_a_question_about_a_sentence_goes_with_it() -> None:
    rows = [{"question": "a", "sentence": "b", "label": label} for label in (0, 1)]
    examples = make(*rows, task="classification", tokenizer=words_tokenizer())
    assert examples.columns == {"text": "question", "pair": "sentence", "label": "label"}


def test_classes_that_are_texts_are_numbered_in_their_order() -> None:
    values = [{"text": "a", "label": label} for label in ("sad", "glad", "sad", "bad")]
    examples = make(*values, task="classification")
    assert examples.label_names == ("bad", "glad", "sad")
    assert examples.targets.tolist() == [2, 1, 2, 0]
    digits = make(*({"text": "a", "label": x} for x in ("10", "9")), task="classification")
    assert digits.label_names == ("9", "10")


def test_classes_of_training_hold_for_other_data() -> None:
    named = make(*({"text": "a", "label": x} for x in ("no", "yes")), task="classification")
    other = make({"text": "a", "label": "yes"}, task="classification", like=named)
    assert (other.targets.tolist(), other.num_labels) == ([1], 2)
    assert other.label_names == ("no", "yes")
    said = refusal({"text": "a", "label": "yess"}, task="classification", like=named)
    assert said.endswith("not among those of the training data: 'no', 'yes'. Did you mean yes?")
    assert "the label 1 is not among" in refusal(
        {"text": "a", "label": 1}, task="classification", like=named
    )
    numbered = make(*({"text": "a", "label": x} for x in (0, 1, 2)), task="classification")
    other = make({"text": "a", "label": 1}, task="classification", like=numbered)
    assert (other.targets.tolist(), other.num_labels) == ([1], 3)
    assert "the label 3 is not among" in refusal(
        {"text": "a", "label": 3}, task="classification", like=numbered
    )


def test_regression_labels_are_numbers() -> None:
    values = [{"premise": "a", "hypothesis": "b", "score": score} for score in (1, 2.5, "3")]
    examples = make(*values, task="regression")
    assert examples.targets.dtype is torch.float32
    assert examples.targets.tolist() == [1.0, 2.5, 3.0]
    assert examples.num_labels == 1


@pytest.mark.parametrize(
    ("task", "labels", "said"),
    [
        ("classification", [0, -1], "line 2: the label is -1. Expected a class"),
        ("classification", [0, 0.5], "line 2: the label is 0.5. Expected a class"),
        ("classification", [None], "line 1: the label is None. Expected a class"),
        ("classification", [[0, 1]], "line 1: the label is [0, 1]. Expected a class"),
        ("classification", [0, "one"], "line 2: the label is 'one', but the labels before are int"),
        ("classification", [1, 2, 4], "the labels are 1, 2, 4. Expected integers from 0 on"),
        ("regression", [1, "high"], "line 2: the label is 'high'. Expected a finite number"),
        ("regression", [float("nan")], "line 1: the label is nan. Expected a finite number"),
        ("regression", [10**400], "0.... Expected a finite number"),
        ("regression", [True], "line 1: the label is True. Expected a finite number"),
    ],
)
def test_labels_that_are_none_are_refused(task, labels, said) -> None:
    assert said in refusal(*({"text": "a", "label": label} for label in labels), task=task)


# --------------------------------------------------------------------------------------------------
# Columns and settings


def test_columns_can_be_named() -> None:
    row = {"text": "no", "body": "yes"}
    assert whole(make(row, columns={"text": "body"})) == "yes</s>"
    row = {"q": "hi", "output": "hello", "extra": "there"}
    columns = {"prompt": "q", "input": "extra"}
    examples = make(row, task="instruct", columns=columns)
    assert whole(examples) == "<|user|>hi\n\nthere<|end|>\n<|assistant|>hello<|end|>"
    assert examples.columns == {"prompt": "q", "input": "extra", "completion": "output"}
    rows = [{"sentence1": "a", "sentence2": "b", "label": label} for label in (0, 1)]
    columns = {"text": "sentence1"}
    alone = make(*rows, task="classification", columns=columns, tokenizer=words_tokenizer())
    assert ids_of(alone, 0) == [1, 4, 2]


@pytest.mark.parametrize(
    ("row", "form", "said"),
    [
        (
            {"txt": "one", "id": 1},
            {},
            "there is no column for the text. Found 'txt', 'id'; looked for 'text', 'content', "
            "'document'. Say which column it is (text = 'NAME' under [columns] of a TOML file), or "
            "name another task.",
        ),
        ({"prompt": "hi"}, {"task": "instruct"}, "no column for the completion. Found 'prompt'"),
        ({"text": "a"}, {"task": "classification"}, "no column for the label. Found 'text'"),
        (
            {"text": "one"},
            {"columns": {"text": "txt"}},
            "there is no column 'txt'. Found 'text'. Did you mean text?",
        ),
        ({"text": 3}, {}, "column 'text' holds 3 (int). Expected text."),
        (
            {"messages": "hi"},
            {"task": "instruct"},
            "column 'messages' holds 'hi'. Expected a list of messages",
        ),
        (
            {"messages": [{"content": "hi"}]},
            {"task": "instruct"},
            "message 1 has no role; found 'content'.",
        ),
    ],
)
def test_columns_that_are_not_there_are_named_with_those_that_are(row, form, said) -> None:
    assert refusal(row, **form).startswith("data.jsonl, line 1: ")
    assert said in refusal(row, **form)


def test_a_column_that_a_later_record_lacks_is_named_with_its_line() -> None:
    said = refusal({"text": "one"}, {"test": "two"})
    assert said == (
        "data.jsonl, line 2: there is no column 'text'. Found 'test'. Did you mean test?"
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"columns": {"label": "x"}}, "columns name the label, which task 'causal'"),
        (
            {"task": "instruct", "columns": {"messages": "x", "prompt": "y"}},
            "columns name the prompt, which task 'instruct' with messages does not use",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_read(settings, said) -> None:
    with pytest.raises(ValueError, match=r"expected|Expected|none") as raised:
        Form(**settings)
    assert said in str(raised.value)


# --------------------------------------------------------------------------------------------------
# Some of the examples


def test_examples_held_out_are_the_others() -> None:
    examples = make(
        *({"prompt": "ab"[: n % 3], "completion": str(n)} for n in range(20)), task="instruct"
    )
    rest, held = examples.hold_out(5, seed=1)
    found = [
        (whole(one, index), learnt(one, index)) for one in (rest, held) for index in range(len(one))
    ]
    assert sorted(found) == sorted((whole(examples, n), learnt(examples, n)) for n in range(20))
    assert (len(rest), len(held), held.num_records) == (15, 5, 5)
    again = examples.hold_out(5, seed=1)[1]
    assert (
        held.fingerprint() == again.fingerprint() != examples.hold_out(5, seed=2)[1].fingerprint()
    )
    with pytest.raises(ValueError, match="20 of 20 examples cannot be held out"):
        examples.hold_out(20)


def test_taking_examples_takes_all_that_belongs_to_them() -> None:
    rows = [("d", 0), ("a b", 0), ("a", 1)]
    values = [{"sentence1": text, "sentence2": "c", "label": label} for text, label in rows]
    examples = make(*values, task="classification", tokenizer=words_tokenizer())
    taken = examples.take(torch.tensor([2, 1]))
    assert [ids_of(taken, index) for index in (0, 1)] == [[1, 4, 2, 6, 2], [1, 4, 5, 2, 6, 2]]
    assert taken.token_types.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert taken.targets.tolist() == [1, 0]


def test_the_fingerprint_tells_examples_apart() -> None:
    same = [make({"text": "one"}, {"text": "two"}).fingerprint() for _ in range(2)]
    others = [
        make({"text": "one"}, {"text": "twp"}),
        make({"text": "on"}, {"text": "etwo"}),
        make({"prompt": "", "completion": "one"}, task="instruct"),
        make({"prompt": "on", "completion": "e"}, task="instruct"),
    ]
    assert same[0] == same[1]
    assert len({same[0], *(one.fingerprint() for one in others)}) == 5


def test_columns_that_are_not_used_are_told() -> None:
    rows = [{"id": 1, "text": "yes", "score": 2}, {"id": 2, "text": "no", "source": "x"}]
    examples = make(*rows)
    assert examples.unused == ("id", "score", "source")
    assert "(columns text; not used: 'id', 'score', 'source')" in str(examples)
    assert make({"text": "yes"}).unused == ()


TOLD = (
    "{% if tools %}[{{ tools | map(attribute='name') | join(',') }}]{% endif %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_what_the_system_is_told_and_tools_are_used() -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = TOLD
    row = {"system_prompt": "be kind", "prompt": "hi", "completion": "yes", "id": 1}
    told = make(row, {**row, "system_prompt": " "}, task="instruct", tokenizer=tokenizer)
    assert whole(told, 0) == "system:be kind;user:hi;assistant:yes;</s>"
    assert whole(told, 1) == "user:hi;assistant:yes;</s>"
    assert told.unused == ("id",)
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    tools = [{"name": "clock"}, {"name": "map"}]
    for given in (tools, json.dumps(tools)):
        row = {"messages": said, "tools": given, "system": "be kind"}
        expected = "[clock,map]system:be kind;user:hi;assistant:yes;</s>"
        assert whole(make(row, task="instruct", tokenizer=tokenizer)) == expected
    first = {"messages": [{"role": "system", "content": "own"}, *said], "system": "be kind"}
    found = whole(make(first, task="instruct", tokenizer=tokenizer))
    assert found == "system:own;user:hi;assistant:yes;</s>"
    named = make(row, task="instruct", tokenizer=tokenizer, columns={"messages": "messages"})
    assert whole(named) == "user:hi;assistant:yes;</s>", "only what is named too"
    with pytest.raises(DataError, match="the tools are 'clock', which is no JSON"):
        make({**row, "tools": "clock"}, task="instruct", tokenizer=tokenizer)


def test_fewer_classes_than_the_model_has_keep_its_numbers() -> None:
    rows = [{"text": "a", "label": "dog"}, {"text": "b", "label": "cat"}]
    examples = make(*rows, task="classification").numbered_as(["bird", "cat", "dog"])
    assert examples.targets.tolist() == [2, 1]
    assert (examples.num_labels, examples.label_names) == (3, ("bird", "cat", "dog"))
    assert make(*rows, task="classification").numbered_as(["cat", "bird"]).num_labels == 2
