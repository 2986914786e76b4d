"""The incremental search finds what a naive search over the whole text finds, for every way of cutting the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from modelserve_worker.text.stop_strings import StopStringFilter

TEXT = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def _naive(text: str, stops: list[str], *, include_stop: bool) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


@given(text=TEXT, stops=STOPS, include_stop=st.booleans(), data=st.data())
def test_stop_search_equals_naive_search(text: str, stops: list[str], include_stop: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    stream = StopStringFilter(stops, include_stop=include_stop)
    out = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        out += stream.push(text[start:end])
        if stream.matched is not None:
            break
    else:
        out += stream.flush()
    assert (out, stream.matched) == _naive(text, stops, include_stop=include_stop)


@given(text=TEXT, stops=STOPS)
def test_only_a_possible_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    stream = StopStringFilter(stops)
    out = ""
    for position, letter in enumerate(text):
        out += stream.push(letter)
        if stream.matched is not None:
            return
        held = text[len(out) : position + 1]
        assert not held or any(stop.startswith(held) for stop in stops)
