"""What others said behind the same tokens is known to who asks for the same, and to nobody of another namespace."""

from __future__ import annotations

from random import Random

import pytest

from modelserve_worker.scheduling.prefix.known_texts import KnownTexts
from modelserve_worker.scheduling.prefix.token_chain import TokenChain

PAGE = 4


def chain(tokens: list[int], namespace: str = "") -> TokenChain:
    return TokenChain(namespace, tokens, PAGE)


def text(seed: int, length: int) -> list[int]:
    return [1 + 1000 * seed + at for at in range(length)]


@pytest.mark.parametrize("length", [1, 3, 4, 9, 400])
def test_the_same_prompt_is_followed_by_its_latest_answer(length: int) -> None:
    texts, prompt = KnownTexts(PAGE), text(1, length)
    for seed in (2, 3):
        texts.remember(chain(prompt + text(seed, 30)), length)
    texts.remember(chain(text(9, length) + text(4, 30)), length)
    assert texts.following(chain(prompt), length).tolist() == text(3, 30)
    assert len(texts.following(chain(prompt, "other"), length)) == 0
    assert len(texts.following(chain(text(7, length)), length)) == 0


@pytest.mark.parametrize("differs", [1, 5, 30])
def test_a_prompt_whose_end_was_edited_is_followed_by_what_the_earlier_one_went_on_with(differs: int) -> None:
    """From where they part: what is looked up in it has to be found there."""
    texts, prompt = KnownTexts(PAGE), text(1, 40)
    texts.remember(chain(prompt + text(2, 30)), 40)
    edited = prompt[:-differs] + text(3, differs + 7)
    assert texts.following(chain(edited), len(edited)).tolist() == prompt[-differs:] + text(2, 30)
    far = prompt[:2] + text(3, 50)
    assert len(texts.following(chain(far), len(far))) == 0, "not a page in common"


def test_a_prompt_that_has_all_of_an_earlier_text_is_followed_by_nothing_of_it() -> None:
    texts, prompt = KnownTexts(PAGE), text(1, 10)
    texts.remember(chain(prompt + text(2, 30)), 10)
    longer = prompt + text(2, 30) + text(3, 5)
    assert len(texts.following(chain(longer), len(longer))) == 0


def test_what_is_known_is_bounded_and_the_oldest_goes() -> None:
    texts = KnownTexts(PAGE, 4000)
    for seed in range(1, 30):
        texts.remember(chain(text(seed, 20) + text(seed + 500, 80)), 20)
        for _ in range(3):  # the same again takes the place of what it said before
            texts.remember(chain(text(1000, 20) + text(1001, 60)), 20)
    known = [seed for seed in range(1, 30) if len(texts.following(chain(text(seed, 20)), 20))]
    assert known == list(range(30 - len(known), 30))
    assert 4 <= len(known) < 20
    assert texts.following(chain(text(1000, 20)), 20).tolist() == text(1001, 60)
    assert texts.num_tokens <= 4000
    texts.remember(chain(text(1, 20) + text(2, 5000)), 20)
    assert texts.num_tokens <= 4000, "an answer longer than all that is kept"


def test_of_random_texts_what_follows_did_follow() -> None:
    random, found = Random(3), 0
    texts, said = KnownTexts(PAGE), list[tuple[str, list[int]]]()
    for _ in range(600):
        base = random.choice([whole for _, whole in said[-6:]] or [[]])
        prompt = base[: random.randint(0, len(base))] + [random.randint(1, 2) for _ in range(random.randint(1, 9))]
        namespace = random.choice(["a", "b"])
        following = texts.following(chain(prompt, namespace), len(prompt)).tolist()
        if following:
            found += 1
            shared = [
                same for of, whole in said if of == namespace
                for same in [next((i for i, (x, y) in enumerate(zip(whole, prompt, strict=False)) if x != y),
                                  min(len(whole), len(prompt)))]
                if same >= PAGE or same == len(prompt)
                if whole[same : same + len(following)] == following
            ]  # fmt: skip
            assert shared, "somebody of the same namespace went on so"
        whole = prompt + [random.randint(1, 2) for _ in range(random.randint(1, 12))]
        texts.remember(chain(whole, namespace), len(prompt))
        said.append((namespace, whole))
    assert found > 200
