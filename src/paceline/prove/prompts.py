"""What `prove` asks a model: tasks that copy, so that drafts are accepted, and open ones, so that some are not."""

from __future__ import annotations

PROMPTS: tuple[str, ...] = (
    "Repeat this text word for word, twice:\nThe grey heron stood in the shallow water of the mill pond and waited. "
    "The grey heron stood in the shallow water until a small fish came by.",
    "Continue the list in the same form.\nitem 1: apple, price 3\nitem 2: apple, price 4\nitem 3: apple, price 5\n"
    "item 4: apple, price 6\nitem 5:",
    "Write this function again with the name `total` instead of `sum_all`:\n\ndef sum_all(values):\n    result = 0\n"
    "    for value in values:\n        result = result + value\n    return result\n",
    "Why is the sky blue? Answer in three sentences.",
    "Turn this into JSON with one object per line:\nname: Ada, city: London\nname: Emmy, city: Erlangen\n"
    '{"name": "Ada", "city": "London"}\n',
    "Quote the first sentence of this note exactly, then quote it again.\nThe ferry leaves at nine from the old pier. "
    "Bring a coat, since the wind is cold on the water.",
    "Tell a very short story about a lighthouse keeper who collects clocks.",
    "Count from 1 to 30, separated by commas: 1, 2, 3, 4, 5, 6, 7, 8,",
    "Name the planets in order of their distance from the sun, then name them again in the opposite order.",
    "Say the alphabet with one letter per line, then say it again.",
    "Explain to a child what a bicycle gear does.",
    "Copy this table and add a row for March.\n| month | rain | sun |\n|---|---|---|\n| January | 80 mm | 40 h |\n"
    "| February | 70 mm | 60 h |\n",
)
