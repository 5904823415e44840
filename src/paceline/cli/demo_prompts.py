"""What the demo asks: a chat answer, where little can be guessed, and two tasks that say again what they were given."""

from __future__ import annotations

CHAT = "Give me three tips for staying focused while working from home."

CODE = """Remove the line that prints from this function and repeat the rest of it word for word.

```python
def read_settings(path):
    settings = {}
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, value = line.split("=", 1)
            settings[key.strip()] = value.strip()
    print("settings read:", len(settings))
    return settings
```"""

QUOTE = """Repeat the following paragraph word for word.

A paceline is a group of cyclists who ride closely behind one another. The rider in front breaks the wind, and \
everyone behind saves a good part of the effort. After a minute or two the leader pulls to the side, drifts to \
the back and rests, and the next rider takes over. Nobody goes faster than they could have gone alone for a \
moment, yet the whole group arrives sooner than any of them would have by themselves."""

PROMPTS = {"chat": CHAT, "code": CODE, "quote": QUOTE}
