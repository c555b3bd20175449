"""What a role's `/healthz` and `/metrics` answer, read as Prometheus reads it."""

import socket
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def fetch(url: str | None) -> tuple[int, str]:
    """Status and body; 0 where nobody answers."""
    try:
        with urllib.request.urlopen(str(url), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()
    except OSError as exc:
        return 0, str(exc)


def scrape(url: str | None) -> Samples:
    """Every sample, by name and labels."""
    status, text = fetch(f"{url}/metrics")
    assert status == 200, text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(metric: str, /, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return metric, frozenset(labels.items())


def total(samples: Samples, name: str) -> float:
    """Over all labels."""
    return sum(value for (found, _), value in samples.items() if found == name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
