"""The ollama package of PyPI."""

from checks import MODEL, QUESTION, URL, report
from ollama import Client

client = Client(host=URL)
ASKED = [{"role": "user", "content": QUESTION}]
OPTIONS = {"num_predict": 100, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}


def now() -> str:
    """Return the time."""
    return "noon"


report(
    chats=lambda: client.chat(MODEL, ASKED, options=OPTIONS).message.content,
    streams=lambda: "".join(part.message.content for part in client.chat(MODEL, ASKED, options=OPTIONS, stream=True)),
    tools=lambda: client.chat(MODEL, ASKED, tools=[now], options=OPTIONS).done,
    structured=lambda: "colour" in client.chat(MODEL, ASKED, format=SCHEMA, options=OPTIONS).message.content,
    generates=lambda: client.generate(MODEL, QUESTION, options=OPTIONS, keep_alive=-1).response,
    lists=lambda: client.list().models[0].model == MODEL and client.show(MODEL).capabilities,
)
