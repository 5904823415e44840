"""Copy-heavy work, 24 prompts of our own: quoting a passage, editing code and printing it whole, reformatting JSON."""

from __future__ import annotations

PASSAGES = [
    "The harbour master keeps two ledgers. The first lists every vessel by name, cargo and draught; the second lists "
    "what was promised and what was delivered. At the end of each month both are read aloud in the customs hall.",
    "To prune a pear tree, begin in late winter. Remove dead wood first, then any branch that crosses another, and "
    "finally shorten the leaders by a third. Make each cut just above a bud that faces away from the trunk.",
    "Article 4. The tenant shall return the keys on the last day of the lease. Article 5. The deposit is repaid within "
    "thirty days, less the cost of damage. Article 6. Disputes are heard by the court of the district.",
    "The observatory opened in 1887 with a single refracting telescope. A second dome was added in 1911, and a library "
    "in 1924. The original lens is still used on public nights, when the line of visitors reaches the lower gate.",
    "Whisk three eggs with a pinch of salt. Melt butter over a low flame until it foams. Pour in the eggs, wait ten "
    "seconds, and draw the edges to the middle with a wooden spoon. Serve while the centre is still soft.",
    "Release 2.3 fixes a crash when the settings file is empty, a leak in the image cache, and a wrong time zone in "
    "exported calendars. Release 2.4 adds keyboard shortcuts, a dark theme and an offline mode for the mobile client.",
    "Glaciers move in two ways. The ice deforms under its own weight, layer sliding on layer, and the whole mass slips "
    "over its bed where meltwater has gathered. In summer the second motion dominates, and the valley groans.",
    "Dear Ms Albrecht, thank you for your order of 14 March. The two oak shelves and the brass lamp left our workshop "
    "this morning and should reach you by Friday. The missing hooks will follow at no cost. Kind regards, J. Moreau.",
]

FUNCTIONS = [
    (
        "def area(width, height):\n    if width < 0 or height < 0:\n        raise ValueError('negative')\n"
        "    return width * height\n\n\ndef perimeter(width, height):\n    return 2 * (width + height)\n",
        "Rename the parameter height to length",
    ),
    (
        "def read_lines(path):\n    lines = []\n    with open(path) as handle:\n        for line in handle:\n"
        "            lines.append(line.strip())\n    return lines\n\n\ndef count_lines(path):\n"
        "    return len(read_lines(path))\n",
        "Add a docstring to the first function",
    ),
    (
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
        "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()\n\n"
        "    def size(self):\n        return len(self.items)\n",
        "Add a method named is_empty",
    ),
    (
        "def celsius(fahrenheit):\n    return (fahrenheit - 32) * 5 / 9\n\n\ndef fahrenheit(celsius):\n"
        "    return celsius * 9 / 5 + 32\n\n\nfor degrees in range(0, 100, 10):\n"
        "    print(degrees, celsius(degrees))\n",
        "Change the step of the loop to 5",
    ),
    (
        "function total(prices) {\n  let sum = 0;\n  for (const price of prices) {\n    sum += price;\n  }\n"
        "  return sum;\n}\n\nfunction average(prices) {\n  return total(prices) / prices.length;\n}\n",
        "Rename prices to values",
    ),
    (
        "SELECT orders.id, orders.placed_at, customers.name, customers.city\nFROM orders\n"
        "JOIN customers ON customers.id = orders.customer_id\nWHERE orders.placed_at > '2024-01-01'\n"
        "ORDER BY orders.placed_at;\n",
        "Sort by customers.name instead",
    ),
    (
        "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] <= right[0]:\n"
        "            result.append(left.pop(0))\n        else:\n            result.append(right.pop(0))\n"
        "    return result + left + right\n",
        "Rename result to merged",
    ),
    (
        "server:\n  host: 0.0.0.0\n  port: 8080\n  workers: 4\n  timeout: 30\nlogging:\n  level: info\n"
        "  file: /var/log/app.log\ndatabase:\n  host: localhost\n  port: 5432\n  name: shop\n",
        "Change the logging level to debug",
    ),
]

RECORDS = [
    '{"name":"Ada Park","age":34,"city":"Lyon","skills":["welding","drafting","survey"],"active":true}',
    '{"order":1042,"items":[{"sku":"A-7","count":3},{"sku":"B-2","count":1}],"total":58.4,"currency":"EUR"}',
    '{"title":"Night Trains","year":1998,"tracks":["Depot","Signals","Dining Car","Border"],"label":"Northside"}',
    '{"station":"Kiruna","readings":[{"t":"06:00","c":-11},{"t":"12:00","c":-4},{"t":"18:00","c":-9}],"unit":"C"}',
    '{"id":"u-88","email":"sam@example.org","roles":["editor","reviewer"],"quota":{"disk":20,"used":7}}',
    '{"recipe":"flat bread","serves":4,"ingredients":["flour","water","salt","oil"],"minutes":{"rest":30,"bake":8}}',
    '{"route":"M4","stops":["Harbour","Museum","Old Town","Market","Hospital"],"first":"05:10","last":"23:40"}',
    '{"version":"2.4.1","changes":["dark theme","shortcuts","offline mode"],"released":"2024-05-02","stable":true}',
]


def copy_prompts() -> list[dict[str, object]]:
    """{"category", "turns"} like the other prompt files."""
    prompts: list[dict[str, object]] = []
    for passage in PASSAGES:
        prompts.append({"category": "quote", "turns": [f"Repeat this text word for word:\n\n{passage}"]})
    for code, change in FUNCTIONS:
        prompts.append(
            {"category": "code edit", "turns": [f"{change} in this code and print all of it:\n\n```\n{code}```"]}
        )
    for record in RECORDS:
        prompts.append({"category": "json", "turns": [f"Print this JSON again, indented by two spaces:\n\n{record}"]})
    return prompts
