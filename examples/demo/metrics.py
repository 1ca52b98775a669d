"""Scrape the server's metrics endpoint, and compare its counters with what the engines saw."""

from __future__ import annotations

import urllib.request
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from examples.demo.processes import DemoError
from examples.demo.scenario import Outcome

HIT = 'radix_match_blocks_total{component="full",result="hit"}'
MISS = 'radix_match_blocks_total{component="full",result="miss"}'
INSERTED = "radix_inserted_blocks_total"
_TIMEOUT_S = 10.0


def scrape(url: str) -> dict[str, float]:
    """Every sample of the endpoint by ``name{label="value",...}``, labels sorted; DemoError if none comes."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            text = reply.read().decode()
    except OSError as error:
        raise DemoError(f"{url} cannot be read: {error}") from error
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def expected_counters(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """What the counters must say after ``outcomes``, on a server that nobody else used."""
    answers = [outcome.answer for outcome in outcomes]
    hits = sum(answer.num_hit_blocks for answer in answers)
    return {
        HIT: hits,
        MISS: sum(answer.num_asked_blocks for answer in answers) - hits,
        INSERTED: sum(answer.num_stored_blocks for answer in answers),
    }
