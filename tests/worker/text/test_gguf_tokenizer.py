"""The tokenizer of a GGUF file gives the ids that the tokenizer.json gives from which the file was made."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_files import text_metadata
from gguf_writer import gguf_bytes
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from word_tokenizer import SPACE

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve_tools.tiny.tokenizer_files import FIRST_BYTE_ID, SPECIAL_TOKENS, write_tokenizer
from modelserve_worker.grammar.compiler import GrammarCompiler
from modelserve_worker.text.checkpoint_text import load_checkpoint_text, read_tokenizer_json

WORDS = [
    "the", "cat", "sat", "on", "a", "mat", "and", "said", "hello", "world", "how", "are", "you", "today", "my",
    "friend", "def", "return", "import", "class", "self",
]  # fmt: skip
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"
TAB_ID = FIRST_BYTE_ID + 9
TEXTS = [
    "",
    " ",
    "hello world",
    "  two  spaces   three ",
    "line\nline\n\nparagraph\n\n\n\n\n\nfar\r\n",
    "\ttab\t\ttabs\t\t\t",
    "emoji \U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "bytes \x00\x01\x7f \u0378 \U0010ffff \ufdd0 \xa0",
    "<bos><|turn>user\nhello<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
    '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|><|tool_response><tool_response|>',
    "<0x41><0x0A> <unused7> <unk> <pad> < |turn>",
    SPACE + SPACE + "a" + SPACE,
    "def f(x):\n\treturn x\n" * 3,
    "\u0627\u0644\u0633 \u4f60\u597d \u3053\u3093\u306b \u0928\u092e\u0938\u094d\u0924\u0947 e\u0301",
]


def write_gemma_tokenizer(directory: Path) -> None:
    """BPE with byte fallback as transformers' GemmaTokenizer has it, of a few words. A tab is token <0x09>, too.

    Vocabulary and merges are written here: the library would call that token now one, now the other.
    """
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", SPACE)
    rng = random.Random(3)
    corpus = [" ".join(rng.choices(WORDS, k=12)) for _ in range(200)]
    corpus += ["\n\n\n\n \t\t \U0001f642\U0001f642 \u4f60\u597d"] * 40
    trained.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=700, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    fixed = SPECIAL_TOKENS | {FIRST_BYTE_ID + byte: f"<0x{byte:02X}>" for byte in range(256)}
    pieces = iter(sorted(set(learnt["vocab"]) - {"\t"}, key=lambda piece: learnt["vocab"][piece]))
    vocabulary = {fixed.get(i) or next(pieces, f"<unused{i}>"): i for i in range(1200)}
    vocabulary = {"\t": TAB_ID, **vocabulary}  # before <0x09>, which so is the text that the converter finds
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], fuse_unk=True, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 2)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS.values()])
    write_tokenizer(directory, chat_template=TEMPLATE, tokenizer=tokenizer)
    document = json.loads((directory / "tokenizer.json").read_text())
    document["model"] |= {"vocab": vocabulary, "merges": learnt["merges"]}
    (directory / "tokenizer.json").write_text(json.dumps(document))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    write_gemma_tokenizer(directory)
    return directory


@pytest.fixture
def made(original: Path, tmp_path: Path) -> Callable[..., Path]:
    def make(**changed: Any) -> Path:
        metadata = {"general.architecture": "gemma4", **text_metadata(original)} | changed
        kept = {key: value for key, value in metadata.items() if value is not None}
        (tmp_path / "m.gguf").write_bytes(gguf_bytes(kept, {}))
        return tmp_path

    return make


def _random_texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    pieces = [
        *WORDS,
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\U0001f642",
        "\u00e9",
        "<|turn>",
        "<",
        "0x41",
        SPACE,
        "\u4f60\u597d",
        "\x80",
    ]
    return ["".join(rng.choices(pieces, k=rng.randint(1, 20))) for _ in range(300)]


def test_ids_are_those_of_tokenizer_json(original: Path, made: Callable[..., Path]) -> None:
    theirs, ours = load_checkpoint_text(original), load_checkpoint_text(made())
    for text in [*TEXTS, *_random_texts(45)]:
        for added in (True, False):
            expected = theirs.tokenizer.encode(text, add_special_tokens=added).ids
            assert ours.tokenizer.encode(text, add_special_tokens=added).ids == expected, text
        assert ours.tokenizer.decode(expected) == theirs.tokenizer.decode(expected)
    assert ours.tokenizer.encode("\t\t", add_special_tokens=False).ids != [TAB_ID, TAB_ID], "tabs were merged"


def test_the_vocabulary_and_the_template_are_the_same(original: Path, made: Callable[..., Path]) -> None:
    theirs, ours = load_checkpoint_text(original), load_checkpoint_text(made())
    assert ours.vocabulary == theirs.vocabulary
    messages = [{"role": "user", "content": "hello"}]
    assert ours.chat_template is not None
    assert theirs.chat_template is not None
    assert (
        ours.chat_template.render(messages)
        == theirs.chat_template.render(messages)
        == "<bos><|turn>user\nhello<turn|>\n"
    )
    both = [text.encoder.encode("a <turn|> b", add_special_tokens=True, most_tokens=99) for text in (ours, theirs)]
    assert both[0] == both[1]


def test_grammars_are_compiled_for_it(made: Callable[..., Path]) -> None:
    text = read_tokenizer_json(made())
    assert text is not None
    compiler = GrammarCompiler(text, vocab_size=1200, eos_token_ids=[1, 106])
    assert compiler.compile('start: "hello"').result() is not None


def test_sampling_defaults_come_from_the_file(made: Callable[..., Path]) -> None:
    stated = {"general.sampling.temp": 0.5, "general.sampling.top_k": 64, "general.sampling.top_p": 0.25}
    defaults = load_checkpoint_text(made(**stated)).defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p) == (0.5, 64, 0.25, 0.0)


def test_what_a_user_added_is_no_special_token(original: Path, made: Callable[..., Path]) -> None:
    types = text_metadata(original)["tokenizer.ggml.token_type"]
    tokens = text_metadata(original)["tokenizer.ggml.tokens"]
    added = tokens.index("hello") if "hello" in tokens else len(tokens) - 1
    types[added] = 4
    vocabulary = load_checkpoint_text(made(**{"tokenizer.ggml.token_type": types})).vocabulary
    assert added not in vocabulary.special_ids
    assert {46, 100, 105} <= vocabulary.special_ids


def test_a_text_of_two_tokens_becomes_the_later_and_is_said_by_both(original: Path, made: Callable[..., Path]) -> None:
    tokens, later = text_metadata(original)["tokenizer.ggml.tokens"], 1199
    assert tokens[later].startswith("<unused")
    earlier, *rest = load_checkpoint_text(original).tokenizer.encode("hello", add_special_tokens=False).ids
    tokens[later] = tokens[earlier]
    text = load_checkpoint_text(made(**{"tokenizer.ggml.tokens": tokens}))
    assert text.tokenizer.encode("hello", add_special_tokens=False).ids == [later, *rest]
    assert text.vocabulary.token_bytes[earlier] == text.vocabulary.token_bytes[later] == tokens[earlier].encode()


def test_a_tokenizer_json_in_the_file_is_taken_as_it_is(original: Path, made: Callable[..., Path]) -> None:
    whole = (original / "tokenizer.json").read_text()
    directory = made(**{"tokenizer.huggingface.json": whole, "tokenizer.ggml.model": "t5"})
    assert read_tokenizer_json(directory) == whole


BROKEN: dict[str, tuple[Any, str]] = {
    "tokenizer.ggml.model": ("llama", "tokenizer.ggml.model is 'llama'; 'gemma4' is served"),
    "tokenizer.ggml.tokens": (None, "has no array tokenizer.ggml.tokens"),
    "tokenizer.ggml.token_type": ([1, 1], "1200 tokens have 2 types"),
    "tokenizer.ggml.merges": (["alone"], "the merge 'alone' has no two parts"),
    "tokenizer.ggml.bos_token_id": (9999, "bos_token is 9999, which is no token"),
}


@pytest.mark.parametrize("key", BROKEN)
def test_a_broken_vocabulary_is_named(key: str, made: Callable[..., Path]) -> None:
    given, message = BROKEN[key]
    with pytest.raises((InvalidInput, UnsupportedModel), match=message):
        load_checkpoint_text(made(**{key: given}))


@pytest.mark.parametrize(
    ("rows", "merges", "message"),
    [
        (1199, None, r"1200 tokens with \d+ merges, but 'token_embd\.weight' has 1199 rows"),
        (1200, ["a b"] * 9601, "9601 merges"),
    ],
)
def test_a_vocabulary_of_another_model_or_without_end_is_refused(
    rows: int, merges: list[str] | None, message: str, original: Path, tmp_path: Path
) -> None:
    metadata = {"general.architecture": "gemma4", **text_metadata(original)}
    metadata |= {} if merges is None else {"tokenizer.ggml.merges": merges}
    embedding = {"token_embd.weight": ("F32", (rows, 1), bytes(4 * rows))}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata, embedding))
    with pytest.raises(InvalidInput, match=message):
        load_checkpoint_text(tmp_path)


def test_merges_of_no_tokens_are_refused(made: Callable[..., Path]) -> None:
    with pytest.raises(InvalidInput, match=r"tokenizer\.json: .*zz"):
        load_checkpoint_text(made(**{"tokenizer.ggml.merges": ["zz zz"]}))


def test_a_template_beside_the_file_is_used_in_place_of_its_own(made: Callable[..., Path], original: Path) -> None:
    directory = made()
    shutil.copy(original / "chat_template.jinja", directory)
    (directory / "chat_template.jinja").write_text("mine")
    template = load_checkpoint_text(directory).chat_template
    assert template is not None
    assert template.source == "mine"
