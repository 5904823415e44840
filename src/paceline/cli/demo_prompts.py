"""What the demo asks: a chat answer, where little can be guessed, and two tasks that say again what they were given."""

from __future__ import annotations

CHAT = "Give me three tips for staying focused while working from home."

CODE = '''Rename the variable `total` to `result` in this function. Reply with the whole function and nothing else.

```python
def average_price(items, discount=0.0):
    """Average price of the items that are in stock, after the discount."""
    total = 0.0
    count = 0
    for item in items:
        if item["in_stock"]:
            total += item["price"] * (1.0 - discount)
            count += 1
    if count == 0:
        return None
    return total / count
```'''

QUOTE = """Repeat the following paragraph word for word.

A paceline is a group of cyclists who ride closely behind one another. The rider in front breaks the wind, and \
everyone behind saves a good part of the effort. After a minute or two the leader pulls to the side, drifts to \
the back and rests, and the next rider takes over. Nobody goes faster than they could have gone alone for a \
moment, yet the whole group arrives sooner than any of them would have by themselves."""

PROMPTS = {"chat": CHAT, "code": CODE, "quote": QUOTE}
