"""Chat templates that take for ever or all memory: by loops, doubling, widths, filters, and as they compile."""

from __future__ import annotations

BIG = "1000000000000"
GROW = "{% set ns = namespace(x=START) %}{% for i in range(99999) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x END }}"


def _grown(start: str, step: str, end: str = "") -> str:
    return GROW.replace("START", start).replace("STEP", step).replace("END", end)


def _often(text: str) -> str:
    return f"{{% for i in range(99999) %}}{text}{{% endfor %}}"


NESTED = "{{% for a in range(99999) %}}{{% for b in range(99999) %}}{0}{{% endfor %}}{{% endfor %}}"
HOSTILE_TEMPLATES: dict[str, str] = {
    "nested ranges": NESTED.format(""),
    "nested ranges with text": NESTED.format("{{ 'a' * 10000 }}"),
    "ranges by a macro": "{% macro m() %}{% for a in range(99999) %}{% endfor %}{% endmacro %}"
    "{% for b in range(99999) %}{{ m() }}{% endfor %}",
    "calls that double": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a recursive loop": "{% for a in [messages] recursive %}{{ loop([a, a]) }}{{ loop([a, a]) }}{% endfor %}",
    "a power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "a power of a power": "{{ ((((9 ** 64) ** 64) ** 64) ** 64) ** 64 }}",
    "a product": "{{ 'a' * 10 ** 12 }}",
    "a product of lists": "{{ [1] * 10 ** 12 }}",
    "text that doubles by ~": _grown("'aaaa'", "ns.x ~ ns.x"),
    "text that doubles by +": _grown("'aaaa'", "ns.x + ns.x"),
    "text that doubles by a format": _grown("'aaaa'", "'%s%s' % (ns.x, ns.x)"),
    "text that doubles by join": _grown("'aaaa'", "[ns.x, ns.x] | join"),
    "text that doubles by replace": _grown("'aaaa'", "ns.x.replace('a', 'aa')"),
    "text that doubles by the filter replace": _grown("'aaaa'", "ns.x | replace('a', 'aa')"),
    "text that doubles by the method format": _grown("'aaaa'", "'{0}{0}'.format(ns.x)"),
    "text that doubles by a block": "{% set ns = namespace(x='aaaa') %}{% for i in range(9999) %}{% set y %}{{ ns.x }}"
    "{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "a list that doubles": _grown("[1]", "ns.x + ns.x"),
    "lists of lists that are shown": _grown("[1]", "[ns.x, ns.x]", "| string"),
    "lists of lists as JSON": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x | tojson }}",
    "lists of lists that are compared": "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "lists of lists that are sorted": "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ [ns.x, ns.y] | sort | length }}",
    "lists of lists that are printed": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | pprint }}",
    "a width of %": "{{ '%" + BIG + "d' % 1 }}",
    "a width of % by a star": "{{ '%*d' % (2000000000, 1) }}",
    "a precision of %": "{{ '%.2000000000f' % 1.5 }}",
    "a width of format": "{{ '{:2000000000}'.format(1) }}",
    "a width of a nested format": "{{ '{:{w}}'.format(1, w=2000000000) }}",
    "the filter format": "{{ '%2000000000s' | format('a') }}",
    "center": "{{ 'a'.center(2000000000) }}",
    "the filter center": "{{ 'a' | center(2000000000) }}",
    "ljust": "{{ 'a'.ljust(2000000000) }}",
    "rjust": "{{ 'a'.rjust(2000000000) }}",
    "zfill": "{{ 'a'.zfill(2000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(2000000000) }}",
    "indent": "{{ 'a\\nb' | indent(2000000000) }}",
    "JSON's indent": "{{ [[1]] | tojson(indent=2000000000) }}",
    "JSON of a range": "{{ (range(99999) | list * 100) | tojson }}{% for i in range(99999) %}"
    "{{ (range(99999) | list) | tojson }}{% endfor %}",
    "slice": "{{ range(9) | slice(2000000000) | list }}",
    "batch": "{{ range(9) | batch(2000000000, 0) | list }}",
    "sort": _often("{{ range(99999) | list | sort(reverse=true) | length }}"),
    "sort by an attribute": _often("{{ range(99999) | sort(attribute='real') | length }}"),
    "groupby": _often("{{ range(99999) | groupby('real') | length }}"),
    "unique": _often("{{ range(99999) | unique | list | length }}"),
    "sum of lists": "{{ ([range(9999) | list] * 99999) | sum(start=[]) | length }}",
    "sum of ranges": _often("{{ range(99999) | sum }}"),
    "map of map": _often("{{ range(99999) | map('string') | map('length') | list | length }}"),
    "select": _often("{{ range(99999) | select('odd') | list | length }}"),
    "reverse": _often("{{ range(99999) | list | reverse | list | length }}"),
    "replace of nothing": "{{ ('a' * 9999999) | replace('', 'b' * 9999999) }}",
    "the method replace of nothing": "{{ ('a' * 9999999).replace('', 'b' * 9999999) }}",
    "join by a long text": "{{ range(99999) | join('a' * 9999999) }}",
    "the method join": "{{ ('a' * 9999999).join(['b'] * 9999999) }}",
    "wordwrap": "{% for i in range(999) %}{{ ('a ' * 8000000) | wordwrap(1) }}{% endfor %}",
    "urlize": "{% for i in range(999) %}{{ ('http://a.b ' * 999999) | urlize }}{% endfor %}",
    "striptags": "{% for i in range(9999) %}{{ ('<' * 9999999) | striptags }}{% endfor %}",
    "escape": _often("{{ ('<' * 9999999) | e }}"),
    "title": _often("{{ ('a ' * 8000000) | title | length }}"),
    "truncate": _often("{{ ('a ' * 8000000) | truncate(9999999) | length }}"),
    "wordcount": _often("{{ ('a ' * 8000000) | wordcount }}"),
    "split": _often("{{ ('a ' * 8000000).split() | length }}"),
    "a list of a text": _often("{{ ('a ' * 8000000) | list | length }}"),
    "find": _often("{{ ('a' * 9999999).find('a' * 4999999 ~ 'b') }}"),
    "in": _often("{{ ('a' * 4999999 ~ 'b') in ('a' * 9999999) }}"),
    "an int of many digits": _often("{{ ('9' * 4000) | int * ('9' * 4000) | int }}"),
    "a product of large ints": _grown("9999999", "ns.x * ns.x"),
    "a shift by a float": "{{ 1e308 | round(2000000000) }}",
    "round": "{{ 1.5 | round(-2000000000) }}",
    "lipsum": "{{ lipsum(n=99999, min=99999, max=999999) }}",
    "cycler": "{% set c = cycler(1, 2) %}" + _often(_often("{{ c.next() }}")),
    "strftime": "{{ strftime_now('%Y' * 9999999) }}" + _often("{{ strftime_now('%c' * 99999) }}"),
    "an include": "{% include 'a' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "while it compiles": "{{ 'a' | center(2000000000) | length }}",
    "a folded filter": "{{ ('a' * 9999999) | replace('a', 'b' * 9999999) | length }}",
    "a folded join": "{{ ['a' * 9999999] | join | center(2000000000) }}",
    "deep parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "deep lists": "{{ " + "[" * 100_000 + "]" * 100_000 + " }}",
    "deep blocks": "{% if 1 %}" * 20_000 + "{% endif %}" * 20_000,
    "a long condition": "{{ " + " and ".join(["1"] * 200_000) + " }}",
    "a long sum": "{{ " + " + ".join(["a"] * 100_000) + " }}",
    "many filters": "{{ 'a'" + " | upper" * 100_000 + " }}",
    "many brackets": "{{ a" + "[0]" * 100_000 + " }}",
    "not": "{{ " + "not " * 100_000 + "1 }}",
    "many loops": "".join(f"{{% for a{n} in range(999) %}}" for n in range(15)) + "{% endfor %}" * 15,
    "attributes by map": _often("{{ [messages] * 99999 | map(attribute='0') | list | length }}"),
    "a dict that grows": _often("{{ dict(range(99999) | zip) }}"),
    "items of items": "{% for i in range(99999) %}{% for k, v in messages[0].items() %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "xmlattr": _often("{{ {'a': 'b' * 9999999} | xmlattr | length }}"),
    "urlencode": _often("{{ ('é' * 999999) | urlencode | length }}"),
    "filesizeformat": _often("{% for i in range(99999) %}{{ 9 | filesizeformat }}{% endfor %}"),
    "generation": "{% generation %}" + NESTED.format("") + "{% endgeneration %}",
    "a filter block": "{% filter center(2000000000) %}a{% endfilter %}",
    "a call block": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 40
    + "a"
    + "{% endcall %}" * 40,
    "casefold": _often("{{ ('ß' * 9999999).casefold() | length }}"),
    "encode": _often("{{ ('ß' * 9999999).encode('utf-32') | length }}"),
    "translate": _often("{{ ('a' * 9999999).translate({97: 'b' * 99}) | length }}"),
    "min and max": _often("{{ range(99999) | max }}{{ range(99999) | min }}"),
    "random": _often("{{ range(99999) | list | random }}"),
    "dictsort": _often("{{ {'b': [1] * 9999999, 'a': 2} | dictsort | length }}"),
}
