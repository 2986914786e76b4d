"""Facts of the real world that the exercises ask for."""

from __future__ import annotations

CAPITALS: dict[str, str] = {
    "Albania": "Tirana", "Algeria": "Algiers", "Angola": "Luanda", "Armenia": "Yerevan", "Austria": "Vienna",
    "Belgium": "Brussels", "Bulgaria": "Sofia", "Canada": "Ottawa", "China": "Beijing", "Colombia": "Bogota",
    "Croatia": "Zagreb", "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo", "Estonia": "Tallinn",
    "Finland": "Helsinki", "France": "Paris", "Georgia": "Tbilisi", "Germany": "Berlin", "Ghana": "Accra",
    "Greece": "Athens", "Hungary": "Budapest", "Iceland": "Reykjavik", "Iran": "Tehran", "Iraq": "Baghdad",
    "Ireland": "Dublin", "Italy": "Rome", "Japan": "Tokyo", "Jordan": "Amman", "Kenya": "Nairobi", "Latvia": "Riga",
    "Lebanon": "Beirut", "Libya": "Tripoli", "Mongolia": "Ulaanbaatar", "Morocco": "Rabat", "Nepal": "Kathmandu",
    "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon", "Romania": "Bucharest",
    "Senegal": "Dakar", "Serbia": "Belgrade", "Spain": "Madrid", "Sweden": "Stockholm", "Thailand": "Bangkok",
    "Tunisia": "Tunis", "Uruguay": "Montevideo",
}  # fmt: skip
"""Country to capital."""
COUNTRIES = tuple(CAPITALS)
CITIES = tuple(CAPITALS.values())

UNITS: tuple[tuple[str, str, int], ...] = (
    ("seconds", "a minute", 60), ("seconds", "an hour", 3600), ("minutes", "an hour", 60), ("hours", "a day", 24),
    ("hours", "a week", 168), ("days", "a week", 7), ("months", "a year", 12), ("years", "a decade", 10),
    ("years", "a century", 100), ("decades", "a century", 10), ("years", "a millennium", 1000),
    ("grams", "a kilogram", 1000), ("kilograms", "a ton", 1000), ("meters", "a kilometer", 1000),
    ("centimeters", "a meter", 100), ("millimeters", "a centimeter", 10), ("milliliters", "a liter", 1000),
    ("inches", "a foot", 12), ("feet", "a yard", 3), ("ounces", "a pound", 16), ("cents", "a dollar", 100),
    ("bits", "a byte", 8), ("degrees", "a rotation", 360), ("cards", "a deck", 52), ("eggs", "a dozen", 12),
)  # fmt: skip
"""How many of the first are in the second. The ton is the metric one, the deck has no jokers."""
