"""What can go wrong between us and a server, each with the URL in its message and what to do about it.

EndpointError
├── EndpointDown         nobody answers there
├── EndpointTimeout      no answer within --timeout
├── EndpointRefused      an HTTP error, or an error in the stream; carries the server's own words
├── NotOpenAI            something answers, but not in OpenAI's protocol
├── EndpointDropped      the connection ended in the middle of an answer
└── TokenCountMismatch   usage, counters and text do not agree on how many tokens there were, or nobody counts them
"""

from __future__ import annotations

from paceline.errors import PacelineError


class EndpointError(PacelineError):
    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{url}: {problem}")
        self.url = url


class EndpointDown(EndpointError):
    pass


class EndpointTimeout(EndpointError):
    pass


class EndpointRefused(EndpointError):
    """`said` is what the server gave as its reason."""

    def __init__(self, url: str, status: int | None, said: str, advice: str) -> None:
        heading = "an error in the stream" if status is None else f"HTTP {status}"
        super().__init__(url, f"{heading}: {said or 'no reason given'} ({advice})")
        self.status = status
        self.said = said


class NotOpenAI(EndpointError):
    pass


class EndpointDropped(EndpointError):
    pass


class TokenCountMismatch(EndpointError):
    pass
