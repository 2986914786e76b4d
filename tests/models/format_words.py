"""Words that exercises are said in, beside those that they are made of (`modelserve_tools.evaluation.words`)."""

from __future__ import annotations


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PHRASE_WORDS: tuple[str, ...] = _listed(
    """
    A Complete Every Gemma How I JSON The What a age alarm am an and are at before bits byte can capital cards
    centimeter centimeters cents century city color count country day days decade decades deck degrees do dollar
    dozen eggs favorite feet foot for friend from go grams has have help home hour hours in inches is it item
    kilogram kilograms kilometer know light like liter live lives make many me meet message meter meters
    millennium milliliters millimeters minute minutes months much must my name near no not numbers of off on one
    order ounces person pound price remember rotation seconds sent set small style sum test text that the these
    this time to ton tool wake was weather week welcome where which who will with word words yard year years you z
    """
)
"""What else the texts say after a space."""

LEADING_WORDS: tuple[str, ...] = _listed(
    """
    Add Answer Are Call Complete Copy Do Gemma Give Good Hello Hi How I Make My Name Nice Notes Order Put Repeat
    Say Send Set Sort Subtract Take Tell Thank Thanks The Turn Wake Welcome What Where Which Who Write You Your
    """
)
"""Words that begin a text, so that no space stands before them."""

FIELD_WORDS: tuple[str, ...] = _listed(
    """
    a add_numbers age b city color count done failed false get_price get_time get_weather hour item minute name off
    on send_message set_alarm set_light text true word
    """
)
"""Names of JSON fields, tools and parameters, and tools' results: quoted, with no space before."""
